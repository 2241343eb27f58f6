"""Updates by micro-batch: a step is as many rounds as a worker computes of its micro-batches, and a synchronisation.

A round of a worker is a pull, two passes and a push. The others compute meanwhile, so it takes as long as one worker
needs by itself, or as long as a server is busy with all of them, whichever is more. What is planned for is that all are
equally fast: then a bound makes none wait, and a worker that is always slow is among no figures of a plan.
"""

from __future__ import annotations

import math
from dataclasses import replace

from manyhosts.config.asynchronous import Hogwild, ParameterServer
from manyhosts.planner.compute import slowdown
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Measured
from manyhosts.planner.memory import Memory, model_bytes, uncut
from manyhosts.planner.slowest import expected_largest
from manyhosts.planner.step import Step, assemble, timeline
from manyhosts.planner.strategies.ddp import TALLY_BYTES, way_of

_COPIES = 3
"""Of what is pulled or pushed, by who packs it and who unpacks it."""
_TALLIES = 4
"""Words from all to all at a synchronisation: what the optimizers keep, staleness, values and flags."""


class ServersModel:
    """With the settings of `config`; Hogwild is servers that are asked for nothing but micro-batches."""

    def __init__(self, config: ParameterServer | Hogwild) -> None:
        self.config = config

    def step(self, measured: Measured, group: Group) -> Step:
        """See `StrategyModel`."""
        rounds, servers = 1, self._servers(group)
        if self.config.many_updates:
            size = min(measured.micro_batch or measured.global_batch, measured.global_batch)
            rounds = math.ceil(measured.global_batch / size / group.workers)
            measured = replace(measured, global_batch=rounds * size * group.workers, batch_norm_layers=0)
        lines = timeline(measured, group)
        update, exposed = slowdown(measured, group) * measured.update_s, 0.0
        if group.workers > 1:
            by_itself, busy = self._round(measured, group)
            if self.config.many_updates:
                busy += update * group.workers / servers - (lines.passes.total / rounds + update)
            exposed = rounds * max(by_itself, busy) + self._end_of_step(measured, group)
        found = assemble(measured, group, lines, exposed=exposed)
        if not self.config.many_updates:
            return replace(found, update=found.update / servers)
        late = lines.passes.spread / math.sqrt(rounds) * expected_largest(group.workers)  # of the last round alone
        return replace(found, straggler=late, update=found.update * rounds)

    def memory(self, measured: Measured, group: Group) -> Memory:
        """See `StrategyModel`. There are the values of before, what a server keeps, and what all keep."""
        model = model_bytes(measured, group.workers)
        after = model.parameters + model.optimizer
        kept = model.parameters + after // self._servers(group) + (after if group.workers > 1 else 0)
        return uncut(model, workers=group.workers, strategy=max(0, kept - model.activations))

    def _servers(self, group: Group) -> int:
        return min(getattr(self.config, "servers", None) or group.workers, group.workers)

    def _round(self, measured: Measured, group: Group) -> tuple[float, float]:
        """Seconds that a worker exchanges in a round where no other does, and that the busiest server does for all."""
        network = group.between if group.nodes > 1 else group.within
        others, servers = group.workers - 1, self._servers(group)
        if self.config.one_host:
            return 4 * network.latency_s, 0.0  # a question for a micro-batch, and a word that it is done
        way = self.config.compression
        pushed = measured.gradient_bytes if way == "none" else way_of(measured, way).reduced_bytes
        if not self.config.many_updates:  # one server after another takes in what all others send it
            return servers * network.latency_s + others * pushed / network.bytes_per_second, 0.0
        travels, elsewhere = measured.parameter_bytes + pushed, others / group.workers
        copying = _COPIES * travels * measured.copy_s_per_byte
        messages = 4 + 4 * servers * elsewhere  # each question has an answer; of every server a pull and a push
        by_itself = messages * network.latency_s + elsewhere * travels / network.bytes_per_second + copying
        # A connection has two directions; on one machine all is moved by the same memory.
        busiest = others * (travels if group.nodes == 1 else max(measured.parameter_bytes, pushed) / servers)
        return by_itself, busiest / network.bytes_per_second

    def _end_of_step(self, measured: Measured, group: Group) -> float:
        """Seconds until every worker has what all servers keep."""
        kept = 0 if self.config.one_host else measured.parameter_bytes + measured.optimizer_bytes
        copied = _COPIES * (measured.parameter_bytes + kept) * measured.copy_s_per_byte
        return group.all_gather(kept / group.workers) + copied + _TALLIES * group.all_reduce(TALLY_BYTES)
