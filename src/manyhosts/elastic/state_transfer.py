"""State from one worker to those that lack it: nested values whose leaves are tensors and what JSON can hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from manyhosts.communication import transfer
from manyhosts.communication.world import World
from manyhosts.snapshot.flatten import flatten, unflatten


def pass_on(
    world: World, giver: int, takers: Sequence[int], state: Callable[[], Any], take: Callable[[Any], None]
) -> None:
    """Have each of `takers` call `take` with what `state` gives on worker `giver`. These call it, and others may."""
    if world.rank == giver and takers:
        apart = flatten(state())
        for rank in takers:
            transfer.give(world, rank, json.dumps(apart.nodes), apart.tensors)
    elif world.rank in takers:
        text, tensors = transfer.take(world, giver)
        take(unflatten(json.loads(text), tensors))
