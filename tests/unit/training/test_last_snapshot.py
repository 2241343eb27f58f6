"""When a worker that is left may save alone: not where it lacks something, or something is yet to be done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.snapshot.fingerprint import tensor_checksums
from manyhosts.snapshot.load import load
from manyhosts.strategies.audit import Auditor
from manyhosts.strategies.ddp import DataParallel
from manyhosts.training.loop.loop import Loop
from manyhosts.training.loop.run_end import LastSnapshot
from manyhosts.training.loop.training import Training
from manyhosts.training.process_session import ProcessSession


@pytest.fixture(autouse=True)
def world_of_the_test() -> Iterator[None]:
    """The launcher that a test pretends is not the next one's."""
    yield
    ProcessSession.current().close()


class Member:
    """A worker whom the launcher has refused to continue."""

    headless = False

    def __init__(self, trainer: mh.Trainer) -> None:
        self.said: list[str] = []
        self.trainer = trainer  # its records end with it

    def saving(self) -> None:
        self.said.append("saving")


def stands(run_dir: Path) -> tuple[LastSnapshot, Member]:
    """A run that has done three steps and saved none of them but the first."""
    trainer = mh.Trainer(
        model=nn.Linear(4, 1),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=TensorDataset(torch.randn(20, 4), torch.randn(20, 1)), batch_size=4),
        run_dir=run_dir,
    )
    trainer.fit("1 steps")
    run = trainer._run
    snapshot_schedule, run_log = run.snapshot_schedule, run.run_log
    training = Training(
        components=run.components,
        settings=run.settings,
        state=run.state,
        snapshot_schedule=snapshot_schedule,
        run_log=run_log,
        survives=True,
    )
    loop = Loop(training)
    steps = run.components.batches.source.steps(run.state.position, run.state.stream)
    for _ in range(2):
        loop.stepper.train_step(steps)
        loop.step_reporter.read()
        training.done_actions = training.all_actions
    member = Member(trainer)
    run.world.membership = member
    run_log.led = True
    return LastSnapshot(loop), member


def saved(last: LastSnapshot) -> list[str]:
    return sorted(path.name for path in last.snapshot_schedule.store.folder.iterdir())


def test_worker_saves_the_step_that_it_stands_at_once(tmp_path: Path) -> None:
    last, member = stands(tmp_path)
    last.make()
    last.make()
    assert (saved(last), member.said) == (["step-00000001", "step-00000003"], ["saving", "saving"])
    assert not list(tmp_path.glob("*.lock"))


def test_best_model_is_written_before_the_snapshot_that_names_it(tmp_path: Path) -> None:
    last, _ = stands(tmp_path)
    state = last.loop.training.state
    state.best, state.best_step, state.validated_at = 0.5, 3, 3
    last.make()
    assert saved(last) == ["step-00000001", "step-00000003"]
    best = load(tmp_path / "best")
    assert best.facts.step == 3
    for name, value in last.snapshot_schedule.components.model.state_dict().items():
        assert torch.equal(best.state["model"][name], value)
    assert "validation_due" in load(tmp_path / "snapshots" / "step-00000003").state["run"]


def test_parameters_that_were_unfrozen_are_in_it(tmp_path: Path) -> None:
    last, _ = stands(tmp_path)
    components = last.snapshot_schedule.components
    components.strategy = DataParallel(mh.DDP(), components.world)
    components.strategy.place(components.model)
    components.strategy.model_watch.thawed = ["weight"]
    last.make()
    owns = load(tmp_path / "snapshots" / "step-00000003").owns.under("strategy")
    assert owns[0] == {"unfrozen": ["weight"]}


def put(path: str, value: Any) -> Callable[[LastSnapshot], None]:
    def change(last: LastSnapshot) -> None:
        provider: Any = last
        *names, name = path.split(".")
        for each in names:
            provider = getattr(provider, each)
        setattr(provider, name, value)

    return change


def be_beside_the_one_that_records(last: LastSnapshot) -> None:
    last.snapshot_schedule.store.separate_disks, last.run_log.led = True, False


def audit(last: LastSnapshot) -> None:
    components = last.snapshot_schedule.components
    components.world.is_joining = True  # else one worker is refused: nobody could compute its parts again
    components.auditor = Auditor(0.5, 0, components.world, tensor_checksums)
    components.world.is_joining = False


def compress(last: LastSnapshot) -> None:
    components = last.snapshot_schedule.components
    components.strategy = DataParallel(mh.DDP(compression="topk"), components.world)
    components.strategy.place(components.model)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (put("loop.training.state.step", 0), "not between two steps"),
        (put("loop.training.inconsistent", True), "not between two steps"),
        (put("loop.training.state.best_step", 2), "the best model, of a step before, was being written"),
        (audit, "whether it computed rightly"),
        (put("loop.training.trusted", 2), "whether it computed rightly"),
        (compress, "something of its own"),
        (put("loop.training.state.stream", {"read": [3]}), "how far the stream is read"),
        (be_beside_the_one_that_records, "another worker writes the records on this disk"),
    ],
    ids=["no step", "update", "best", "audit", "doubt", "compression", "stream", "disks"],
)
def test_nothing_is_saved_where_one_worker_does_not_hold_all_that_a_run_needs(
    change: Callable[[LastSnapshot], None], why: str, tmp_path: Path
) -> None:
    last, member = stands(tmp_path)
    change(last)
    assert why in last.why_not()
    last.make()
    assert (saved(last), member.said) == (["step-00000001"], [])
