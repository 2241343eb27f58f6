"""When the last of a step's exchanges is over, which begin while the backward pass still runs.

Exchanges go in one order, the same on all workers, and share one wire: each begins when its bytes are ready and the
wire is free. One that computes before and after it sends (a compression) does so in one of a few queues, taken in turn,
so that one computes while another's bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One exchange. Seconds."""

    ready: float
    """After which it may begin."""
    wire: float
    """That its bytes need the wire for."""
    before: float = 0.0
    """Computing, in its queue, before its bytes leave."""
    after: float = 0.0
    """Computing, in its queue, when they have come."""


def last_end(transfers: Iterable[Transfer], *, queues: int = 1) -> float:
    """When the last one is over; 0 where there are none. `queues`: how many compute beside each other."""
    queue_free = [0.0] * queues
    wire_free = last = 0.0
    for number, each in enumerate(transfers):
        queue = number % queues
        leaves = max(each.ready, queue_free[queue]) + each.before
        wire_free = max(leaves, wire_free) + each.wire
        queue_free[queue] = wire_free + each.after
        last = max(last, queue_free[queue])
    return last
