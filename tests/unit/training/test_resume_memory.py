"""What a resume has in memory of a snapshot next to the run's own."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.records.tensor_parts import Box
from manyhosts.snapshot.slices import Ahead
from manyhosts.snapshot.tensors import TensorFile

MODEL_BYTES = (64 * 64 + 64) * 4


@dataclass
class Alive:
    """Bytes of tensors that were read from snapshots."""

    now: int = 0
    most: int = 0
    all: int = 0

    def add(self, tensor: torch.Tensor) -> None:
        self.now, self.all = self.now + tensor.nbytes, self.all + tensor.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self.let_go, tensor.nbytes)

    def let_go(self, size: int) -> None:
        self.now -= size


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Alive:
    found, read, take = Alive(), TensorFile.read, Ahead.take

    def taken(ahead: Ahead, name: str, box: Box) -> torch.Tensor | None:
        if (tensor := take(ahead, name, box)) is not None:
            found.add(tensor)
            found.most = max(found.most, found.now + sum(each.nbytes for each in ahead.blocks.values()))
        return tensor

    def reported(file: TensorFile, name: str, place: Any = None) -> torch.Tensor:
        tensor = read(file, name, place)
        found.add(tensor)
        return tensor

    monkeypatch.setattr(TensorFile, "read", reported)
    monkeypatch.setattr(Ahead, "take", taken)
    return found


def make_trainer(run_dir: Path) -> mh.Trainer:
    inputs = torch.linspace(-1, 1, 12 * 64).reshape(12, 64)
    return mh.Trainer(
        model=lambda: nn.Linear(64, 64),
        loss=nn.MSELoss(),
        optimizer=torch.optim.Adam,
        data=mh.Data(TensorDataset(inputs, inputs), batch_size=6),
        run_dir=run_dir,
    )


def test_resume_has_each_tensor_of_the_snapshot_once_next_to_its_own(tmp_path: Path, alive: Alive) -> None:
    make_trainer(tmp_path).fit("2 steps")
    assert alive.all == 0
    make_trainer(tmp_path).fit("3 steps")
    assert alive.all > 3 * MODEL_BYTES  # the model, and two tensors of Adam for each of its own
    assert alive.most < 3.5 * MODEL_BYTES, "all are read before any is used, and none is copied"


def test_weights_of_a_run_are_read_without_its_optimizer(tmp_path: Path, alive: Alive) -> None:
    make_trainer(tmp_path).fit("2 steps")
    assert mh.load(tmp_path, weights="last").keys() == {"weight", "bias"}
    assert alive.all == MODEL_BYTES
