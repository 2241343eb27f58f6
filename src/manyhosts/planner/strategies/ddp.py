"""Data parallelism: buckets of gradients leave while the last backward pass runs, as they are or made smaller."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

from manyhosts.config.strategies import DDP, Single
from manyhosts.errors import ConfigError
from manyhosts.planner.group import Group, nearest
from manyhosts.planner.measured import Bucket, Compression, Measured, Network, Tried
from manyhosts.planner.memory import Memory, model_bytes, uncut
from manyhosts.planner.overlap import Transfer
from manyhosts.planner.step import Step, Timeline, assemble, exposed_after, timeline

QUEUES = 2
"""In which the exchanges of a CPU compute at the same time: see `communication.comm_queue`. A GPU has one."""
TALLY_BYTES = 64
"""Of the loss and what workers send each other in each step, about."""
CHUNK_BYTES = 8 << 20
"""Of a bucket, that go through a compression at a time."""
_NO_ONE = Network(latency_s=0.0, bytes_per_second=1.0)
"""That one worker sends nothing through."""


class DataParallelModel:
    """`config.compression` says how gradients travel."""

    def __init__(self, config: DDP) -> None:
        self.config = config

    def step(self, measured: Measured, group: Group) -> Step:
        """See `StrategyModel`. As much longer as real steps of about so many workers were, where they were timed."""
        step, tried = self.of_parts(measured, group), nearest(measured.tried, group)
        if group.workers == 1:
            return Step(**{name: measured.full_times * seconds for name, seconds in step.parts().items()})
        if tried is None:
            return step
        left_s = max(0.0, times_of(tried, measured, str(self.config.compression)) * of_passes(step) - step.update)
        compute = min(step.compute, left_s)
        straggler = min(step.straggler, left_s - compute)
        exposed = left_s - compute - straggler
        data_wait = step.data_wait
        if measured.loader_processes and (data_wait or tried.full_times):  # they fetch while a step takes longer
            data_wait = max(0.0, (tried.full_times or 1.0) * step.seconds - left_s - step.update - step.other)
        return replace(step, compute=compute, straggler=straggler, communication_exposed=exposed, data_wait=data_wait)

    def of_parts(self, measured: Measured, group: Group) -> Step:
        """The step as it is put together from what was measured of its parts."""
        lines = timeline(measured, group)
        if group.workers == 1:
            return assemble(measured, group, lines, exposed=0.0)
        if self.config.compression == "none":
            transfers, queues = plain(measured, group, lines), 1
        else:
            way = way_of(measured, self.config.compression)
            transfers, queues = compressed(measured, group, lines, way), QUEUES if measured.device == "cpu" else 1
        exposed = exposed_after(measured, group, lines, transfers, queues=queues)
        if self.config.compression != "none" and self.config.error_feedback:
            # The loss and the control flags travel after the gradients, not with them: a last word, see
            # `strategies.ddp`.
            exposed += group.all_reduce(TALLY_BYTES)
        return assemble(measured, group, lines, exposed=exposed)

    def memory(self, measured: Measured, group: Group) -> Memory:
        """See `StrategyModel`. A compression keeps what it dropped, and what it will have dropped after the step."""
        keeps = self.config.compression != "none" and self.config.error_feedback and group.workers > 1
        kept = 2 * measured.gradient_bytes if keeps else 0
        return uncut(model_bytes(measured, group.workers), workers=group.workers, strategy=kept)


def of_passes(step: Step) -> float:
    """Seconds of a step from its passes to its update."""
    return step.compute + step.straggler + step.communication_exposed + step.update


def times_of(tried: Tried, measured: Measured, compression: str) -> float:
    """How many times as long as its parts a real step with this compression took.

    One that was not timed is as far off as those that send in the same way, through owners or not; 1 where there are
    none.
    """
    if compression in tried.times or compression not in measured.compression:
        return tried.times.get(compression, 1.0)
    own = measured.compression[compression].through_owners
    alike = [
        times for name, times in tried.times.items()
        if name in measured.compression and measured.compression[name].through_owners == own
    ]  # fmt: skip
    return statistics.median(alike) if alike else 1.0


def compared(measured: Measured, config: DDP) -> Measured:
    """The same, with how many times as long the real steps that were timed took as their parts. `config`: theirs, but
    for the compression.
    """

    def with_times(tried: Tried) -> Tried:
        group = Group(
            nodes=tried.nodes, workers_per_node=tried.workers_per_node, between=tried.network, within=tried.network,
            hosts_per_machine=tried.hosts_per_machine,
        )  # fmt: skip
        steps = {
            name: DataParallelModel(replace(config, compression=name)).of_parts(measured, group)
            for name in ("none", *measured.compression)
        }
        own = steps.get(str(config.compression), steps["none"])
        times = {name: seconds / of_passes(steps[name]) for name, seconds in tried.steps.items() if name in steps}
        return replace(tried, times=times, full_times=tried.full_step_s / own.seconds)

    alone = DataParallelModel(config).of_parts(measured, Group(between=_NO_ONE, within=_NO_ONE)).seconds
    full_times = measured.full_step_s / alone if measured.full_step_s else 1.0
    return replace(measured, full_times=full_times, tried=tuple(map(with_times, measured.tried)))


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


def plain(measured: Measured, group: Group, lines: Timeline) -> Iterator[Transfer]:
    """The buckets as they are, in the order in which they leave."""
    for bucket in measured.buckets:
        sending = group.processor_seconds(reduced_sent(group, bucket.bytes), ring_messages(group))
        yield Transfer(ready=lines.when(bucket.ready), wire=group.all_reduce(bucket.bytes), sending=sending)


def reduced_sent(group: Group, payload: float) -> float:
    """Bytes that a worker sends so that `payload` of each are summed."""
    return 2 * (group.workers - 1) / group.workers * payload


def ring_messages(group: Group) -> int:
    """That a worker sends for a sum, one after another."""
    return 2 * (group.workers - 1)


def compressed(measured: Measured, group: Group, lines: Timeline, way: Compression) -> Iterator[Transfer]:
    """The chunks of all buckets, in the order in which they leave."""
    chunks = [_chunks(bucket, measured, way) for bucket in measured.buckets]
    exchanges = way.exchanges / sum(chunks)
    threads = way.processor_s / way.arithmetic_s if way.processor_s and way.arithmetic_s else 1.0
    for bucket, count in zip(measured.buckets, chunks, strict=True):
        share = bucket.bytes / measured.gradient_bytes / count
        arithmetic = share * way.arithmetic_s
        wire = wire_of(group, way, share=share, exchanges=exchanges, exact=share * measured.gradient_bytes)
        sent = share * (reduced_sent(group, way.reduced_bytes) + (group.workers - 1) * way.gathered_bytes)
        sending = group.processor_seconds(sent, exchanges * ring_messages(group))
        yield from [
            Transfer(
                ready=lines.when(bucket.ready),
                wire=wire,
                before=arithmetic / 2,
                after=arithmetic / 2,
                sending=sending,
                threads=threads,
            )
        ] * count


def wire_of(group: Group, way: Compression, *, share: float, exchanges: float, exact: float) -> float:
    """Seconds that a `share` of a compressed gradient, `exact` bytes before, needs the wire for.

    Where several machines have several workers each, the workers of a machine first sum what they have, exactly, and
    only machines exchange what is compressed (`inside_node="exact"`).
    """
    far = group.across() if group.nodes > 1 else group
    summed = far.through_owners if way.through_owners else far.all_reduce
    seconds = summed(share * way.reduced_bytes) + far.all_gather(share * way.gathered_bytes)
    seconds += (exchanges - 1) * far.all_reduce(0) if exchanges > 1 else 0.0
    if group.nodes > 1 and group.workers_per_node > 1:
        near = group.inside()
        seconds += near.all_to_all(exact) + near.all_gather(exact / near.workers)
    return seconds


def _chunks(bucket: Bucket, measured: Measured, way: Compression) -> int:
    """Into how many a bucket is cut: into one by a way that looks at tensors in full, which has few exchanges."""
    share = bucket.bytes / measured.gradient_bytes
    most = math.ceil((way.exchanges - len(measured.buckets)) / 2 * share)
    return max(1, min(math.ceil(bucket.bytes / CHUNK_BYTES), most))


def make(config: DDP) -> DataParallelModel:
    """What the table of strategies calls."""
    return DataParallelModel(config)


def make_single(_config: Single) -> DataParallelModel:
    """One worker: data parallelism with no one to exchange with."""
    return DataParallelModel(DDP())
