"""Local SGD: every worker steps alone, and every `sync_every` steps all take the mean of their models, in the open.

Every step still ends with a word from all to all (the loss, and that each has its gradient), so all wait for the
slowest in each. Where several machines have several workers each, those of a machine sum their gradients in every step.
"""

from __future__ import annotations

from dataclasses import replace

from manyhosts.config.local_steps import DiLoCo, LocalSGD
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Measured
from manyhosts.planner.memory import Memory, model_bytes, uncut
from manyhosts.planner.overlap import Transfer, last_end
from manyhosts.planner.step import Step, Timeline, assemble, longer, timeline
from manyhosts.planner.strategies.ddp import TALLY_BYTES
from manyhosts.planner.strategies.fsdp import FullyShardedModel, of_a_copy

_AT_ONCE = 25_000_000
"""Bytes of the model that travel together: see `strategies.local_updates`."""


class LocalSGDModel:
    """With the settings of `config`; a warm-up is left out, and rounds are as long as they are at first."""

    def __init__(self, config: LocalSGD) -> None:
        self.config = config

    def step(self, measured: Measured, group: Group) -> Step:
        """See `StrategyModel`."""
        inner = inner_step(self.config, measured, group)
        if group.workers == 1:
            return inner
        model = -(-measured.parameter_bytes // self.config.shard) + measured.buffer_bytes
        messages = -(-model // _AT_ONCE)
        mean = messages * between_copies(self.config, group).all_reduce(model / messages)
        return longer(inner, 0.0, measured, exposed=mean / self.config.sync_every)

    def memory(self, measured: Measured, group: Group) -> Memory:
        """See `StrategyModel`. The copy of the model that travels is there when activations are not."""
        model = model_bytes(measured, group.workers)
        copy = model.parameters // self.config.shard + model.buffers if group.workers > 1 else 0
        return memory_of(self.config, measured, group, max(0, copy - model.activations))


def inner_step(config: LocalSGD | DiLoCo, measured: Measured, group: Group) -> Step:
    """A step without what those that step alone exchange when they synchronise."""
    if config.shard > 1:
        return FullyShardedModel(config.copy, alone=True).step(measured, group)
    lines = timeline(measured, group)
    by_node = config.inside_node == "exact"
    exposed = exposed_alone(measured, group, lines, by_node=by_node) if group.workers > 1 else 0.0
    return assemble(measured, group, lines, exposed=exposed)


def between_copies(config: LocalSGD | DiLoCo, group: Group) -> Group:
    """Those that synchronise: workers, or of copies in parts those that hold the same part."""
    return of_a_copy(group, config.shard)[1] if config.shard > 1 else group


def memory_of(config: LocalSGD | DiLoCo, measured: Measured, group: Group, kept: int) -> Memory:
    """What a worker holds that keeps so many bytes to synchronise with others."""
    if config.shard == 1:
        return uncut(model_bytes(measured, group.workers), workers=group.workers, strategy=kept)
    memory = FullyShardedModel(config.copy).memory(measured, group)
    return replace(memory, strategy=memory.strategy + kept)


def exposed_alone(measured: Measured, group: Group, lines: Timeline, *, by_node: bool) -> float:
    """Seconds of a step of workers that step alone in which they exchange: a few numbers, or a machine's gradients."""
    exposed = group.all_reduce(TALLY_BYTES)
    if steps_by_node(group, by_node=by_node):
        near = group.inside()
        transfers = [
            Transfer(ready=lines.when(each.ready), wire=near.all_reduce(each.bytes)) for each in measured.buckets
        ]
        exposed += max(0.0, last_end(transfers) - lines.ends)
    return exposed


def steps_by_node(group: Group, *, by_node: bool) -> bool:
    """Whether machines step alone, and not workers."""
    return by_node and group.nodes > 1 and group.workers_per_node > 1


def make(config: LocalSGD) -> LocalSGDModel:
    """What the table of strategies calls."""
    return LocalSGDModel(config)
