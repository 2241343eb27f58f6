"""The batches of a step on their way to this worker's device, each when its forward pass wants it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from manyhosts.data.steps import DuePiece, LoadedPiece, Step, on_device
from manyhosts.strategies.strategy import Piece
from manyhosts.training.loop.deferred_metrics import DeferredMetrics


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
