"""Sums in the order of the tree: the same bits however the parts are cut over workers, and a vector into segments."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from manyhosts.cluster.place import Place
from manyhosts.communication.tree import Node, Subtrees
from manyhosts.communication.tree_sum import Exchange, Pace, TreeSum
from manyhosts.communication.volume import all_reduce_bytes
from manyhosts.communication.world import World
from manyhosts.data.order import bounds

pytestmark = pytest.mark.multiprocess
LENGTHS, PARTS = (1, 63, 1000, 5001), (3, 4, 7)
PACES = [Pace(segment_bytes=size, lag=lag) for size, lag in ((1 << 40, 3), (4000, 0), (4000, 1), (1300, 2), (700, 99))]


def part_of(length: int, part: int, step: int) -> Tensor:
    """Numbers of very different size, whose sum shows in which order they were added."""
    source = torch.Generator().manual_seed(1000 * step + part)
    return torch.randn(length, generator=source) * 10 ** torch.randint(-4, 5, (length,), generator=source)


def in_order_of_the_tree(length: int, parts: int, step: int) -> Tensor:
    sums = Subtrees(parts, torch.Tensor.add)
    for part in range(parts):
        sums.put(Node(0, part), part_of(length, part, step))
    [(_, total)] = sums.stack
    return total


def add_up(total: TreeSum, held: list[range], rank: int, step: int) -> None:
    total.begin(held)
    for part in held[rank]:
        buffer, adding = total.open(part)
        row, view = part_of(total.length, part, step), buffer[: total.length]
        view.add_(row) if adding else view.copy_(row)
        total.close(part, buffer, added=adding)


def differing(rank: int, paces: list[Pace]) -> list[str]:
    """The sums that have other bits than they should, two vectors on their way at once, and two steps."""
    world = World(Place.from_environment())
    wrong = []
    for pace, parts in product(paces, PARTS):
        held = [range(*bounds(parts, world.size, other)) for other in range(world.size)]
        exchange = Exchange(pace)
        totals = [
            TreeSum(length, dtype=torch.float32, world=world, segment_bytes=pace.segment_bytes) for length in LENGTHS
        ]
        for step in range(2):
            for total in totals:
                add_up(total, held, rank, step)
                exchange.send(total)
            exchange.finish()
            wrong += [
                f"{pace}, {parts} parts, {total.length} numbers, step {step}"
                for total in totals
                if not torch.equal(total.result, in_order_of_the_tree(total.length, parts, step))
            ]
    return wrong


def test_sums_have_the_bits_of_the_tree_however_they_are_cut_into_segments() -> None:
    assert run_ranks(3, differing, PACES) == [[], [], []]


def test_as_many_bytes_leave_in_segments_as_in_one() -> None:
    whole, cut = (run_ranks(3, bytes_sent, pace)[0] for pace in (PACES[0], Pace(segment_bytes=100_000, lag=2)))
    assert whole <= cut <= 1.03 * whole, "what is added is rounding up, by less than 64 numbers a chunk"
    assert whole == pytest.approx(all_reduce_bytes(400_000, 3), rel=0.01)


def bytes_sent(rank: int, pace: Pace) -> int:
    world = World(Place.from_environment())
    total = TreeSum(100_000, dtype=torch.float32, world=world, segment_bytes=pace.segment_bytes)
    add_up(total, [range(part, part + 1) for part in range(3)], rank, 0)
    exchange = Exchange(pace)
    exchange.send(total)
    exchange.finish()
    return world.bytes_sent
