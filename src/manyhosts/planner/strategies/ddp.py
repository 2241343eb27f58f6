"""Data parallelism: buckets of gradients leave while the last backward pass runs, as they are or made smaller."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from manyhosts.config.strategies import DDP, Single
from manyhosts.errors import ConfigError
from manyhosts.planner.compute import pass_cores
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Bucket, Compression, Measured
from manyhosts.planner.memory import Memory, model_bytes, whole
from manyhosts.planner.overlap import Transfer, last_end
from manyhosts.planner.step import Step, Timeline, assemble, exposed_after, timeline

QUEUES = 2
"""In which the exchanges of a CPU compute beside each other: see `communication.comm_queue`. A GPU has one."""
CHUNK_BYTES = 8 << 20
"""Of a bucket, that go through a compression at a time."""


class DataParallelModel:
    """`config.compression` says how gradients travel."""

    def __init__(self, config: DDP) -> None:
        self.config = config

    def step(self, measured: Measured, group: Group) -> Step:
        """See `StrategyModel`."""
        lines = timeline(measured, group)
        if group.workers == 1:
            return assemble(measured, group, lines, exposed=0.0)
        if self.config.compression == "none":
            transfers = [
                Transfer(ready=lines.when(bucket.ready), wire=group.all_reduce(bucket.bytes))
                for bucket in measured.buckets
            ]
            return assemble(measured, group, lines, exposed=self._exposed(measured, group, lines, last_end(transfers)))
        way = way_of(measured, self.config.compression)
        busy = way.arithmetic_s * taken_from_passes(measured, group)
        slowed = replace(lines, passes=replace(lines.passes, backward=lines.passes.backward + busy))
        last = last_end(compressed(measured, group, slowed, way), queues=QUEUES if measured.device == "cpu" else 1)
        return assemble(measured, group, lines, exposed=busy + self._exposed(measured, group, slowed, last, way))

    def _exposed(
        self, measured: Measured, group: Group, lines: Timeline, last: float, way: Compression | None = None
    ) -> float:
        """Seconds after the passes, where the last exchange is over at `last`."""
        plain = Compression(
            arithmetic_s=0.0, reduced_bytes=measured.gradient_bytes, gathered_bytes=0, exchanges=len(measured.buckets)
        )
        way = way or plain
        others = group.workers - 1
        sent = 2 * others / group.workers * way.reduced_bytes + others * way.gathered_bytes
        processor_s = way.processor_s + group.processor_seconds(sent, 2 * others * way.exchanges)
        return exposed_after(measured, group, lines, last_end=last, processor_s=processor_s)

    def memory(self, measured: Measured, group: Group) -> Memory:
        """See `StrategyModel`. A compression keeps what it dropped, and what it will have dropped after the step."""
        keeps = self.config.compression != "none" and self.config.error_feedback and group.workers > 1
        kept = 2 * measured.gradient_bytes if keeps else 0
        return whole(model_bytes(measured, group.workers), workers=group.workers, strategy=kept)


def way_of(measured: Measured, compression: object) -> Compression:
    """What was measured of a compression.

    Raises:
        ConfigError: it was not measured.
    """
    if compression not in measured.compression:
        raise ConfigError(
            f"what the compression {compression!r} makes of this model was not measured",
            where="compression",
            fix=f"measured are: {', '.join(['none', *measured.compression])}",
        )
    return measured.compression[str(compression)]


def taken_from_passes(measured: Measured, group: Group) -> float:
    """By what part of its seconds the arithmetic of a compression makes the passes longer that it runs beside.

    All of them where these keep every core busy, none where each worker finds a free one; and passes that wait for
    something else need no core meanwhile.
    """
    if measured.device != "cpu":
        return 0.0
    busy = pass_cores(measured)
    free = (group.cores or measured.cores) / group.beside - busy
    return min(1.0, max(0.0, 1.0 - free)) * busy / measured.threads


def compressed(measured: Measured, group: Group, lines: Timeline, way: Compression) -> Iterator[Transfer]:
    """The chunks of all buckets, in the order in which they leave."""
    chunks = [_chunks(bucket, measured, way) for bucket in measured.buckets]
    exchanges = way.exchanges / sum(chunks)
    for bucket, count in zip(measured.buckets, chunks, strict=True):
        share = bucket.bytes / measured.gradient_bytes / count
        arithmetic = share * way.arithmetic_s
        wire = wire_of(group, way, share=share, exchanges=exchanges, exact=share * measured.gradient_bytes)
        yield from [
            Transfer(ready=lines.when(bucket.ready), wire=wire, before=arithmetic / 2, after=arithmetic / 2)
        ] * count


def wire_of(group: Group, way: Compression, *, share: float, exchanges: float, exact: float) -> float:
    """Seconds that a `share` of a compressed gradient, `exact` bytes before, needs the wire for.

    Where several machines have several workers each, the workers of a machine first sum what they have, exactly, and
    only machines exchange what is compressed (`inside_node="exact"`).
    """
    far = group.across() if group.nodes > 1 else group
    seconds = far.all_reduce(share * way.reduced_bytes) + far.all_gather(share * way.gathered_bytes)
    seconds += (exchanges - 1) * far.all_reduce(0) if exchanges > 1 else 0.0
    if group.nodes > 1 and group.workers_per_node > 1:
        near = group.inside()
        seconds += near.all_to_all(exact) + near.all_gather(exact / near.workers)
    return seconds


def _chunks(bucket: Bucket, measured: Measured, way: Compression) -> int:
    """Into how many a bucket is cut: into one by a way that looks at whole tensors, which has few exchanges."""
    share = bucket.bytes / measured.gradient_bytes
    most = math.ceil((way.exchanges - len(measured.buckets)) / 2 * share)
    return max(1, min(math.ceil(bucket.bytes / CHUNK_BYTES), most))


def make(config: DDP) -> DataParallelModel:
    """What the table of strategies calls."""
    return DataParallelModel(config)


def make_single(_config: Single) -> DataParallelModel:
    """One worker: data parallelism with nobody to exchange with."""
    return DataParallelModel(DDP())
