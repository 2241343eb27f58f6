"""What the network between the workers gives: seconds before anything arrives, and bytes in a second after that.

    network = probe(world)

Works alone, in any program whose workers have made a `World`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from manyhosts import device
from manyhosts.communication import volume
from manyhosts.communication.world import World

_ROUNDS, _SMALL = 7, 16
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Network:
    """Measured between all workers at once, as in a step."""

    latency_s: float
    """Of one exchange of next to nothing."""
    bandwidth: float
    """Bytes that each worker sends in a second of an exchange that is large."""
    spread: float = 0.0
    """Standard deviation of what large exchanges took, over itself."""

    def seconds(self, sent: float, exchanges: int = 1) -> float:
        """How long `exchanges` take in which a worker sends `sent` bytes in all."""
        return exchanges * self.latency_s + sent / self.bandwidth

    def __str__(self) -> str:
        return f"{self.bandwidth * 8 / 1e9:.2g} Gbit/s, {self.latency_s * 1e3:.2g} ms"


def probe(world: World, *, seconds: float = 1.0) -> Network:
    """Measure the network, the same answer on every worker. Takes about `seconds`; all workers call it together.

    Raises:
        ValueError: there is one worker, and no network.
    """
    if world.size == 1:
        raise ValueError("one worker has no network to measure")
    sent, exposed = world.bytes_sent, world.exposed_s
    # A number for every worker: one that has no part of a sum is sent fewer messages.
    latency = statistics.median(_timed(world, _SMALL * world.size) for _ in range(_ROUNDS))
    count, before = 1 << 14, 0.0
    while True:
        # The middle of three: a network that starts slowly, or a neighbour that breathes, must not decide.
        times = [_timed(world, count) for _ in range(3)]
        elapsed = world.agree(statistics.median(times))
        if 3 * 4 * elapsed > seconds or 4 * 4 * count > _MOST_BYTES:
            break
        count, before = 4 * count, elapsed
    latency = min(world.agree(latency), elapsed / 2)
    spread = world.agree(statistics.pstdev(times) / elapsed)
    bandwidth = volume.all_reduce_bytes(4 * count, world.size) / travelling(elapsed, before, latency)
    world.bytes_sent, world.exposed_s = sent, exposed  # nothing of a step
    world.take_waits()
    return Network(latency, bandwidth, spread)


def travelling(elapsed: float, before: float, latency: float) -> float:
    """Of the `elapsed` seconds of a large exchange, those that its bytes took.

    That is by the line through it and one of a quarter of the bytes, which took `before` (0: there is none). Pieces of
    a large exchange follow each other, so most of the latency of a small one is hidden in it: to take all of that off
    is to say that a cable of 100 Mbit/s carries 106. It is never more than all, nor less than all but the latency.
    """
    by_line = 4 / 3 * (elapsed - before) if before else 0.0
    return min(elapsed, max(by_line, elapsed - latency))


def _timed(world: World, count: int) -> float:
    """Seconds that a sum of `count` numbers takes."""
    tensor = torch.zeros(count, device=world.device)
    world.barrier()
    begin = time.perf_counter()
    world.all_reduce(tensor)
    device.wait_for(world.device)
    return time.perf_counter() - begin
