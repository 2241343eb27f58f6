"""Cuts by speed: shares that are done soonest, and a change of the cut that loses and repeats nothing."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from manyhosts.data.cut import Cut, Cuts, shared_out
from manyhosts.data.fetch import Fetcher
from manyhosts.data.order import Order, Position
from manyhosts.data.steps import Loader, Step, plan_pieces

seconds = st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=6)


@given(seconds, st.integers(0, 300))
def test_everybody_has_a_share_and_all_of_it_is_shared_out(each_s: list[float], more: int) -> None:
    taken = shared_out(len(each_s) + more, each_s)
    assert sum(taken) == len(each_s) + more
    assert min(taken) >= 1


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=3), st.integers(3, 12))
def test_no_other_shares_are_done_sooner(each_s: list[float], count: int) -> None:
    def done_s(shares: tuple[int, ...] | list[int]) -> float:
        return max(share * each for share, each in zip(shares, each_s, strict=True))

    others = [each for each in product(range(1, count + 1), repeat=len(each_s)) if sum(each) == count]
    assert done_s(shared_out(count, each_s)) <= min(map(done_s, others)) * (1 + 1e-9)


def test_shares_go_by_speed() -> None:
    assert shared_out(24, [1.0, 2.0]) == [16, 8]
    assert shared_out(8, [1.0, 1.0, 1e9]) in ([4, 3, 1], [3, 4, 1])
    assert shared_out(3, [5.0, 1.0, 1.0]) == [1, 1, 1]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 120), st.sampled_from([None, 3]))
def test_parts_of_unequal_sizes_are_the_batch_in_order(sizes: list[int], count: int, micro: int | None) -> None:
    workers = len(sizes)
    cuts = [Cut(workers, rank, rank + 1, micro, level=True, sizes=tuple(sizes)) for rank in range(workers)]
    ends = [cuts[0].bounds(count, part) for part in range(workers)]
    assert ends[0][0] == 0
    assert ends[-1][1] == count
    assert all(one[1] == other[0] for one, other in pairwise(ends))
    pieces = [plan_pieces(np.arange(count), cut) for cut in cuts]
    assert len({len(each) for each in pieces}) == 1, "collectives stand inside the model"
    real = [piece for each in pieces for piece in each if piece.weight]
    assert np.concatenate([piece.indices for piece in real]).tolist() == list(range(count))
    assert sum(piece.weight for piece in real) == pytest.approx(1)


class Counting(Dataset[torch.Tensor]):
    """Says in a file what was read."""

    def __init__(self, samples: int, folder: Any) -> None:
        self.samples, self.file = samples, folder / "read"

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.file.open("a") as file:
            file.write(f"{index}\n")
        return torch.tensor(index)


def indices(steps: list[Step]) -> list[list[int]]:
    return [sorted(index for piece in step.fetched() for index in piece.batch.tolist()) for step in steps]


@pytest.mark.parametrize("processes", [0, 2])
def test_change_begins_where_nobody_has_asked_and_nothing_is_fetched_twice(processes: int, tmp_path: Any) -> None:
    steps, before, batch, samples = 12, 4, 6, 72
    by_worker, read = [], Counter[str]()
    cuts = [Cuts(Cut(2, rank, rank + 1, None)) for rank in range(2)]
    folders = [tmp_path / str(rank) for rank in range(2)]
    walks = []
    for own, folder in zip(cuts, folders, strict=True):
        folder.mkdir()
        fetcher = Fetcher(Counting(samples, folder), seed=0, name="train", collate=None)
        order = Order(samples, batch=batch, seed=0)
        walks.append(Loader(fetcher, processes=processes, pin=False).steps(order, own, Position()))
    begun = [indices(list(islice(walk, before))) for walk in walks]
    begin = max(own.reached for own in cuts)
    assert begin >= Position(0, before * batch)
    assert begin > Position(0, before * batch) or not processes, "loader processes have asked for more"
    for rank, own in enumerate(cuts):
        own.change(begin, Cut(2, rank, rank + 1, None, sizes=(5, 1)))
    by_worker = [one + indices(list(islice(walk, steps - before))) for one, walk in zip(begun, walks, strict=True)]
    for number, (one, other) in enumerate(zip(*by_worker, strict=True)):
        expected = Order(samples, batch=batch, seed=0).at(Position(0, number * batch))
        assert sorted(one + other) == sorted(expected.tolist())
        assert (len(one), len(other)) == ((3, 3) if Position(0, number * batch) < begin else (5, 1))
    del walks
    for folder in folders:
        read.update((folder / "read").read_text().split())
    assert set(read) >= {str(index) for index in range(samples)}
    taken = [index for each in by_worker for one in each for index in one]
    assert len(taken) == len(set(taken)) == samples
    if not processes:
        assert set(read.values()) == {1}


def test_change_where_something_was_planned_is_refused() -> None:
    cuts = Cuts(Cut(2, 0, 1, None))
    cuts.plan(Position(0, 8), Position(0, 16))
    with pytest.raises(AssertionError, match="planned already"):
        cuts.change(Position(0, 8), Cut(2, 0, 1, None, sizes=(1, 7)))
