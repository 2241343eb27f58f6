"""Everything in a snapshot is of one step, also where a step changes tensors by itself; and that it does is said."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import MANYHOSTS
from ranks import run_ranks
from runs import events, images_and_labels, network
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.events import Note, SnapshotSkipped
from manyhosts.snapshot.copy import Copying

pytestmark = pytest.mark.multiprocess


class MeanTeacher(nn.Module):
    """A student, and a teacher that nothing trains: its weights are an average of the student's."""

    def __init__(self) -> None:
        super().__init__()
        self.student = network()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        logits = self.student(images)
        with torch.no_grad():
            target = self.teacher(images)
        return nn.functional.cross_entropy(logits, labels) + nn.functional.mse_loss(logits, target)

    @torch.no_grad()
    def average(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.data, alpha=0.1)


def averaging(model: Any, batch: Any) -> Tensor:
    if model.training:
        model.average()
    return model.loss(batch)


class MaxNorm(nn.Module):
    """Keeps the norm of its trained weights small, in its forward pass and unseen by PyTorch's counters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.net[-1].weight.data.clamp_(-0.05, 0.05)
        out: Tensor = self.net(images)
        return out


def trainer_of(folder: Path, said: list[str], **more: Any) -> mh.Trainer:
    settings = {"model": MeanTeacher, "step": averaging, **more}
    return mh.Trainer(
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        data=mh.Data(TensorDataset(*images_and_labels(120)), batch_size=24),
        snapshots=mh.Snapshots(every="5 steps", keep=10),
        listeners=[
            lambda event: (
                said.append(event.text if isinstance(event, Note) else event.reason)
                if isinstance(event, Note | SnapshotSkipped)
                else None
            )
        ],
        run_dir=folder,
        **settings,
    )


def slowly(finish: Callable[[Copying], None]) -> Callable[[Copying], None]:
    """The copy of what is copied beside the next step comes only when that step is under way."""

    def later(copying: Copying) -> None:
        time.sleep(0.1)
        finish(copying)

    return later


def of_step(folder: Path, name: str, step: int) -> Path:
    """A copy of a run directory in which the run has come to `step`."""
    other = folder.with_name(name)
    if not other.exists():
        shutil.copytree(folder, other)
        for path in (other / "snapshots").iterdir():
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
    return other


def killed_and_resumed(rank: int, folder: Path, more: dict[str, Any]) -> tuple[str, str, list[str]]:
    """The weights of a run of 20 steps, and of the same resumed from the snapshot of step 15; and what was said."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copying, "finish", slowly(Copying.finish))
        whole = trainer_of(folder / "whole", said, **more).fit("20 steps")
    path = folder / "again"
    if rank == 0:
        of_step(folder / "whole", "again", 15)
        (folder / "ready").touch()
    while not (folder / "ready").exists():
        time.sleep(0.01)
    again = trainer_of(path, said, **more).fit("20 steps")
    assert again.steps == 20
    return whole.weights_sha256, again.weights_sha256, said


@pytest.mark.parametrize("workers", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_teacher_that_step_averages_is_in_a_snapshot_as_it_was_at_that_step(workers: int, tmp_path: Path) -> None:
    for whole, again, _ in run_ranks(workers, killed_and_resumed, tmp_path, {}):
        assert whole == again
    [resumed] = [line for line in events(tmp_path / "again", "start") if line["resumed_from"]]
    assert resumed["resumed_from"].endswith("step-00000015")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_trained_weights_that_the_forward_pass_changes_cost_one_snapshot_and_are_never_of_two_steps(
    workers: int, tmp_path: Path
) -> None:
    more = {"model": MaxNorm, "step": None, "loss": nn.CrossEntropyLoss()}
    for whole, again, _ in run_ranks(workers, killed_and_resumed, tmp_path, more):
        assert whole == again
    [skipped] = events(tmp_path / "whole", "skipped")
    assert skipped["step"] == 5
    assert "net.4.weight was changed while the next step was computed" in skipped["reason"]


@pytest.mark.parametrize(("workers", "micro"), [(1, None), (1, 3), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_that_a_step_changes_tensors_of_the_model_is_said_with_what_to_do(
    workers: int, micro: int | None, tmp_path: Path
) -> None:
    said, *_ = [text for _, _, text in run_ranks(workers, killed_and_resumed, tmp_path, {"micro_batch_size": micro})]
    [first, second] = [text for text in said if "the step changes the parameter teacher.0.weight and 3 more" in text]
    pieces = 1 if micro is None else 8 // workers
    assert f"here {pieces} in a step" in first
    assert "callbacks=[…]" in first
    assert first == second, "said again by the run that resumes"


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
import manyhosts as mh
from test_one_moment import MeanTeacher, averaging
from runs import images_and_labels
from torch.utils.data import TensorDataset

marker, calls = Path(sys.argv[1]), 0


def step(model, batch):
    global calls
    calls += 1
    if int(os.environ["RANK"]) == 1 and calls == 9 and sys.argv[2] == "killed" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return averaging(model, batch) if sys.argv[3] == "step" else model.loss(batch)


class Teach(mh.Callback):
    def after_step(self, moment):
        moment.model.average()


result = mh.Trainer(
    model=MeanTeacher,
    step=step,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    data=mh.Data(TensorDataset(*images_and_labels(120)), batch_size=24),
    callbacks=[Teach(), mh.EMA(0.9)] if sys.argv[3] == "callback" else [],
).fit("16 steps")
"""


@pytest.mark.parametrize("how", ["step", "callback"])
def test_teacher_is_averaged_once_in_a_step_that_a_lost_worker_had_broken_off(how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    paths = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    found = {}
    for kind in ("whole", "killed"):
        command = [*MANYHOSTS, "run", "--workers", "3", "--run-dir", str(tmp_path / kind), str(script)]
        done = subprocess.run(
            [*command, str(tmp_path / "marker"), kind, how],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found[kind] = json.loads((tmp_path / kind / "summary.json").read_text())
    assert (tmp_path / "marker").exists()
    assert (found["whole"]["restarts"], found["killed"]["restarts"]) == (0, 1)
    [restart] = events(tmp_path / "killed", "restart")
    assert restart["step"] > 4, "in the middle: what looks at the loss call is not counted"
    weights = [mh.load(tmp_path / kind) for kind in ("whole", "killed")]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-5, atol=1e-6)
