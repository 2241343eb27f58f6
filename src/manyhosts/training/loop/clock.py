"""The times of a step by the host's clock: waiting for data, computing, standing still for a snapshot."""

from __future__ import annotations

import time

from manyhosts.communication.world import World
from manyhosts.snapshot.store import Store
from manyhosts.training.loop.deferred_metrics import HostTiming
from manyhosts.training.loop.transfers import Transfers


class StepClock:
    """Takes them, one step after another. What workers exchanged and how long it took is counted with them."""

    def __init__(self, world: World, store: Store, transfers: Transfers) -> None:
        self._world, self._store, self._transfers = world, store, transfers
        self._begin = self._fetched = self._stalled = self._brought = self._exposed = self._exchanged = 0.0
        self._sent = 0

    def begin(self) -> None:
        """The step begins with waiting for its samples."""
        world = self._world
        self._begin, self._sent, self._exchanged = time.perf_counter(), world.bytes_sent, world.exchange_s
        self._stalled, self._brought = self._store.stalled_s, self._transfers.waited_s

    def fetched(self) -> None:
        """The samples are here. What workers told each other to find them is a part of waiting for those."""
        self._fetched, self._exposed = time.perf_counter(), self._world.exposed_s

    def end(self) -> tuple[HostTiming, int, float]:
        """The model has changed. Gives the times, the bytes sent, and the seconds that exchanges took."""
        end, world = time.perf_counter(), self._world
        stall = self._store.stalled_s - self._stalled
        brought = self._transfers.waited_s - self._brought
        waited, worked = self._fetched - self._begin + brought, end - self._fetched - stall - brought
        timing = HostTiming(end - self._begin, waited, world.exposed_s - self._exposed, stall, worked)
        return timing, world.bytes_sent - self._sent, world.exchange_s - self._exchanged
