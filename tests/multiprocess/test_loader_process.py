"""Loader processes that never begin: Python up to 3.11.9 forks some, where other threads of the worker compute."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import manyhosts as mh
from manyhosts.data import loader_process

pytestmark = pytest.mark.multiprocess

SAMPLES = torch.arange(32.0).reshape(8, 4)


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> Tensor:
        return SAMPLES[index]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from SAMPLES


def step(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def fit(rank: int, run_dir: Path, dataset: Dataset[Tensor], stuck: tuple[int, ...]) -> tuple[float, int]:
    """Of the processes that are forked in it, those whose number is in `stuck` never begin. How many were forked?"""
    forked = run_dir.with_suffix(".forked")
    forked.touch()

    def begin() -> None:
        with forked.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len(forked.read_text().split()) in stuck:
            signal.pause()

    multiprocessing.set_start_method("fork", force=True)  # as in a worker
    multiprocessing.current_process().daemon = False  # or it must not have processes of its own
    os.register_at_fork(after_in_child=begin)
    loader_process.PATIENCE = 0.5
    trainer = mh.Trainer(
        model=lambda: nn.Linear(4, 1),
        step=step,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.001),
        data=mh.Data(dataset, batch_size=4, loader_workers=2),
        run_dir=run_dir,
    )
    trainer.fit("3 steps")
    processes = [int(each) for each in forked.read_text().split()]
    assert not any(psutil.pid_exists(each) for each in processes)
    return float(trainer.model.weight.detach().sum()), len(processes)


@pytest.mark.parametrize("dataset", [Rows(), Stream()], ids=["by index", "stream"])
def test_loader_process_that_does_not_begin_is_forked_once_more(dataset: Any, tmp_path: Path) -> None:
    [(weight, forked)] = run_ranks(1, fit, tmp_path / "all begin", dataset, ())
    stuck = (1, 2, forked)
    [(found, more)] = run_ranks(1, fit, tmp_path / "some never", dataset, stuck)
    assert (found, more) == (weight, forked + len({1, 2, forked}))


class Slow(Rows):
    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.2)
        return SAMPLES[index]


def test_loader_ends_for_its_worker_and_not_for_a_scheduler_that_asks_all_processes(tmp_path: Path) -> None:
    """A worker that is asked to stop needs its batches to come to the end of its step, and to save."""
    context = loader_process.context()
    loader = DataLoader(
        Slow(), batch_size=1, num_workers=1, multiprocessing_context=context, worker_init_fn=loader_process.outlive
    )
    batches = iter(loader)
    next(batches)
    [process] = batches._workers
    told = subprocess.run([sys.executable, "-c", f"import os; os.kill({process.pid}, 15)"], check=True)
    assert told.returncode == 0
    assert len(list(batches)) == len(SAMPLES) - 1
    batches = iter(loader)
    next(batches)
    [process] = batches._workers
    with contextlib.suppress(RuntimeError):  # PyTorch may hear of it first, and says that a loader was killed
        process.terminate()
        process.join(20)
    process.join(20)
    assert process.exitcode is not None
