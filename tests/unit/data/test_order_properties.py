"""The order, its cut over workers and parts, and the arithmetic of positions, for any sizes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from manyhosts.data.cut import Cut
from manyhosts.data.order import Order, Position, bounds, permutation
from manyhosts.data.steps import PiecePlan, plan_pieces

sizes = st.integers(1, 200)
batches = st.integers(1, 60)
seeds = st.integers(0, 2**63 - 1)


def cut_over(parts: int, workers: int, micro_batch: int | None = None, *, level: bool = False) -> list[Cut]:
    return [Cut(parts, *bounds(parts, workers, worker), micro_batch, level) for worker in range(workers)]


def plain(piece: PiecePlan) -> tuple[int, int, list[int], float]:
    return piece.part, piece.micro, piece.indices.tolist(), piece.weight


@given(sizes, seeds, st.integers(0, 1000))
def test_epoch_takes_every_sample_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(length, seed=seed, epoch=epoch).tolist()) == list(range(length))


@given(st.integers(50, 200), seeds, st.integers(0, 1000))
def test_epochs_and_seeds_have_orders_of_their_own(length: int, seed: int, epoch: int) -> None:
    here = permutation(length, seed=seed, epoch=epoch)
    assert not np.array_equal(here, permutation(length, seed=seed, epoch=epoch + 1))
    assert not np.array_equal(here, permutation(length, seed=seed ^ 1 << 40, epoch=epoch))
    assert np.array_equal(here, permutation(length, seed=seed, epoch=epoch))


@given(st.integers(0, 300), st.integers(1, 40))
def test_parts_are_contiguous_whole_and_even(count: int, parts: int) -> None:
    cut = [bounds(count, parts, index) for index in range(parts)]
    assert [begin for begin, _ in cut] == [0, *(end for _, end in cut[:-1])]
    assert cut[-1][1] == count
    lengths = [end - begin for begin, end in cut]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True), "the first ones get one more"


@given(st.integers(0, 100), st.integers(1, 20), st.data())
def test_pieces_are_the_same_whoever_computes_them(samples: int, parts: int, data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, parts))
    micro_batch = data.draw(st.none() | st.integers(1, 30))
    level = data.draw(st.booleans()) and samples > 0
    indices = np.arange(1000, 1000 + samples)
    [alone] = [plan_pieces(indices, cut) for cut in cut_over(parts, 1, micro_batch, level=level)]
    together = [
        piece for cut in cut_over(parts, workers, micro_batch, level=level) for piece in plan_pieces(indices, cut)
    ]
    assert [plain(piece) for piece in together] == [plain(piece) for piece in alone]


@given(st.integers(1, 100), st.integers(1, 20), st.none() | st.integers(1, 30), st.booleans())
def test_pieces_of_a_step_are_its_samples_once_and_in_order(
    samples: int, parts: int, micro_batch: int | None, level: bool
) -> None:
    pieces = plan_pieces(np.arange(samples), Cut(parts, 0, parts, micro_batch, level))
    real = [piece for piece in pieces if piece.weight]
    assert [index for piece in real for index in piece.indices.tolist()] == list(range(samples))
    assert all(len(piece.indices) <= (micro_batch or samples) for piece in real)
    assert sum(Fraction(len(piece.indices), samples) for piece in real) == 1
    assert all(piece.weight == len(piece.indices) / samples for piece in real)
    if level:
        lengths = {sum(piece.part == part for piece in pieces) for part in range(parts)}
        assert len(lengths) == 1, "every part has the same number of pieces"


@given(sizes, batches, st.booleans(), st.booleans(), seeds)
def test_walk_through_epochs_takes_every_sample_of_each_once(
    length: int, batch: int, shuffle: bool, drop_last: bool, seed: int
) -> None:
    order = Order(length, batch=batch, seed=seed, shuffle=shuffle, drop_last=drop_last)
    if not order.steps_per_epoch:
        return  # refused before anything is trained
    position = Position()
    for epoch in range(2):
        taken: list[int] = []
        for _ in range(order.steps_per_epoch):
            assert position.epoch == epoch
            indices = order.at(position).tolist()
            assert 0 < len(indices) <= batch
            taken += indices
            position = order.after(position)
        assert len(set(taken)) == len(taken) == order.used
        assert len(taken) == (length // batch * batch if drop_last else length)
    assert position == Position(2, 0)


@given(sizes, batches, seeds, st.integers(0, 30), st.integers(0, 30))
def test_run_that_goes_on_from_any_position_takes_the_same_steps(
    length: int, batch: int, seed: int, before: int, further: int
) -> None:
    def walk(order: Order, position: Position, steps: int) -> tuple[Position, list[list[int]]]:
        taken = []
        for _ in range(steps):
            taken.append(order.at(position).tolist())
            position = order.after(position)
        return position, taken

    whole, taken = walk(Order(length, batch=batch, seed=seed), Position(), before + further)
    stopped, _ = walk(Order(length, batch=batch, seed=seed), Position(), before)
    resumed, again = walk(Order(length, batch=batch, seed=seed), stopped, further)
    assert (resumed, again) == (whole, taken[before:])
    epoch, step = divmod(before, Order(length, batch=batch, seed=seed).steps_per_epoch)
    assert stopped == Position(epoch, step * batch), "a position follows from the number of steps"


def test_order_that_goes_from_epoch_to_epoch_and_back_has_the_samples_of_one_that_begins_there() -> None:
    order = Order(20, batch=20, seed=3)
    for epoch in (0, 1, 5, 1, 0):
        assert np.array_equal(order.at(Position(epoch, 0)), Order(20, batch=20, seed=3).at(Position(epoch, 0)))
        assert np.array_equal(order.at(Position(epoch, 0)), permutation(20, seed=3, epoch=epoch))
