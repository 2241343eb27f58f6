"""Fully sharded data parallelism: what a worker holds at most, and how much of the gathering is hidden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from manyhosts.config.fully_sharded import FSDP
from manyhosts.errors import ConfigError
from manyhosts.planner.compute import pass_cores, slowdown
from manyhosts.planner.group import Group
from manyhosts.planner.measured import InParts, Measured
from manyhosts.planner.memory import Memory, ModelBytes, in_parts, model_bytes
from manyhosts.planner.overlap import Transfer, last_end
from manyhosts.planner.step import Step, Timeline, assemble, longer, timeline

_COPIES = 2
"""Of a unit's gradients between CPUs: into rows, and out of those that came."""
_TOLD_BYTES = 16
"""That workers on CPUs exchange before each unit, to see that all come to the same one."""


class FullyShardedModel:
    """With the settings of `config`."""

    def __init__(self, config: FSDP, *, alone: bool = False) -> None:
        """`alone`: copies step alone, and sum no gradients."""
        self.config, self.alone = config, alone

    def memory(self, measured: Measured, group: Group) -> Memory:
        """See `StrategyModel`."""
        units_of(measured)
        return self.held_by(model_bytes(measured, group.workers), group.workers, shards(self.config, group))

    def largest(self, model: ModelBytes, workers: int) -> Memory:
        """See `CutStrategyModel`. All of them share one copy."""
        return self.held_by(model, workers, workers)

    def held_by(self, model: ModelBytes, workers: int, shard: int) -> Memory:
        """What each of `shard` workers holds of `model` who share a copy of it; `workers`: all of them."""
        gathered = gathered_share(self.config)
        return in_parts(model, shard=shard, workers=workers, zero=self.config.zero, gathered=gathered)

    def step(self, measured: Measured, group: Group) -> Step:
        """See `StrategyModel`."""
        lines = timeline(measured, group)
        if group.workers == 1:
            return assemble(measured, group, lines, exposed=0.0)
        shard = shards(self.config, group)
        copy, across = of_a_copy(group, shard)
        exchange = _Exchange(measured, group, copy, self.config)
        exposed = _exposed(self.config.zero, units_of(measured), exchange, lines)
        if shard < group.workers and not self.alone:
            exposed += across.all_reduce(summed_share(self.config) * measured.gradient_bytes / shard)
        if not exchange.is_hidden:  # else it travels with the loss
            exposed += (lines.passes.micro_batches + 1) * exchange.reported + group.all_reduce(_TOLD_BYTES)
        known = measured.in_parts or InParts(passes_s=0.0, regather_s=0.0, update_s=0.0)
        # The optimizer knows of its own part alone.
        own = replace(measured, update_s=measured.update_s / shard + known.update_s)
        step = assemble(own, group, lines, exposed=exposed)
        more = known.passes_s + (known.regather_s if self.config.zero == 3 else 0.0)
        return longer(step, slowdown(measured, group) * lines.passes.micro_batches * more, measured)


def gathered_share(config: FSDP) -> float:
    """The share of their bytes that gathered parameters have."""
    return 0.5 if config.gather == "bf16" else 1.0


def summed_share(config: FSDP) -> float:
    """The share of their bytes that gradients have on the wire."""
    return 0.5 if config.reduce == "bf16" else 1.0


def shards(config: FSDP, group: Group) -> int:
    """How many workers share one copy of the model."""
    if config.shard == "host":
        return group.workers_per_node
    return min(group.workers, config.shard or group.workers)


