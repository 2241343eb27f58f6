"""A loss or a gradient that is no number: found, named with its step, and by choice left out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from runs import step_lines
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError, TrainingError
from manyhosts.events import StepDone
from manyhosts.records.metrics import read
from manyhosts.records.samples import counted
from manyhosts.snapshot.load import load

pytestmark = pytest.mark.multiprocess


def root_of_products(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """A finite loss whose gradient is none where an input is all zeros."""
    return model(batch[0]).square().sum(1).sqrt().mean()


def train(rank: int, steps: int, run_dir: Path, kind: str, settings: dict[str, Any]) -> tuple[str, str]:
    """What `fit` gave: the hash of the weights, or the error. Sample 17, in step 2, is the bad one."""
    torch.manual_seed(3)
    inputs = torch.randn(40, 4)
    inputs[slice(None) if kind == "diverging" else 17] = 0.0 if kind == "gradient" else math.nan
    norm = [nn.BatchNorm1d(4)] if kind == "loss" else []
    model = nn.Sequential(nn.Linear(4, 4, bias=False), *norm, nn.Linear(4, 2, bias=False))
    trainer = mh.Trainer(
        model=model,
        loss=None if kind == "gradient" else nn.CrossEntropyLoss(),
        step=root_of_products if kind == "gradient" else None,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        data=mh.Data(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=10, shuffle=False),
        run_dir=run_dir,
        **settings,
    )
    try:
        return trainer.fit(f"{steps} steps").weights_sha256, ""
    except (TrainingError, ConfigError) as error:
        return "", str(error)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("workers", [1, 2])
def test_step_that_is_left_out_changes_nothing(workers: int, kind: str, tmp_path: Path) -> None:
    settings = {"on_bad_step": "skip", "batch_norm": "local"}
    before = run_ranks(workers, train, 1, tmp_path / "before", kind, settings)
    behind = run_ranks(workers, train, 2, tmp_path / "behind", kind, settings)
    assert before[0] == behind[0], "not even a buffer"
    further = run_ranks(workers, train, 4, tmp_path / "further", kind, settings)
    assert further[0] not in before
    lines = step_lines(tmp_path / "further")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [math.isfinite(float(line["loss"])) for line in lines] == [True, kind == "gradient", True, True]
    assert "step 2 was left out" in (tmp_path / "further" / "metrics.jsonl").read_text()


def test_virtual_workers_leave_out_the_same_step_on_any_number_of_workers(tmp_path: Path) -> None:
    settings = {"on_bad_step": "skip", "virtual_workers": 3}
    [alone] = run_ranks(1, train, 4, tmp_path / "alone", "loss", settings)
    assert run_ranks(2, train, 4, tmp_path / "together", "loss", settings) == [alone, alone]


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "virtual": {"virtual_workers": 3},
    "local-sgd": {"strategy": mh.LocalSGD(sync_every=2)},
    "diloco": {"strategy": mh.DiLoCo(sync_every=4, fragments=2)},
    "clipped": {"clip_gradients": 1.0},
    "clipped alone": {"clip_gradients": 1.0, "strategy": mh.LocalSGD(sync_every=2)},
}


def stop_and_go_on(rank: int, folder: Path, workers: int) -> dict[str, Any]:
    """Under each strategy: what the run says that meets NaN under a finite loss, and two attempts to continue."""
    found: dict[str, Any] = {}
    for name, settings in STRATEGIES.items():
        for every in ("1 step", "100 steps"):
            place = folder / f"{name}, {every}"
            kept = {"snapshots": mh.Snapshots(every=every), **settings}
            errors = [train(rank, steps, place, "gradient", kept)[1] for steps in (1, 4, 4)]
            found[place.name] = errors[1:]
    return found


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_nan_under_a_finite_loss_is_in_no_snapshot(workers: int, tmp_path: Path) -> None:
    found = run_ranks(workers, stop_and_go_on, tmp_path, workers)
    for name in found[0]:
        for error in (error for each in found for error in each[name]):
            assert "in step 2" in error or "the update of step 2 left nan in" in error or "step 3" in error, (
                name,
                error,
            )
            assert "on_bad_step" in error
        last = found[0][name][-1]
        if not name.startswith("clipped"):
            assert "the update of step 2 left nan in the parameter '0.weight'" in last or workers > 1, last
            assert "samples [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]" in last or workers > 1, last
        if name.startswith(("ddp", "virtual")):
            assert all("the update of step 2 left nan in the parameter '0.weight'" in each[name][-1] for each in found)
        kept = [load(path) for path in (tmp_path / name / "snapshots").iterdir()]
        assert [each.facts.step for each in kept] == [1], name
        for tensor in kept[0].state["model"].values():
            assert bool(tensor.isfinite().all())
        assert "step-00000001" in last, "it says what to continue from"


def test_gradient_that_is_no_number_stops_the_run_and_is_named(tmp_path: Path) -> None:
    for _, error in run_ranks(2, train, 4, tmp_path, "gradient", {"clip_gradients": 1.0}):
        assert "the norm of the gradient is nan in step 2" in error
        assert "samples [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]" in error, "those of all workers"


def test_compression_does_not_go_with_leaving_out(tmp_path: Path) -> None:
    settings = {"on_bad_step": "skip", "strategy": mh.DDP(compression="int8")}
    assert "with nothing kept of it" in run_ranks(2, train_refused, tmp_path, settings)[0]


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("workers", [1, 2])
def test_rewound_run_ends_with_the_weights_of_one_that_skipped_the_step(
    workers: int, kind: str, tmp_path: Path
) -> None:
    often = {"snapshots": mh.Snapshots(every="4 steps"), "record_samples": True}
    # sample 17 comes in step 2, 6, 10: behind the snapshots of step 0, 4 and 8
    skipped = run_ranks(workers, train, 11, tmp_path / "skip", kind, {"on_bad_step": "skip", **often})
    rewound = run_ranks(workers, train, 11, tmp_path / "rewind", kind, {"on_bad_step": "rewind", **often})
    assert rewound == skipped
    lines = read(tmp_path / "rewind" / "metrics.jsonl")
    restarts = [line for line in lines if line["event"] == "restart"]
    assert [(line["step"], line["steps_redone"], line["rewound"]) for line in restarts] == [
        (0, 1, True),
        (4, 1, True),
        (8, 1, True),
    ]
    assert f"without the samples of step {2}" in restarts[0]["how"]
    assert "samples [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]" in restarts[0]["reason"], "those of all workers"
    steps = step_lines(tmp_path / "rewind")
    assert [line["step"] for line in steps] == list(range(1, 12))
    good = [line["step"] for line in steps if math.isfinite(float(line["loss"]))]
    assert good == [1, 3, 4, 5, 7, 8, 9, 11]
    assert sorted(counted(tmp_path / "rewind" / "logs")) == good, "a step that is left out takes no samples"
    found = json.loads((tmp_path / "rewind" / "summary.json").read_text())
    assert (found["restarts"], found["steps_redone"]) == (3, 3)
    assert found["seconds_lost"] > 0


def test_steps_before_the_bad_one_have_the_same_bits_again_under_compression(tmp_path: Path) -> None:
    settings = {
        "on_bad_step": "rewind",
        "strategy": mh.DDP(compression="int8", compress_above=1),
        "snapshots": mh.Snapshots(every="3 steps"),
    }
    for reported in run_ranks(2, told_steps, tmp_path, settings):
        if reported:  # the leader's
            assert reported[:6] == [
                (1, reported[0][1]),
                (1, reported[0][1]),
                (2, reported[2][1]),
                (3, reported[3][1]),
                *reported[4:6],
            ]
            assert [step for step, _ in reported] == [1, 1, 2, 3, 4, 5, 4, 5, 6, 7]
            assert reported[4:6] == reported[6:8], "what error feedback kept was taken back, too"


def told_steps(rank: int, run_dir: Path, settings: dict[str, Any]) -> list[tuple[int, str]]:
    """Each step that was told, in order, with its loss."""
    steps: list[tuple[int, str]] = []

    def note(event: Any) -> None:
        if isinstance(event, StepDone):
            steps.append((event.step, event.loss.hex()))

    train(rank, 7, run_dir, "loss", {"listeners": [note], **settings})
    return steps


def test_run_that_goes_wrong_again_and_again_is_not_gone_back_with_for_ever(tmp_path: Path) -> None:
    for _, error in run_ranks(2, train, 20, tmp_path, "diverging", {"on_bad_step": "rewind"}):
        assert "in step 4, after 3 others after the snapshot of step 0" in error
    restarts = [line for line in read(tmp_path / "metrics.jsonl") if line["event"] == "restart"]
    assert [line["reason"].split(" (")[0] for line in restarts] == [f"the loss is nan in step {n}" for n in (1, 2, 3)]


def test_local_steps_do_not_go_with_going_back(tmp_path: Path) -> None:
    settings = {"on_bad_step": "rewind", "strategy": "local-sgd"}
    assert "one alone would find it bad" in run_ranks(2, train_refused, tmp_path, settings)[0]


def train_refused(rank: int, run_dir: Path, settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        train(rank, 1, run_dir, "loss", settings)
    dist.barrier()  # the store of the first goes with it, and the second may still be on its way in
    return str(caught.value)
