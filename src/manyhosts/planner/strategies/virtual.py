"""Virtual workers: parts of a batch computed one by one, whose gradients are added in one fixed tree.

A bucket travels in two halves: each worker gets its chunk of all sums (all-to-all), adds, and sends the result to all.
The first halves leave during the backward pass of a worker's last part; the second half of a segment begins after the
first half of the 32nd one after it, so those of a gradient below 64 MB begin when the pass is over.
"""

from __future__ import annotations

from collections.abc import Iterator

from manyhosts.communication.tree import subtrees
from manyhosts.data.order import bounds
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Measured
from manyhosts.planner.memory import Memory, model_bytes, uncut
from manyhosts.planner.overlap import Transfer, last_end
from manyhosts.planner.step import Step, Timeline, assemble, timeline

SEGMENT_BYTES, LAG = 2_000_000, 32
"""See `communication.tree_sum`: the pace of workers that compute on a CPU. On a GPU nothing is cut."""


class VirtualWorkersModel:
    """As many parts as `measured.virtual_workers` says."""

    def step(self, measured: Measured, group: Group) -> Step:
        """See `StrategyModel`."""
        lines = timeline(measured, group)
        if group.workers == 1:
            return assemble(measured, group, lines, exposed=0.0)
        last = last_end(_halves(measured, group, lines))
        return assemble(measured, group, lines, exposed=max(0.0, last - lines.ends))

    def memory(self, measured: Measured, group: Group) -> Memory:
        """See `StrategyModel`."""
        kept = gradients_kept(measured.virtual_workers or 1, group.workers) * measured.gradient_bytes
        return uncut(model_bytes(measured, group.workers), workers=group.workers, strategy=kept)


def gradients_kept(parts: int, workers: int) -> int:
    """How many full gradients one of `workers` keeps in addition to its own, where a batch is cut into `parts`.

    Sums of finished parts are kept while the next is computed, as a binary counter does; and an inbox.
    """
    own = -(-parts // workers)
    sums = max(done.bit_count() for done in range(own + 1))
    return sums + (1 if workers > 1 else 0)


def _halves(measured: Measured, group: Group, lines: Timeline) -> Iterator[Transfer]:
    """Every half of every segment, in the order in which they leave."""
    sums = _sums_left(measured.virtual_workers or group.workers, group.workers)
    under_way: list[int] = []
    for bucket in measured.buckets:
        ready = lines.when(bucket.ready)
        count = max(1, round(bucket.bytes / SEGMENT_BYTES)) if measured.device == "cpu" else 1
        for _ in range(count):
            segment = bucket.bytes // count
            yield Transfer(ready=ready, wire=group.all_to_all(sums * segment))
            under_way.append(segment)
            if measured.device == "cpu" and len(under_way) > LAG:
                yield Transfer(ready=ready, wire=_second(group, under_way.pop(0)))
    for segment in under_way:
        yield Transfer(ready=lines.ends, wire=_second(group, segment))


def _second(group: Group, segment: int) -> float:
    return group.all_gather(segment / group.workers)


def _sums_left(parts: int, workers: int) -> float:
    """How many sums a worker is left with, on average; 1 where each has a complete subtree."""
    return sum(len(subtrees(parts, *bounds(parts, workers, rank))) for rank in range(workers)) / workers


def make(_config: object) -> VirtualWorkersModel:
    """What the table of strategies calls."""
    return VirtualWorkersModel()