class _Exchange:
    """Seconds of the exchanges of one unit, within one copy of the model."""

    def __init__(self, measured: Measured, group: Group, copy: Group, config: FSDP) -> None:
        """`copy`: the workers of `group` that share one copy of the model."""
        self.copy = copy
        self.is_hidden = measured.device != "cpu"
        """Whether sums overlap with the backward pass."""
        self._factor, self._sent = gathered_share(config), summed_share(config)
        self._trains = measured.gradient_bytes / max(1, measured.parameter_bytes)
        self.reported = 0.0 if self.is_hidden else copy.all_reduce(_TOLD_BYTES)
        """That workers see whether all have come to the same place."""
        self._copy_s_per_byte = slowdown(measured, group) * measured.copy_s_per_byte
        self._placed_s_per_byte = 0.0 if measured.in_parts else self._copy_s_per_byte
        """Of what passes over parts do themselves: where they were measured it is in there."""
        self._shared = 0.0 if self.is_hidden else group.per_machine / (group.cores or measured.cores)
        """Seconds of all the machine's cores for each that every worker keeps one busy."""
        self.busy_passes = min(1.0, self._shared * pass_cores(measured))
        """The share of the machine's cores that the passes of its workers keep busy."""

    def gathering(self, unit: int) -> float:
        """Its parameters, until every worker has all. Gloo copies them again, during the passes."""
        received = self._factor * unit
        copied = 0.0 if self.is_hidden else self._copy_s_per_byte * received
        wire = self.copy.all_gather(received / self.copy.workers)
        return self.reported + max(wire, self._sending(received)) + copied

    def cores_gathering(self, unit: int) -> float:
        """That gathering and placing it keeps all the machine's cores busy, of every worker together."""
        if self.is_hidden:
            return 0.0
        received = self._factor * unit
        return self._sending(received) + self._copy_s_per_byte * received + self.placing(unit)

    def _sending(self, payload: float) -> float:
        """That the machine's cores are busy with what `payload` bytes of every worker are exchanged by."""
        others = self.copy.workers - 1
        return self._shared * self.copy.processor_seconds(others / self.copy.workers * payload, others)

    def placing(self, unit: int) -> float:
        """What was gathered, parameter by parameter where the layers look for it; nothing is computed meanwhile."""
        return self._placed_s_per_byte * unit

    def summing(self, unit: int) -> float:
        """Its gradients, until every worker has its part of the sum. Gloo has no such sum: rows go to their owners.

        Between CPUs they are copied into rows, and the rows that came are added up.
        """
        unit = round(self._trains * unit)
        if self.is_hidden:
            return self.reported + self.copy.all_gather(self._sent * unit / self.copy.workers)
        wire = max(self.copy.all_to_all(self._sent * unit), self._sending(self._sent * unit))
        return self.reported + wire + _COPIES * self._placed_s_per_byte * unit


def _exposed(zero: int, units: Sequence[int], exchange: _Exchange, lines: Timeline) -> float:
    """Seconds of all micro-batches in which passes wait for gathering or sums."""
    times, passes = lines.passes.micro_batches, lines.passes
    backward = passes.backward
    forward = max(0.0, passes.forward - (times - 1) * backward) / times  # the earlier backward passes are in there
    *blocks, rest = units
    gathers = _waits([rest, *blocks], exchange, forward)
    sums = _sums(units, exchange, backward)
    if zero == 3:
        return times * (gathers + _waits(blocks[::-1], exchange, backward) + sums)
    return gathers + (times if zero == 2 else 1) * sums


def _waits(units: Sequence[int], exchange: _Exchange, seconds: float) -> float:
    """Seconds by which a pass over `units` is longer because each is gathered, from when the one before computes on.

    The later of two ends: that of the wire, and that of the cores, for what is exchanged during a pass needs them, too.
    """
    total = max(1, sum(units))
    began = now = wire_free = 0.0
    for unit in units:
        wire_free = max(wire_free, began) + exchange.gathering(unit)
        began = max(now, wire_free) + exchange.placing(unit)
        now = began + seconds * unit / total
    cores = exchange.busy_passes * seconds + sum(map(exchange.cores_gathering, units))
    return max(0.0, now - seconds, cores - seconds)


def _sums(units: Sequence[int], exchange: _Exchange, seconds: float) -> float:
    if not exchange.is_hidden:
        return sum(exchange.summing(unit) for unit in units)
    return max(0.0, last_end(_leaving(units, exchange, seconds)) - seconds)


def _leaving(units: Sequence[int], exchange: _Exchange, seconds: float) -> Iterator[Transfer]:
    """The sums of a backward pass: of the last block first, of the rest when the pass is over."""
    *blocks, rest = units
    total, done = max(1, sum(blocks)), 0
    for unit in reversed(blocks):
        done += unit
        yield Transfer(ready=seconds * done / total, wire=exchange.summing(unit))
    yield Transfer(ready=seconds, wire=exchange.summing(rest))


def of_a_copy(group: Group, shard: int) -> tuple[Group, Group]:
    """The workers that share a copy of the model, and those that hold the same part of each copy."""
    if shard == group.workers:
        return group, group.shared_by(1, 1)
    if shard <= group.workers_per_node:
        return group.shared_by(1, shard), group.shared_by(group.nodes, max(1, group.workers_per_node // shard))
    nodes = shard // group.workers_per_node
    return group.shared_by(nodes, group.workers_per_node), group.shared_by(group.nodes // nodes, 1)


def units_of(measured: Measured) -> tuple[int, ...]:
    """Bytes of the parameters of each unit, those of no unit last.

    Raises:
        ConfigError: there are none.
    """
    if not measured.unit_bytes:
        raise ConfigError(
            "this model was not found to train in parts",
            where="strategy='fsdp'",
            fix="run it with --set strategy=fsdp on two workers, which says why; or name its units: mh.FSDP(units=[…])",
        )
    return measured.unit_bytes


def make(config: FSDP) -> FullyShardedModel:
    """What the table of strategies calls."""
    return FullyShardedModel(config)
