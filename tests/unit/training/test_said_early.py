"""What a snapshot could not keep, schedules that end early, and hooks that see a part of a gradient: said in time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import events
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError


class Lookahead(torch.optim.SGD):
    """Keeps its slow weights where no `state_dict` has them."""

    slow: list[Tensor] | None = None
    rounds = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        self.rounds += 1
        parameters = self.param_groups[0]["params"]
        self.slow = self.slow or [each.clone() for each in parameters]


class InState(torch.optim.SGD):
    """Keeps the same where it belongs."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for each in self.param_groups[0]["params"]:
            self.state[each].setdefault("slow", each.clone())


class OwnSchedule:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.9


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs().float()


def clamped() -> nn.Module:
    model = nn.Linear(6, 2)
    model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]
    return model


def masked() -> nn.Module:
    model = nn.Linear(6, 2)
    model.weight.register_hook(lambda gradient: gradient * (torch.arange(6) > 2))  # type: ignore[no-untyped-call]
    return model


def fit(run_dir: Path, **more: Any) -> list[str]:
    """The notes of a run of four steps."""
    asked: dict[str, Any] = {
        "model": lambda: nn.Linear(6, 2),
        "loss": nn.MSELoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05),
        "data": mh.Data(train=TensorDataset(torch.randn(16, 6), torch.randn(16, 2)), batch_size=4),
        "run_dir": run_dir,
    }
    mh.Trainer(**{**asked, **more}).fit("4 steps")
    return [line["text"] for line in events(run_dir, "note")]


def test_dtype_that_no_snapshot_keeps_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weight is of complex128, which no snapshot can keep"):
        fit(tmp_path, model=Wide)


def test_schedule_without_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the schedule is a OwnSchedule without state_dict\(\)"):
        fit(tmp_path, schedule=OwnSchedule)


def test_schedule_that_is_too_short_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the schedule goes no further: Tried to step 3 times"):
        fit(tmp_path, schedule=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2))


def test_optimizer_that_keeps_something_beside_its_state_is_told_so(tmp_path: Path) -> None:
    notes = fit(tmp_path / "beside", optimizer=lambda params: Lookahead(params, lr=0.05))
    assert any("the optimizer keeps rounds, slow as attributes" in note for note in notes), notes
    notes = fit(tmp_path / "inside", optimizer=lambda params: InState(params, lr=0.05))
    assert not any("the optimizer keeps" in note for note in notes), notes


def test_hook_on_a_gradient_is_named_where_a_batch_is_cut_over_workers(tmp_path: Path) -> None:
    notes = fit(tmp_path / "cut", model=masked, virtual_workers=2)
    assert any("hooks on the gradient of weight see the part of it" in note for note in notes), notes
    assert not any("hooks on the gradient" in note for note in fit(tmp_path / "whole", model=clamped))
    with pytest.raises(ConfigError, match="the gradient of 'weight' over some samples is not the mean"):
        fit(tmp_path / "refused", model=clamped, virtual_workers=2)


@pytest.mark.parametrize(("samples", "is_said"), [(6, True), (8, False)])
def test_batch_that_is_larger_than_the_train_set_is_said(samples: int, is_said: bool, tmp_path: Path) -> None:
    trainer = mh.Trainer(
        model=nn.Linear(6, 2), loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=TensorDataset(torch.randn(samples, 6), torch.randn(samples, 2)), batch_size=8),
        run_dir=tmp_path,
    )  # fmt: skip
    trainer.fit("1 epoch")
    reported = [line["text"] for line in events(tmp_path, "note")]
    assert ("the train set has 6 samples, and a batch 8: an epoch is one step of all of it" in reported) == is_said


@pytest.mark.parametrize(("warmup", "is_said"), [("4 steps", True), ("3 steps", False)])
def test_warm_up_that_is_longer_than_the_run_is_said(warmup: str, is_said: bool, tmp_path: Path) -> None:
    trainer = mh.Trainer(
        model=nn.Linear(6, 2), loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=TensorDataset(torch.randn(8, 6), torch.randn(8, 2)), batch_size=8),
        warmup=warmup, run_dir=tmp_path,
    )  # fmt: skip
    trainer.fit("3 epochs")
    text = "the warm-up takes 4 steps and the run 3: the learning rate never comes to its full value"
    assert (text in [line["text"] for line in events(tmp_path, "note")]) == is_said


PLAIN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import manyhosts as mh
mh.Trainer(
    model=lambda: nn.Linear(2, 1), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    data=mh.Data(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4), run_dir="run",
).fit("2 steps")
"""


@pytest.mark.parametrize(("reads", "said"), [("", True), ("import argparse\n", False)], ids=["no", "yes"])
def test_options_of_run_after_a_script_that_reads_none_are_said_to_have_no_effect(
    reads: str, said: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(reads + PLAIN)
    words = ["train.py", "--workers", "2", "--set", "lr=0.5"]
    subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, capture_output=True, timeout=200)
    notes = [line["text"] for line in events(tmp_path / "run", "note")]
    expected = (
        "--workers, --set had no effect, for train.py reads no arguments; to have it, type: "
        "manyhosts run --workers 2 --set lr=0.5 train.py"
    )
    assert notes == [expected] * said
