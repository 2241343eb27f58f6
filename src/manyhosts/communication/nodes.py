"""Which workers share a node: inside one the wire is short, between them it is what everybody waits for.

A world has two levels where it has several nodes with the same number of workers, more than one, on each. Then the
workers of a node can exchange every bit among themselves, and each of them speaks for its node on a *rail*: the first
worker of every node is on the first rail, the second on the second, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from manyhosts.communication.link import Link
from manyhosts.communication.mesh import Along
from manyhosts.communication.world import World


@dataclass(frozen=True, slots=True)
class Levels:
    """The ranks of a world by node, and by rail."""

    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def one(cls, world: World) -> Levels:
        """All workers of `world` as if they shared one node."""
        return cls((tuple(range(world.size)),))

    @property
    def node_of(self) -> list[int]:
        """The number of each worker's node, by rank."""
        found = {rank: number for number, ranks in enumerate(self.nodes) for rank in ranks}
        return [found[rank] for rank in range(len(found))]

    @property
    def rails(self) -> tuple[tuple[int, ...], ...]:
        """Of each worker of a node, those in its place on the other nodes."""
        return tuple(zip(*self.nodes, strict=True))


def levels_of(node_of: list[int]) -> Levels | None:
    """The two levels of a world whose worker r is on node `node_of[r]`; None where there is but one."""
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        nodes.setdefault(node, []).append(rank)
    sizes = {len(ranks) for ranks in nodes.values()}
    is_even = len(nodes) > 1 and len(sizes) == 1 and sizes != {1}
    return Levels(tuple(tuple(ranks) for ranks in nodes.values())) if is_even else None


def find_levels(world: World) -> Levels | None:
    """The levels of `world`; called by all workers together."""
    own = torch.tensor([world.place.node_rank], dtype=torch.int64, device=world.device)
    return levels_of([int(node) for node in world.stack(own)[:, 0].tolist()])


def make_link(world: World, levels: Levels | None) -> Link:
    """A link of the entire world, in which that of this worker's node and that of its rail are; called by all."""
    link = Link(world.rank, world.size, world.new_group() if world.size > 1 else None)
    if levels is not None:
        link.inside, link.across = (link_among(world, parts) for parts in (levels.nodes, levels.rails))
    return link


def link_among(world: World, parts: Sequence[tuple[int, ...]]) -> Link:
    """The link of that part which this worker is in. All workers of `world` call this together."""
    ranks, group = world.new_groups(parts)
    return Link(ranks.index(world.rank), len(ranks), group)


class Node(Along):
    """The workers of this worker's node. What they exchange goes over no cable between nodes."""

    def __init__(self, world: World, levels: Levels) -> None:
        """Called by all workers of `world` together."""
        made = world.new_groups(levels.nodes)
        super().__init__(world, lambda: made)

    def count_sent(self, payload: int) -> None:
        """Nothing is counted."""
