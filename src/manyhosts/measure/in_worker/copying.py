"""What copying takes a worker, into memory that it has just got: who puts a model together does much of that."""

from __future__ import annotations

import statistics
import time

import torch

from manyhosts import device

_ROUNDS = 5
_MOST_BYTES = 64 << 20
"""In all: more than a processor keeps near, and little compared with a model."""


def measure(where: torch.device, unit: int, total: int) -> float:
    """Seconds for a byte of `total`, in pieces of `unit` bytes.

    As in a step each piece is another one, so none of them is near yet.
    """
    total = min(total, _MOST_BYTES)
    pieces = [torch.ones(min(unit, total) // 4 + 1, device=where) for _ in range(max(1, total // unit))]
    times = []
    for _ in range(_ROUNDS):
        device.wait_for(where)
        begin = time.perf_counter()
        copies = [piece.clone() for piece in pieces]
        device.wait_for(where)
        times.append(time.perf_counter() - begin)
        del copies
    return statistics.median(times) / sum(piece.nbytes for piece in pieces)
