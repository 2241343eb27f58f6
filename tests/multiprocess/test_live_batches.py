"""`micro_batch_size` bounds what lies in memory: of all batches of a step no more than two live at a time."""

from __future__ import annotations

import multiprocessing
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import manyhosts as mh

pytestmark = pytest.mark.multiprocess


class Read(Dataset[Any]):
    """Samples that are read one by one."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.full((4,), float(index))
        return inputs / 96, inputs[:1]


def most_alive(rank: int, run_dir: Path, settings: dict[str, Any]) -> tuple[int, int, float]:
    """The most batches that were alive at once, how many there were, and the share of the time spent on data."""
    alive: set[int] = set()
    most, count = 0, 0

    def step(model: nn.Module, batch: list[Tensor]) -> Tensor:
        nonlocal most, count
        if model.training:  # and not the look at what the loss is a mean over
            count += 1
            alive.add(count)
            weakref.finalize(batch[0], alive.discard, count)
            if count > 48:  # in the first step the batches that were looked at are still there
                most = max(most, len(alive))
        return (model(batch[0]) - batch[1]).square().mean()

    inputs = torch.arange(96.0)[:, None].repeat(1, 4) / 96
    dataset: Any = Read() if settings["read"] else TensorDataset(inputs, 96 * inputs[:, :1])
    trainer = mh.Trainer(
        model=lambda: nn.Linear(4, 1),
        step=step,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        data=mh.Data(dataset, batch_size=48, loader_workers=settings["loaders"]),
        micro_batch_size=1,
        virtual_workers=settings["virtual"],
        run_dir=run_dir,
    )
    trainer.fit("2 epochs")
    return most, count, float(trainer.model.weight.detach().sum())


CASES = [
    {"read": False, "loaders": 0, "virtual": None},
    {"read": True, "loaders": 0, "virtual": 3},
]


def in_turn(rank: int, folder: Path) -> list[tuple[int, int, float]]:
    return [most_alive(rank, folder / str(number), settings) for number, settings in enumerate(CASES)]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_few_batches_are_in_memory_at_a_time(workers: int, tmp_path: Path) -> None:
    weights = set()
    for settings, *found in zip(CASES, *run_ranks(workers, in_turn, tmp_path), strict=True):
        assert max(most for most, _, _ in found) <= 2, settings
        assert sum(count for _, count, _ in found) == 4 * 48, settings
        weights |= {round(weight, 5) for _, _, weight in found}
    assert len(weights) == 1, "whoever fetches, and when"


@pytest.mark.parametrize("loaders", [2, "auto"])
def test_loader_processes_fetch_ahead_and_batches_are_let_go_all_the_same(loaders: Any, tmp_path: Path) -> None:
    before = multiprocessing.active_children()
    most, count, weight = most_alive(0, tmp_path / "ahead", {"read": True, "loaders": loaders, "virtual": None})
    assert multiprocessing.active_children() == before, "they end with the fit that they fetched for"
    assert (most <= 2, count) == (True, 4 * 48)
    assert weight == most_alive(0, tmp_path / "here", CASES[0])[2]
