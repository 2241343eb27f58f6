"""Trainers one after another in one process, as of a loop over folds: what one of them had is gone with it."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh

pytestmark = pytest.mark.multiprocess
INPUTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
FOLDS = 5


def fold(folder: Path, number: int) -> weakref.ref[nn.Module]:
    trainer = mh.Trainer(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        loss=lambda outputs, _targets: outputs.square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        data=mh.Data(train=TensorDataset(INPUTS, INPUTS), test=TensorDataset(INPUTS, INPUTS), batch_size=4),
        run_dir=folder / str(number),
    )
    trainer.fit("3 steps")
    trainer.test()
    return weakref.ref(trainer.model)


def folds(rank: int, folder: Path) -> list[tuple[int, int, int]]:
    """After each: threads, open files, and models of all so far that are still there."""
    models, found = [], []
    for number in range(FOLDS):
        models.append(fold(folder, number))
        alive = sum(each() is not None for each in models)
        found.append((threading.active_count(), len(os.listdir("/proc/self/fd")), alive))
    if rank == 0:
        assert not [each for each in folder.glob("*/lock.json")], "others may run there"
        lines = (folder / "0" / "metrics.jsonl").read_text().splitlines()
        assert sum('"event": "test"' in line for line in lines) == 1, "its test came before its end"
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_folds_leave_no_thread_no_file_and_no_model_behind(workers: int, tmp_path: Path) -> None:
    for found in run_ranks(workers, folds, tmp_path):
        threads, files, alive = zip(*found, strict=True)
        # Each of three more would leave some; one that just ends may still have its thread, or its connection.
        assert threads[-1] <= threads[1] + 2
        assert files[-1] <= files[1] + 2
        assert max(alive) <= 1, "the next one lets go of those before it"
