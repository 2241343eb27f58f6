"""What one worker's passes take, by how many samples it has: measured sizes, and straight lines between them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manyhosts.planner.group import Group
from manyhosts.planner.measured import Compute, Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Of one step of one worker. Seconds."""

    forward: float
    """All forward passes, and the backward passes of all micro-batches but the last."""
    backward: float
    """The backward pass of the last micro-batch, while which gradients leave."""
    spread: float
    """Standard deviation of both together, from one step to another."""
    micro_batches: int

    @property
    def total(self) -> float:
        """All passes."""
        return self.forward + self.backward


def share_of(measured: Measured, workers: int) -> int:
    """Samples of a step that the worker with most of them has."""
    return measured.global_batch if measured.batch_grows else -(-measured.global_batch // workers)


def batch_of(measured: Measured, workers: int) -> int:
    """Samples of one optimizer step."""
    return measured.global_batch * (workers if measured.batch_grows else 1)


def passes(measured: Measured, group: Group) -> Passes:
    """Of the worker that has most of a batch which is shared out over `group`."""
    sizes = micro_batches(measured, group.workers)
    slower = slowdown(measured, group)
    *earlier, last = sizes
    forward = sum(seconds(measured.compute, size, _forward) for size in sizes)
    forward += sum(seconds(measured.compute, size, _backward) for size in earlier)
    spread = math.sqrt(sum(seconds(measured.compute, size, _spread) ** 2 for size in sizes))
    return Passes(
        forward=slower * forward,
        backward=slower * seconds(measured.compute, last, _backward),
        spread=slower * spread,
        micro_batches=len(sizes),
    )


def micro_batches(measured: Measured, workers: int) -> list[int]:
    """The sizes of the forward passes of one worker's step, in order; it has at least one sample."""
    if measured.virtual_workers is None:
        parts = [share_of(measured, workers)]
    else:
        part = -(-batch_of(measured, workers) // measured.virtual_workers)
        parts = [part] * -(-measured.virtual_workers // workers)
    sizes = []
    for part in parts:
        most = measured.micro_batch or part
        sizes += [most] * (part // most) + ([part % most] if part % most else [])
    return sizes


def slowdown(measured: Measured, group: Group) -> float:
    """How many times as long compute takes as it was measured: slower devices, and cores that workers share.

    Where it was not measured, workers of a CPU are taken to share its cores out, and to need as many core-seconds as
    before.
    """
    per_machine = group.per_machine
    known = measured.contention_of_hosts if per_machine > group.workers_per_node else measured.contention
    if per_machine in known:
        shared = known[per_machine]
    elif measured.device == "cpu":
        shared = max(1.0, per_machine * measured.threads / (group.cores or measured.cores))
    else:
        shared = 1.0
    return shared / group.speed


def pass_cores(measured: Measured) -> float:
    """Cores that the passes of one worker keep busy: all its threads, unless they were seen to wait."""
    return measured.threads if measured.pass_cores is None else min(measured.pass_cores, measured.threads)


def cores_of(measured: Measured, group: Group) -> float:
    """Of one worker of a CPU: its share of those of its machine."""
    return (group.cores or measured.cores) / group.per_machine


def crowding(measured: Measured, group: Group) -> float:
    """How many times as long what keeps one core busy takes where the workers of a machine are more than its cores."""
    if measured.device != "cpu":
        return 1.0
    return max(1.0, 1 / cores_of(measured, group))


def seconds(measured: Sequence[Compute], samples: int, of: Callable[[Compute], float]) -> float:
    """The quantity `of` for a micro-batch of `samples`, which is never less than for a smaller one.

    Between two measured sizes a straight line, beyond the largest the line through the last two: `a + b n`, where a is
    what a pass costs however small it is, so at least 0: a sample never takes longer than in the largest size. Below
    the smallest, as long as that. A size that was measured faster than a smaller one counts as that one: noise is no
    reason to believe that more is less.
    """
    highest, points = 0.0, []
    for each in measured:
        highest = max(highest, of(each))
        points.append((each.samples, highest))
    if samples <= points[0][0]:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * samples / points[0][0]
    above = min(bisect_left(points, samples, key=lambda point: point[0]), len(points) - 1)
    (size, value), (next_size, next_value) = points[above - 1 : above + 1]
    slope = (next_value - value) / (next_size - size)
    if samples > next_size:
        return next_value + min(slope, next_value / next_size) * (samples - next_size)
    return value + slope * (samples - size)


def _forward(measured: Compute) -> float:
    return measured.forward_s


def _backward(measured: Compute) -> float:
    return measured.backward_s


def _spread(measured: Compute) -> float:
    return measured.spread_s


def activations(measured: Measured, workers: int) -> int:
    """Bytes that the largest forward pass of one worker leaves for the backward pass."""
    return round(quantity(measured, workers, lambda each: float(each.activation_bytes)))


def backward_bytes(measured: Measured, workers: int) -> int:
    """Bytes that its backward pass holds at most in addition to these."""
    return round(quantity(measured, workers, lambda each: float(each.backward_bytes)))


def quantity(measured: Measured, workers: int, of: Callable[[Compute], float]) -> float:
    """What `of` gives for the largest micro-batch of a worker."""
    return seconds(measured.compute, max(micro_batches(measured, workers)), of)
