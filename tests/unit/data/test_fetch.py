"""Fetching: the same samples whichever way they are read, each with random numbers of its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from manyhosts.data import randomness
from manyhosts.data.cut import Cut, Cuts
from manyhosts.data.fetch import Fetcher, rows_of
from manyhosts.data.order import Order, Position
from manyhosts.data.steps import Loader, mapped
from manyhosts.errors import DataError


class Drawing(Dataset[torch.Tensor]):
    """Every sample is random numbers of all three generators."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


class DrawingAtOnce(Drawing):
    asked = 0

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.asked += 1
        return [self[index] for index in indices]


class Quiet(DrawingAtOnce):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def indices(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def fetcher(dataset: Dataset[Any], **more: Any) -> Fetcher:
    return Fetcher(dataset, seed=3, name="train", **more)


class Lacking(Quiet):
    """Leaves out what it cannot read."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices if index != 8]


def test_dataset_that_gives_fewer_samples_than_it_is_asked_for_is_named() -> None:
    with pytest.raises(DataError, match=r"asked for 3 samples of the train set, \[7, 8, 9\], it gave 2") as error:
        fetcher(Lacking())(0, indices(7, 8, 9))
    assert error.value.where == "Lacking.__getitems__"


def test_sample_draws_the_same_numbers_in_any_company() -> None:
    together = fetcher(Drawing())(5, indices(7, 8, 9))
    alone = fetcher(Drawing())(5, indices(8))
    assert torch.equal(together[1:2], alone)


def test_sample_draws_other_numbers_in_another_epoch_and_under_another_seed() -> None:
    first = fetcher(Drawing())(0, indices(7))
    assert not torch.equal(first, fetcher(Drawing())(1, indices(7)))
    assert not torch.equal(first, Fetcher(Drawing(), seed=4, name="train")(0, indices(7)))


def test_fetching_leaves_the_generators_as_they_were() -> None:
    randomness.seed_all(1)
    before = (torch.rand(()).item(), np.random.rand(), random.random())
    randomness.seed_all(1)
    fetcher(Drawing())(0, indices(1, 2, 3))
    assert (torch.rand(()).item(), np.random.rand(), random.random()) == before


def test_dataset_that_draws_when_asked_at_once_is_read_one_by_one() -> None:
    dataset = DrawingAtOnce()
    fetch = fetcher(dataset)
    assert torch.equal(fetch(0, indices(4, 5)), fetcher(Drawing())(0, indices(4, 5)))
    fetch(0, indices(4, 5))
    assert dataset.asked == 1


def test_dataset_that_draws_nothing_is_asked_at_once() -> None:
    dataset = Quiet()
    fetch = fetcher(dataset)
    for _ in range(3):
        assert fetch(0, indices(4, 5)).tolist() == [[4.0], [5.0]]
    assert dataset.asked == 3


def test_tensors_are_indexed_as_they_would_be_collated() -> None:
    plain = TensorDataset(torch.arange(20).reshape(10, 2), torch.arange(10))
    nested = Subset(Subset(plain, [9, 7, 5, 3]), [2, 0])
    quick = fetcher(nested)(0, indices(1, 0))
    slow = fetcher(nested, collate=torch.utils.data.default_collate)(0, indices(1, 0))
    assert (
        [tensor.tolist() for tensor in quick] == [tensor.tolist() for tensor in slow] == [[[18, 19], [10, 11]], [9, 5]]
    )


def test_samples_that_do_not_fit_together_are_named() -> None:
    ragged = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(DataError, match=r"samples \[0, 1\] of the train set cannot be put into one batch"):
        fetcher(ragged)(0, indices(0, 1))  # type: ignore[arg-type]  # a list is map-style enough


@pytest.mark.parametrize("processes", [0, 2])
def test_steps_are_the_same_with_and_without_loader_processes(processes: int) -> None:
    order = Order(40, batch=16, seed=1)
    loader = Loader(fetcher(Drawing()), processes=processes, pin=False)
    steps = loader.steps(order, Cuts(Cut(3, 1, 2, None)), Position(0, 16))
    found = [next(steps) for _ in range(4)]
    expected = Loader(fetcher(Drawing()), processes=0, pin=False).steps(
        order, Cuts(Cut(3, 1, 2, None)), Position(0, 16)
    )
    for step in found:
        other = next(expected)
        assert (step.epoch, step.after, step.samples, step.ends_epoch) == (
            other.epoch,
            other.after,
            other.samples,
            other.ends_epoch,
        )
        assert torch.equal(step.pieces[0].batch, other.pieces[0].batch)
    steps.close()


def test_map_over_a_batch_keeps_its_structure() -> None:
    batch = {"a": [torch.ones(1), "word"], "b": (torch.ones(2), 3)}
    doubled = mapped(batch, lambda tensor: tensor * 2)
    assert doubled["a"][0].item() == 2
    assert doubled["a"][1] == "word"
    assert doubled["b"][0].tolist() == [2, 2]
    assert isinstance(doubled["b"], tuple)


def test_seeds_of_neighbouring_addresses_have_nothing_in_common() -> None:
    seeds = {randomness.seed_at(0, epoch, index) for epoch in range(30) for index in range(30)}
    assert len(seeds) == 900
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == 900


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(9, 3, 4, 5),
        torch.randn(9, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(9, 4).t().contiguous().t(),
        torch.randn(1, 3).expand(9, 3),
        torch.arange(9),
        torch.randn(9, 2, dtype=torch.complex64).conj(),
        torch.randn(9, 2).to(torch.float8_e4m3fn),
        torch.zeros(9, 0),
    ],
    ids=["rows", "channels last", "columns", "expanded", "numbers", "conjugate", "eight bits", "empty"],
)
def test_rows_lie_in_memory_as_indexing_gives_them(tensor: torch.Tensor) -> None:
    chosen = torch.tensor([7, 0, 3, 3])
    taken, indexed = rows_of(tensor, chosen), tensor[chosen]
    assert (taken.shape, taken.stride(), taken.dtype) == (indexed.shape, indexed.stride(), indexed.dtype)
    assert torch.equal(taken.to(torch.complex64), indexed.to(torch.complex64))
