"""Optimizers from worker to worker, where nodes step alone.

The workers of such a node sum their gradients and stay equal; so one of them gives those that come new to it the
optimizer that it has.
"""

from __future__ import annotations

import json

from manyhosts.communication import transfer
from manyhosts.snapshot.flatten import flatten, unflatten
from manyhosts.strategies.local_updates import LocalUpdates
from manyhosts.training.build import Parts


def share_optimizers(parts: Parts) -> None:
    """Have each worker go on with the optimizer that the strategy has named when all met. All of them call this."""
    if not isinstance(parts.strategy, LocalUpdates):
        return
    world, optimizer = parts.world, parts.optimizer
    for taker, giver in enumerate(parts.strategy.givers):
        if taker != giver and world.rank == giver:
            apart = flatten(optimizer.state_dict())
            transfer.give(world, taker, json.dumps(apart.nodes), apart.tensors)
        elif taker != giver and world.rank == taker:
            text, tensors = transfer.take(world, giver)
            optimizer.load_state_dict(unflatten(json.loads(text), tensors))
