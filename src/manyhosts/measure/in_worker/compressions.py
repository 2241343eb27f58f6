"""What each way to send less makes of this model's gradient: its arithmetic, and what is left to send."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

from torch import nn

from manyhosts.communication import volume
from manyhosts.communication.compression.choose import BY_LOSS, Cost, cost_of
from manyhosts.config.strategies import DDP
from manyhosts.planner.measured import Compression

_FEW, _MANY = 2, 8
"""Workers that each is rehearsed for: two numbers distinguish what is summed from what goes to every other worker."""
_ROUNDS = 3
_EXACT = 1 << 40
"""Bytes that are sent for one, so that the volume of a collective is reported without rounding."""


def measure(
    config: DDP, parameters: Sequence[nn.Parameter], *, bucket_bytes: int, seconds: float
) -> Mapping[str, Compression]:
    """By name, every compression of ours and the one that is asked for; as many as `seconds` allow for, at least that.

    Arithmetic is that of two workers.
    """
    names = [name for name in dict.fromkeys([config.compression, *BY_LOSS]) if isinstance(name, str)]
    until = time.perf_counter() + seconds
    found: dict[str, Compression] = {}
    for name in names:
        if name in ("none", "auto") or (found and time.perf_counter() > until):
            continue
        several = []
        for _ in range(_ROUNDS):
            several.append(cost_of(name, config, parameters, rank=0, size=_FEW, bucket_bytes=bucket_bytes))
            if time.perf_counter() > until:
                break
        many = cost_of(name, config, parameters, rank=0, size=_MANY, bucket_bytes=bucket_bytes)
        found[name] = _figures(several, many)
    return found


def _figures(several: Sequence[Cost], many: Cost) -> Compression:
    few = several[-1]
    reduced, gathered = split(few.bytes_sent, many.bytes_sent)
    times = [cost.arithmetic_s for cost in several]
    times = times[1:] or times
    return Compression(
        arithmetic_s=statistics.median(times),
        processor_s=statistics.median([cost.processor_s for cost in several][1:] or [few.processor_s]),
        reduced_bytes=round(reduced),
        gathered_bytes=round(gathered),
        exchanges=few.exchanges,
        through_owners=few.through_owners,
        spread=statistics.pstdev(times) / max(statistics.median(times), 1e-9),
    )


def split(few: float, many: float) -> tuple[float, float]:
    """What is summed and what goes to every other worker, of the bytes that one of 2 and one of 8 workers sends."""
    (summed_few, spread_few), (summed_many, spread_many) = (
        (volume.all_reduce_bytes(_EXACT, size) / _EXACT, volume.all_gather_bytes(_EXACT, size) / _EXACT)
        for size in (_FEW, _MANY)
    )
    gathered = (many - few * summed_many / summed_few) / (spread_many - spread_few * summed_many / summed_few)
    gathered = max(0.0, gathered)
    return max(0.0, (few - gathered * spread_few) / summed_few), gathered
