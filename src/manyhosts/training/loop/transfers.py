"""The batches of a step on their way to this worker's device, each when its forward pass wants it, and its times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from manyhosts.communication.world import World
from manyhosts.data.steps import DuePiece, LoadedPiece, Step, on_device
from manyhosts.snapshot.store import Store
from manyhosts.strategies.strategy import Piece
from manyhosts.training.loop.deferred_metrics import DeferredMetrics, HostTiming


class Transfers:
    """Those of one loop."""

    def __init__(
        self, device: torch.device, numbers: DeferredMetrics, see_first: Callable[[Any], None] | None = None
    ) -> None:
        """`numbers` tell, of a device that is not the CPU, how long it had nothing to do meanwhile.

        `see_first` is shown the first batch of the run, on the CPU.
        """
        self._device, self._on_cpu, self._numbers = device, device.type == "cpu", numbers
        self._see_first = see_first
        self.waited_s = 0.0
        """Seconds that this worker has waited for batches in the midst of steps."""

    def next_of(self, steps: Iterator[Step]) -> Step:
        """The next step. Its time begins here; to wait for it is to wait for data."""
        if self._on_cpu:
            return next(steps)
        self._numbers.begin()
        with self._numbers.waiting_for_data():
            return next(steps)

    def pieces(self, step: int, due: Sequence[LoadedPiece | DuePiece]) -> list[Piece]:
        """Pieces of the step after `step` steps. Each batch comes when it is asked for: so few are in memory."""
        return [
            Piece(
                bring=partial(self._bring, loaded, step),
                samples=len(loaded.plan.indices),
                weight=loaded.plan.weight,
                address=(step, loaded.plan.part, loaded.plan.micro),
                shares=loaded.plan.shares,
            )
            for loaded in due
        ]

    def _bring(self, piece: LoadedPiece | DuePiece, step: int) -> Any:
        """The batch of a piece, on this worker's device. To wait for it is to wait for data."""
        begin = time.perf_counter()
        if self._on_cpu:
            batch = piece.batch
        else:
            with self._numbers.waiting_for_data():
                batch = piece.batch
        if step == 0 and self._see_first is not None and piece.plan.weight:
            self._see_first(batch)
            self._see_first = None
        if not self._on_cpu:
            batch = on_device(batch, self._device)
        self.waited_s += time.perf_counter() - begin
        return batch


class StepClock:
    """The times of each step by the host's clock: waiting for data, computing, standing still for a snapshot.

    What workers exchanged and how long it took is counted with them.
    """

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
