"""Datasets of two workers are distinguished without running the script's code, and equal ones are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, random_split

from manyhosts.data.identity import are_alike, print_of, print_of_set, without_text


class Mapped(Dataset[Any]):
    """A dataset of the script's own, around another; nobody may read it."""

    def __init__(self, inner: Dataset[Any]) -> None:
        self.inner, self.loaded = inner, torch.randn(3)

    def __len__(self) -> int:
        raise AssertionError

    def __getitem__(self, index: int) -> Any:
        raise AssertionError


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise AssertionError


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    drawn = torch.randn(50, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(drawn.mul(9).to(dtype), torch.arange(50) % 3)


def split(seed: int) -> Dataset[Any]:
    return random_split(tensors(0), [40, 10], torch.Generator().manual_seed(seed))[0]


@pytest.mark.parametrize(
    "make",
    [
        tensors,
        split,
        lambda seed: Mapped(split(seed)),
        lambda seed: ConcatDataset([tensors(0), split(seed)]),
        lambda seed: Subset(tensors(seed), range(0, 50, 2)),
        lambda seed: Subset(tensors(0), torch.randperm(50, generator=torch.Generator().manual_seed(seed))),  # type: ignore[arg-type]  # as people do
        lambda seed: tensors(seed, torch.bfloat16),
        lambda seed: tensors(seed, torch.int64),
        lambda seed: tensors(seed, torch.complex64),
    ],
)
def test_what_is_drawn_otherwise_is_told_apart(make: Any) -> None:
    assert are_alike(print_of_set(make(1)), print_of_set(make(1)))
    assert not any(are_alike(print_of_set(make(1)), print_of_set(make(seed))) for seed in range(2, 12))


def test_what_is_not_known_is_not_compared() -> None:
    sparse = TensorDataset(torch.eye(4).to_sparse())
    empty = TensorDataset(torch.empty(0, 3))
    around_itself = Mapped(tensors(0))
    around_itself.inner = around_itself
    for dataset in (sparse, empty, around_itself, Stream(), [1, 2, 3]):
        assert are_alike(print_of_set(dataset), print_of_set(dataset))  # type: ignore[arg-type]  # a list will do as a dataset
    assert print_of_set(Mapped(Stream())) == []


def test_many_whole_numbers_are_compared_and_texts_are_not() -> None:
    """Tokens as a list, as a tokenizer gives them, beside the file that they are from."""
    [one, other] = ([*print_of({"tokens": [*range(first, first + 40)], "from": f"/data{first}"})] for first in (0, 1))
    again = [*print_of({"tokens": [*range(40)], "from": "/elsewhere"})]
    assert not are_alike(one, again), "of one worker over time texts count, too"
    assert are_alike(without_text(one), without_text(again))
    assert not are_alike(without_text(one), without_text(other))
    older = [each.removeprefix("whole numbers ") if isinstance(each, str) else each for each in one]
    assert older != one
    assert are_alike(older, one), "a snapshot of before"
