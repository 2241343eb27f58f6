"""What a worker holds at most, by arithmetic that can be done on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyhosts.planner.memory import ModelBytes, in_parts, uncut

MODEL = ModelBytes(
    parameters=1000, gradients=1000, optimizer=2000, buffers=16, activations=30, backward=5, update=20,
    units=(300, 300, 300, 100), tail=40, on_cpu=False,
)  # fmt: skip
"""Three blocks, and a rest of 100 bytes, of which 40 stand behind them."""


@pytest.mark.parametrize(
    ("zero", "several", "most"),
    [
        # When the second block is computed: activations of the third, gradients of the tail, the first block's summed
        # part and what was sent of it, this block's gradients; the rest and two blocks gathered.
        (3, False, 10 + 40 + 75 + 300 + 300 + 700),
        (2, False, 10 + 40 + 75 + 300 + 300 + 700),
        (1, False, 10 + 40 + 75 + 300 + 300 + 700),
        # When the first one is: parts of all gradients are there from before, and everything is gathered.
        (2, True, 20 + 40 + 250 + 300 + 1000),
        # When the pass begins: all gradients wait whole.
        (1, True, 35 + 1000 + 1000),
    ],
)
def test_most_is_held_somewhere_in_the_backward_pass(zero: int, several: bool, most: int) -> None:
    held = in_parts(replace(MODEL, several=several), shard=4, workers=4, zero=zero, gathered=1.0)
    assert (held.parameters, held.gradients, held.optimizer, held.activations) == (250, 250, 500, 30)
    assert held.total == 250 + 500 + 16 + most


def test_what_is_not_there_together_is_not_counted_twice() -> None:
    """Where activations are most of it, no gradient is there yet."""
    deep = replace(MODEL, units=(*[1] * 999, 1), tail=0, activations=10_000)
    held = in_parts(deep, shard=2, workers=2, zero=3, gathered=1.0)
    assert held.apart > 0
    assert held.total == 500 + 1000 + 16 + 10_005 + 1


def test_whole_model_has_its_gradients_in_buckets() -> None:
    held = uncut(MODEL, workers=2)
    assert held.total == 1000 + 1000 + 2000 + 16 + 30 + 5
    waiting = uncut(replace(MODEL, several=True), workers=2)
    assert waiting.total - held.total == 1000, "on a GPU those of the first micro-batches are not in them"
    assert uncut(replace(MODEL, several=True), workers=1).total == held.total


def test_buckets_are_made_anew_once() -> None:
    """Without an optimizer that keeps something, that is when most is held."""
    plain = replace(MODEL, optimizer=0)
    assert uncut(plain, workers=2).total == 1000 + 2 * 1000 + 16
    assert uncut(plain, workers=1).total == 1000 + 1000 + 16 + 35


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_snapshot_is_written_from_a_copy_in_the_memory_of_the_host(workers: int) -> None:
    host, gpu = uncut(replace(MODEL, on_cpu=True), workers=workers), uncut(MODEL, workers=workers)
    assert host.total - gpu.total == 3016 // workers


def test_update_counts_where_it_takes_more_than_passes_do() -> None:
    assert uncut(replace(MODEL, update=500), workers=2).total == 1000 + 1000 + 2000 + 16 + 500
    parts = in_parts(replace(MODEL, update=50_000), shard=4, workers=4, zero=3, gathered=1.0)
    assert parts.total == 250 + 250 + 500 + 16 + 12_500


def test_one_worker_alone_holds_all() -> None:
    assert in_parts(MODEL, shard=1, workers=1, zero=3, gathered=1.0) == uncut(MODEL, workers=1)
