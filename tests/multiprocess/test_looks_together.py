"""Looks where workers compute each forward pass together: they say the same, and none is left waiting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from runs import step_lines
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhosts as mh

pytestmark = pytest.mark.multiprocess
WIDTH, CLASSES, STEPS = 6, 5, 3


class Noise(nn.Module):
    """Noise of NumPy for each sample; in training alone where it `asks`, which `forward` does not show."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.gain, self.asks = nn.Parameter(torch.ones(WIDTH)), asks

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.drawn(x)

    def drawn(self, x: Tensor) -> Tensor:
        if self.asks and not self.training:
            return torch.zeros_like(x)
        return torch.from_numpy(np.random.randn(*x.shape)).to(x)


class Chosen(nn.Module):
    """Another sample beside each, chosen by torch; on the worker alone that has this layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x[torch.randperm(len(x))]


def layers(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, CLASSES))


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


PIPELINE = mh.Pipeline(cuts="layers")
NOT_TRIED: dict[str, tuple[Any, Callable[[], nn.Module], str]] = {
    "numpy, fsdp": ("fsdp", lambda: layers(Noise(asks=False)), "the forward pass draws numpy.random"),
    "numpy, pipeline": (PIPELINE, lambda: layers(Noise(asks=False)), "the forward pass draws numpy.random"),
    "numpy in training, pipeline": (PIPELINE, lambda: layers(Noise(asks=True)), "the model asks for it"),
    "one stage draws": (PIPELINE, lambda: layers(Chosen()), "the forward pass draws torch.randperm"),
}


def normed() -> nn.Module:
    return layers(nn.BatchNorm1d(WIDTH, track_running_stats=False))


def fitted(folder: Path, strategy: Any, model: Callable[[], nn.Module]) -> tuple[list[float], dict[str, str]]:
    inputs = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    mh.Trainer(
        model=model,
        loss=entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=TensorDataset(inputs, (inputs[:, 0] * 2).long() % CLASSES), batch_size=8),
        strategy=strategy,
        run_dir=folder,
    ).fit(f"{STEPS} steps")
    said = json.loads((folder / "run.json").read_text())["same_answer"]
    return [line["loss"] for line in step_lines(folder)], said


def all_fitted(rank: int, folder: Path) -> dict[str, Any]:
    found = {name: fitted(folder / name, way, model)[1] for name, (way, model, _) in NOT_TRIED.items()}
    return {**found, "norm": fitted(folder / "norm", "fsdp", normed)}


def of_one(rank: int, folder: Path) -> list[float]:
    return fitted(folder, "auto", normed)[0]


def test_what_cannot_be_tried_is_said_by_all_and_a_norm_without_running_values_is_that_of_one(tmp_path: Path) -> None:
    one, two = run_ranks(2, all_fitted, tmp_path / "two")
    assert one == two
    for name, (_, _, because) in NOT_TRIED.items():
        assert one[name]["outcome"] == "not tried", name
        assert f"because {because}" in one[name]["text"], name
    losses, said = one["norm"]
    assert said == {"outcome": "mean", "text": ""}
    [alone] = run_ranks(1, of_one, tmp_path / "one")
    assert losses == pytest.approx(alone, rel=1e-5)
