"""DiLoCo: workers step alone, and the fragments of the model take turns in being exchanged during further steps."""

from __future__ import annotations

from manyhosts.config.local_steps import DiLoCo
from manyhosts.planner.compute import cores_of, pass_cores
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Measured
from manyhosts.planner.memory import Memory
from manyhosts.planner.step import Step, longer
from manyhosts.planner.strategies.ddp import way_of, wire_of
from manyhosts.planner.strategies.local_sgd import between_copies, inner_step, memory_of

_KEPT = 5
"""Of each fragment: what all share, its momentum, what was dropped twice, and what travels."""


class DiLoCoModel:
    """With the settings of `config`; a warm-up is left out, and rounds are as long as they are at first."""

    def __init__(self, config: DiLoCo) -> None:
        self.config = config

    def step(self, measured: Measured, group: Group) -> Step:
        """See `StrategyModel`."""
        config, inner = self.config, inner_step(self.config, measured, group)
        if group.workers == 1:
            return inner
        travels, computes = self._fragment(measured, between_copies(config, group))
        busy = computes * taken_from_passes(measured, group)
        waits = busy + max(0.0, travels - config.overlap_steps * inner.seconds)
        return longer(inner, 0.0, measured, exposed=waits * config.fragments / config.sync_every)

    def _fragment(self, measured: Measured, group: Group) -> tuple[float, float]:
        """Seconds that a fragment is on its way in all, and that workers compute for it meanwhile."""
        share = 1 / self.config.fragments / self.config.shard
        if self.config.outer_compression == "none":
            return group.all_reduce(share * measured.gradient_bytes), 0.0
        way = way_of(measured, self.config.outer_compression)
        computes = share * way.arithmetic_s
        wire = wire_of(group, way, share=share, exchanges=2, exact=share * measured.gradient_bytes)
        return wire + computes, computes

    def memory(self, measured: Measured, group: Group) -> Memory:
        """See `StrategyModel`."""
        return memory_of(self.config, measured, group, _KEPT * measured.gradient_bytes // self.config.shard)


def taken_from_passes(measured: Measured, group: Group) -> float:
    """By what part of its seconds the arithmetic of a compression makes the passes longer that it overlaps with.

    All of them where these keep every core busy, none where each worker finds a free one; and passes that wait for
    something else need no core meanwhile.
    """
    if measured.device != "cpu":
        return 0.0
    busy = pass_cores(measured)
    free = cores_of(measured, group) - busy
    return min(1.0, max(0.0, 1.0 - free)) * busy / measured.threads


def make(config: DiLoCo) -> DiLoCoModel:
    """What the table of strategies calls."""
    return DiLoCoModel(config)
