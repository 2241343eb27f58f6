"""State from one worker to those that lack it, and of each to all: nested values, of tensors and what JSON can hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from manyhosts.communication import transfer
from manyhosts.communication.collectives import Collectives
from manyhosts.communication.gathering import gather_lists, gather_plain
from manyhosts.communication.world import World
from manyhosts.errors import SnapshotError
from manyhosts.records.contents import unflatten
from manyhosts.snapshot.flatten import FlatState, flatten


def pass_on(
    world: World, giver: int, takers: Sequence[int], state: Callable[[], Any], take: Callable[[Any], None]
) -> None:
    """Have each of `takers` call `take` with what `state` gives on worker `giver`. These call it, and others may."""
    if world.rank == giver and takers:
        flat = flatten(state())
        for rank in takers:
            transfer.give(world, rank, json.dumps(flat.nodes), flat.tensors)
    elif world.rank in takers:
        text, tensors = transfer.take(world, giver)
        take(unflatten(json.loads(text), tensors))


def pass_on_all(world: World, givers: Mapping[int, int], state: Callable[[], Any], take: Callable[[Any], None]) -> None:
    """The same from several workers: `givers` has the rank of the one that gives by that of the one that takes."""
    for giver in sorted(set(givers.values())):
        pass_on(world, giver, [taker for taker, of in givers.items() if of == giver], state, take)


def gather(world: Collectives, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every worker has, by rank, on every worker.

    Raises:
        SnapshotError: on all workers alike: one of them has something that cannot travel; `where` names its rank.
    """
    if world.size == 1:
        return [dict(own)]
    flat, error = FlatState(None, {}, {}), None
    try:
        flat = flatten(own)
    except SnapshotError as found:
        error = SnapshotError(found.what, where=f"rank {world.rank}", fix=found.fix)
    reported = gather_plain(world, [flat.nodes, list(flat.tensors)], error)
    rows = gather_lists(world, list(flat.tensors.values()))
    return [
        unflatten(nodes, dict(zip(names, row, strict=True))) for (nodes, names), row in zip(reported, rows, strict=True)
    ]
