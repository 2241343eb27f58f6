"""A loss or a gradient that is no number: found, named with its step, and by choice left out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import step_lines
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.errors import ConfigError, TrainingError

pytestmark = pytest.mark.multiprocess


def root_of_products(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """A finite loss whose gradient is none where an input is all zeros."""
    return model(batch[0]).square().sum(1).sqrt().mean()


def train(rank: int, steps: int, run_dir: Path, kind: str, settings: dict[str, Any]) -> tuple[str, str]:
    """What `fit` gave: the hash of the weights, or the error. Sample 17, in step 2, is the bad one."""
    torch.manual_seed(3)
    inputs = torch.randn(40, 4)
    inputs[17] = math.nan if kind == "loss" else 0.0
    norm = [nn.BatchNorm1d(4)] if kind == "loss" else []
    model = nn.Sequential(nn.Linear(4, 4, bias=False), *norm, nn.Linear(4, 2, bias=False))
    trainer = mh.Trainer(
        model=model,
        loss=nn.CrossEntropyLoss() if kind == "loss" else None,
        step=None if kind == "loss" else root_of_products,
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


def test_gradient_that_is_no_number_stops_the_run_and_is_named(tmp_path: Path) -> None:
    for _, error in run_ranks(2, train, 4, tmp_path, "gradient", {"clip_gradients": 1.0}):
        assert "the norm of the gradient is nan in step 2" in error
        assert "samples [1" in error


def test_compression_does_not_go_with_leaving_out(tmp_path: Path) -> None:
    settings = {"on_bad_step": "skip", "strategy": mh.DDP(compression="int8")}
    assert "with nothing kept of it" in run_ranks(2, train_refused, tmp_path, settings)[0]


def train_refused(rank: int, run_dir: Path, settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        train(rank, 1, run_dir, "loss", settings)
    return str(caught.value)
