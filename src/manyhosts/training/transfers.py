"""The batches of a step on their way to this worker's device, each when its forward pass wants it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from manyhosts.data.steps import DuePiece, LoadedPiece, mapped
from manyhosts.strategies.strategy import Piece


class Transfers:
    """Those of one loop."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_cpu = device, device.type == "cpu"
        self.waited_s = 0.0
        """Seconds that this worker has waited for batches in the midst of steps."""

    def pieces(self, step: int, due: Sequence[LoadedPiece | DuePiece]) -> list[Piece]:
        """Pieces of the step after `step` steps. Each batch comes when it is asked for: so few are in memory."""
        return [
            Piece(
                bring=partial(self._bring, loaded),
                samples=len(loaded.plan.indices),
                weight=loaded.plan.weight,
                address=(step, loaded.plan.part, loaded.plan.micro),
            )
            for loaded in due
        ]

    def _bring(self, piece: LoadedPiece | DuePiece) -> Any:
        """The batch of a piece, on this worker's device. To wait for it is to wait for data."""
        begin = time.perf_counter()
        batch = piece.batch
        if not self._on_cpu:
            batch = mapped(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
        self.waited_s += time.perf_counter() - begin
        return batch
