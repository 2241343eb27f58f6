"""Streams: read in their own order, cut like any dataset, resumed where they were left."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from manyhosts.data.cut import Cut, Cuts
from manyhosts.data.order import Position
from manyhosts.data.shards import shard_of
from manyhosts.data.steps import Step
from manyhosts.data.stream import Stream
from manyhosts.errors import DataError


class Numbers(IterableDataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([index + 0.1 * random.random()]) for index in range(self.count))


class Remembering(IterableDataset[torch.Tensor]):
    """Knows where it is, and says how often it was read."""

    def __init__(self, count: int) -> None:
        self.count, self.at, self.read = count, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.count:
            self.at += 1
            self.read += 1
            yield torch.tensor([float(self.at - 1)])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def stream(dataset: IterableDataset[Any], **more: Any) -> Stream:
    return Stream(dataset, **{"batch": 4, "seed": 0, "name": "train", **more})


def take(steps: Iterator[Step], count: int) -> list[tuple[int, Position, bool, list[float]]]:
    found = []
    for _ in range(count):
        step = next(steps)
        values = [value for piece in step.pieces for value in piece.batch.flatten().tolist()]
        found.append((step.epoch, step.after, step.ends_epoch, values))
    return found


UNCUT = Cuts(Cut(1, 0, 1, None))


def test_epochs_follow_one_another_with_the_last_batch_partial() -> None:
    found = take(stream(Remembering(10)).steps(UNCUT, Position(), {}), 4)
    assert [values for *_, values in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    assert [ends for _, _, ends, _ in found] == [False, False, True, False]
    assert [after for _, after, _, _ in found] == [Position(0, 4), Position(0, 8), Position(1, 0), Position(1, 4)]


def test_drop_last_leaves_the_partial_batch_out() -> None:
    found = take(stream(Remembering(10), drop_last=True).steps(UNCUT, Position(), {}), 3)
    assert [(ends, len(values)) for _, _, ends, values in found] == [(False, 4), (True, 4), (False, 4)]


def test_workers_together_read_what_one_reads_alone() -> None:
    alone = take(stream(Numbers(10)).steps(UNCUT, Position(), {}), 4)
    parts = [
        take(stream(Numbers(10)).steps(Cuts(Cut(3, part, part + 1, None)), Position(), {}), 4) for part in range(3)
    ]
    for step, (*_, values) in enumerate(alone):
        assert [value for part in parts for value in part[step][3]] == values


@pytest.mark.parametrize("processes", [0, 1])
def test_going_on_gives_the_samples_that_would_have_come(processes: int) -> None:
    whole = take(stream(Numbers(10)).steps(UNCUT, Position(), {}), 6)
    for done in range(1, 5):
        position = whole[done - 1][1]
        assert take(stream(Numbers(10), processes=processes).steps(UNCUT, position, {}), 2) == whole[done : done + 2]


def test_dataset_with_a_state_is_not_read_again_from_the_start() -> None:
    steps = stream(Remembering(100)).steps(UNCUT, Position(), {})
    for _ in range(5):
        step = next(steps)
    resumed = Remembering(100)
    [(*_, values)] = take(stream(resumed).steps(UNCUT, step.after, step.stream), 1)
    assert values == [20, 21, 22, 23]
    assert resumed.read <= 8, "a step and the look ahead, not the 20 before"


class Once(IterableDataset[torch.Tensor]):
    """A stream that cannot be read twice, as one made of a generator."""

    def __init__(self) -> None:
        self.samples = iter([torch.zeros(1)] * 4)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.samples


def test_stream_that_is_empty_the_second_time_is_an_error() -> None:
    steps = stream(Once()).steps(UNCUT, Position(), {})
    next(steps)
    with pytest.raises(DataError, match="gave no sample in epoch 1"):
        next(steps)


class OfDatasets:
    """A stream with the method of Hugging Face's `datasets`, whose arguments stand the other way round."""

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> tuple[int, int]:
        return index, num_shards


class Ours:
    def shard(self, index: int, count: int) -> tuple[int, int]:
        return index, count


class Positional:
    def shard(self, part: int, parts: int) -> tuple[int, int]:
        return part, parts


def test_shard_is_asked_for_by_the_names_of_its_arguments() -> None:
    assert [shard_of(each(), 1, 4) for each in (OfDatasets, Ours, Positional)] == [(1, 4)] * 3


class Changing(Remembering):
    """Gives the state that it goes on changing."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.place = {"at": 0}

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place["at"] < self.count:
            self.place["at"] += 1
            yield torch.tensor([float(self.place["at"] - 1)])
        self.place["at"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = dict(state)


class Shuffled(IterableDataset[torch.Tensor]):
    """Draws its order when it is asked for an iterator, or with the first sample."""

    def __init__(self, count: int, *, late: bool) -> None:
        self.count, self.late, self.at = count, late, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.drawn() if self.late else iter(list(self.drawn()))

    def drawn(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(self.count)[self.at :].tolist():
            yield torch.tensor([float(index)])


class Kept(Shuffled):
    """As that, and goes on by a number of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 4}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def after_first(dataset: IterableDataset[Any]) -> Step:
    return next(stream(dataset).steps(UNCUT, Position(), {}))


def test_state_that_a_dataset_goes_on_changing_is_that_of_its_moment() -> None:
    first = after_first(Changing(10))
    again = next(stream(Changing(10)).steps(UNCUT, first.after, first.stream))
    assert [each for piece in again.pieces for each in piece.batch.flatten().tolist()] == [4, 5, 6, 7]
    assert again.said == ""


@pytest.mark.parametrize("late", [False, True])
def test_order_that_a_stream_draws_is_that_of_its_epoch(late: bool) -> None:
    whole = take(stream(Shuffled(12, late=late)).steps(UNCUT, Position(), {}), 6)
    torch.rand(5)
    first = after_first(Shuffled(12, late=late))
    rest = take(stream(Shuffled(12, late=late)).steps(UNCUT, first.after, first.stream), 5)
    assert rest == whole[1:]


def test_stream_that_goes_on_elsewhere_is_said_and_one_that_ends_before_is_refused() -> None:
    first = after_first(Kept(12, late=True))
    again = next(stream(Kept(12, late=True)).steps(UNCUT, first.after, first.stream))
    assert "does not continue where it was: after 4 samples another one comes" in again.said
    with pytest.raises(DataError, match="ends after 3 samples, and when 4 had been read of it there were more"):
        next(stream(Numbers(3)).steps(UNCUT, Position(0, 4), {}))
