"""Fully sharded data parallelism: what a worker holds when most is whole, and how much of the gathering is hidden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from manyhosts.config.fully_sharded import FSDP
from manyhosts.errors import ConfigError
from manyhosts.planner.compute import slowdown
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Measured
from manyhosts.planner.memory import Memory, ModelBytes, in_parts, model_bytes
from manyhosts.planner.overlap import Transfer, last_end
from manyhosts.planner.step import Step, Timeline, assemble, timeline

_COPIES = 2
"""Of a unit's gradients between CPUs: into rows, and out of those that came."""
_TOLD_BYTES = 16
"""That workers on CPUs exchange before each unit, to see that all come to the same one."""


class FullyShardedModel:
    """With the settings of `config`."""

    def __init__(self, config: FSDP) -> None:
        self.config = config

    def memory(self, measured: Measured, group: Group) -> Memory:
        """See `StrategyModel`."""
        _units(measured)
        return self.held(model_bytes(measured, group.workers), group.workers)

    def held(self, model: ModelBytes, workers: int) -> Memory:
        """See `CutStrategyModel`."""
        return in_parts(
            model,
            shard=shards(self.config, workers),
            workers=workers,
            zero=self.config.zero,
            gathered=gathered_share(self.config),
        )

    def step(self, measured: Measured, group: Group) -> Step:
        """See `StrategyModel`."""
        lines = timeline(measured, group)
        if group.workers == 1:
            return assemble(measured, group, lines, exposed=0.0)
        shard = shards(self.config, group.workers)
        copy, across = _of_a_copy(group, shard)
        exchange = _Exchange(measured, copy, shard, self.config, copying=slowdown(measured, group))
        exposed = _exposed(self.config.zero, _units(measured), exchange, lines)
        if shard < group.workers:
            exposed += across.all_reduce(summed_share(self.config) * measured.gradient_bytes / shard)
        return assemble(measured, group, lines, exposed=exposed)


def gathered_share(config: FSDP) -> float:
    """The share of their bytes that gathered parameters have."""
    return 0.5 if config.gather == "bf16" else 1.0


def summed_share(config: FSDP) -> float:
    """The share of their bytes that gradients have on the wire."""
    return 0.5 if config.reduce == "bf16" else 1.0


def shards(config: FSDP, workers: int) -> int:
    """How many workers share one copy of the model."""
    return min(workers, config.shard or workers)


class _Exchange:
    """Seconds of the exchanges of one unit, within one copy of the model."""

    def __init__(self, measured: Measured, copy: Group, shard: int, config: FSDP, *, copying: float) -> None:
        """`copying`: how many times as long as one worker alone a worker copies."""
        self.copy, self.shard = copy, shard
        self.is_hidden = measured.device != "cpu"
        """Whether sums run beside the backward pass."""
        self._factor, self._sent = gathered_share(config), summed_share(config)
        self._trains = measured.gradient_bytes / max(1, measured.parameter_bytes)
        self._told = 0.0 if self.is_hidden else copy.all_reduce(_TOLD_BYTES)
        self._copy_s_per_byte = copying * measured.copy_s_per_byte

    def gathering(self, unit: int) -> float:
        """Its parameters, until every worker has all. Gloo copies them once more, beside the passes."""
        received = self._factor * unit
        copied = 0.0 if self.is_hidden else self._copy_s_per_byte * received
        return self._told + self.copy.all_gather(received / self.shard) + copied

    def placing(self, unit: int) -> float:
        """What was gathered, parameter by parameter where the layers look for it; nothing is computed meanwhile."""
        return self._copy_s_per_byte * unit

    def summing(self, unit: int) -> float:
        """Its gradients, until every worker has its part of the sum. Gloo has no such sum: rows go to their owners.

        Between CPUs they are copied into rows, and the rows that came are added up.
        """
        unit = round(self._trains * unit)
        if self.is_hidden:
            return self._told + self.copy.all_gather(self._sent * unit / self.shard)
        return self._told + self.copy.all_to_all(self._sent * unit) + _COPIES * self._copy_s_per_byte * unit


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
    """Seconds by which a pass over `units` is longer because each is gathered, from when the one before computes on."""
    total = max(1, sum(units))
    began = now = wire_free = 0.0
    for unit in units:
        wire_free = max(wire_free, began) + exchange.gathering(unit)
        began = max(now, wire_free) + exchange.placing(unit)
        now = began + seconds * unit / total
    return max(0.0, now - seconds)


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


def _of_a_copy(group: Group, shard: int) -> tuple[Group, Group]:
    """The workers that share a copy of the model, and those that hold the same part of each copy."""
    if shard == group.workers:
        return group, group.shared_by(1, 1)
    if shard <= group.workers_per_node:
        return group.shared_by(1, shard), group.shared_by(group.nodes, max(1, group.workers_per_node // shard))
    nodes = shard // group.workers_per_node
    return group.shared_by(nodes, group.workers_per_node), group.shared_by(group.nodes // nodes, 1)


def _units(measured: Measured) -> tuple[int, ...]:
    if not measured.unit_bytes:
        raise ConfigError(
            "what units this model can be cut into was not measured",
            where="strategy='fsdp'",
            fix="measure again with manyhosts plan, or name the units: mh.FSDP(units=[…])",
        )
    return measured.unit_bytes


def make(config: FSDP) -> FullyShardedModel:
    """What the table of strategies calls."""
    return FullyShardedModel(config)
