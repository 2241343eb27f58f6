"""When each bucket of gradients is ready: the buckets of a real exchange, filled by real passes, sent to no one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manyhosts import device
from manyhosts.cluster.place import Place
from manyhosts.communication.buckets import GradientBuckets
from manyhosts.communication.shared_norm import OwnBatch, acting
from manyhosts.communication.world import World
from manyhosts.measure.in_worker.passes import Passes
from manyhosts.planner.measured import Bucket

_FEWEST, _MOST = 3, 15


class Alone(World):
    """The one worker of an exchange: notes when a bucket leaves."""

    def __init__(self, where: torch.device) -> None:
        super().__init__(Place())
        self.device = where
        self.left: list[tuple[int, float | device.Event]] = []
        """Of each bucket since `begin`: its bytes, and when it left."""

    def begin(self) -> None:
        """A backward pass begins."""
        self.left = []
        self._begin = self.now()

    def now(self) -> float | device.Event:
        """A moment: by the clock, or on a GPU as a place in its work."""
        if not device.is_asynchronous(self.device):
            return time.perf_counter()
        event = device.module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: float | device.Event) -> float:
        """Since the beginning of the pass."""
        begin = self._begin
        if isinstance(moment, float) or isinstance(begin, float):
            return float(moment) - float(begin)  # type: ignore[arg-type]  # both are of one kind
        return begin.elapsed_time(moment) / 1000

    def start_all_reduce(self, tensor: Tensor) -> None:
        """Note that `tensor` leaves."""
        self.left.append((tensor.nbytes, self.now()))


def measure(
    passes: Passes, parameters: Sequence[nn.Parameter], *, bucket_bytes: int, samples: int, seconds: float
) -> tuple[Bucket, ...]:
    """The buckets of `parameters`, in the order in which they leave, and the shares of the backward pass before that.

    Passes are over `samples` samples, for about `seconds` in all.
    """
    alone = Alone(passes.device)
    buckets = GradientBuckets(parameters, alone, bucket_bytes=bucket_bytes)
    shares: list[list[float]] = []
    _pass(passes, buckets, alone, samples)  # finds the order
    until = time.perf_counter() + seconds
    while len(shares) < _FEWEST or (len(shares) < _MOST and time.perf_counter() < until):
        total = _pass(passes, buckets, alone, samples)
        shares.append([min(1.0, alone.seconds(moment) / total) for _, moment in alone.left])
    usual = [statistics.median(column) for column in zip(*shares, strict=True)]
    for parameter in parameters:
        parameter.grad = None
    return tuple(Bucket(bytes=size, ready=max(usual[: number + 1])) for number, (size, _) in enumerate(alone.left))


def _pass(passes: Passes, buckets: GradientBuckets, alone: Alone, samples: int) -> float:
    """One forward and one backward pass into the buckets. Returns the seconds of the backward pass."""
    buckets.begin()
    with acting(OwnBatch()):
        loss = passes.loss(samples)
        device.wait_for(passes.device)
        buckets.arm()
        alone.begin()
        loss.backward()
    end = alone.now()
    device.wait_for(passes.device)
    total = alone.seconds(end)
    buckets.finish()
    return max(total, 1e-9)
