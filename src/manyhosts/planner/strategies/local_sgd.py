"""Local SGD: every worker steps alone, and every `sync_every` steps all take the mean of their models, in the open.

Every step still ends with a word from all to all (the loss, and that each has its gradient), so all wait for the
slowest in each. Where several machines have several workers each, those of a machine sum their gradients in every step.
"""

from __future__ import annotations

from manyhosts.config.local_steps import LocalSGD
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Measured
from manyhosts.planner.memory import Memory, model_bytes, uncut
from manyhosts.planner.overlap import Transfer, last_end
from manyhosts.planner.step import Step, Timeline, assemble, timeline
from manyhosts.planner.strategies.ddp import TALLY_BYTES

_AT_ONCE = 25_000_000
"""Bytes of the model that travel together: see `strategies.local_updates`."""


class LocalSGDModel:
    """With the settings of `config`; a warm-up is left out, and rounds are as long as they are at first."""

    def __init__(self, config: LocalSGD) -> None:
        self.config = config

    def step(self, measured: Measured, group: Group) -> Step:
        """See `StrategyModel`."""
        lines = timeline(measured, group)
        if group.workers == 1:
            return assemble(measured, group, lines, exposed=0.0)
        model = measured.parameter_bytes + measured.buffer_bytes
        messages = -(-model // _AT_ONCE)
        mean = messages * group.all_reduce(model / messages)
        exposed = exposed_alone(measured, group, lines, by_node=self.config.inside_node == "exact")
        return assemble(measured, group, lines, exposed=exposed + mean / self.config.sync_every)

    def memory(self, measured: Measured, group: Group) -> Memory:
        """See `StrategyModel`. The copy of the model that travels is there when activations are not."""
        model = model_bytes(measured, group.workers)
        copy = model.parameters + model.buffers if group.workers > 1 else 0
        return uncut(model, workers=group.workers, strategy=max(0, copy - model.activations))


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
