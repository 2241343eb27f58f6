"""A pipeline: the slowest stage decides, and the others wait for the first micro-batches and the last ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from manyhosts.config.pipelined import BY_LAYERS, MEASURED, Pipeline
from manyhosts.config.stage_order import best_cuts, even_cuts, loads, most_held, order_of, seconds_of, stage_costs
from manyhosts.errors import ConfigError
from manyhosts.planner.compute import micro_batches, passes
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Measured
from manyhosts.planner.memory import Memory, ModelBytes, model_bytes, part_of
from manyhosts.planner.same_samples import forward_share, of_same_samples, step_of
from manyhosts.planner.step import Step

_LOOK = 2
"""The model and the copy that is looked at before it is cut, as a multiple of the parameters."""


class PipelineModel:
    """With the settings of `config`."""

    def __init__(self, config: Pipeline) -> None:
        self.config = config

    def memory(self, measured: Measured, group: Group) -> Memory:
        """See `StrategyModel`."""
        _check(measured, group.workers * self.config.per_worker)
        cuts = self._cuts(measured, group.workers) if self.config.cuts == MEASURED else None
        return self._held(model_bytes(measured, group.workers), group.workers, cuts)

    def largest(self, model: ModelBytes, workers: int) -> Memory:
        """See `CutStrategyModel`. Nothing of it was timed, so it is cut by memory where it is not by layers."""
        return self._held(model, workers, None)

    def _held(self, model: ModelBytes, workers: int, cuts: list[int] | None) -> Memory:
        """That of the worker that holds most: of blocks that are alike, each leaves as much for its backward pass."""
        each_has = self.config.per_worker
        stages, sizes = workers * each_has, [float(each) for each in model.blocks]
        cuts = cuts or (best_cuts(sizes, stages) if self.config.cuts != BY_LAYERS else even_cuts(len(sizes), stages))
        parameters, blocks = loads(sizes, cuts), [end - begin for begin, end in pairwise(cuts)]
        order = order_of(self.config.schedule, workers=workers, virtual_stages=each_has, micro_batches=model.passes)
        found = []
        for worker in range(workers):
            own = range(worker, stages, workers)
            share = sum(parameters[stage] for stage in own) / max(1, model.parameters)
            flight = most_held(order.passes[worker]) * sum(blocks[stage] for stage in own) / len(own) / len(sizes)
            activations = flight * model.together * model.activations
            memory = part_of(model, share, activations=activations, workers=workers, at_start=_LOOK * model.parameters)
            older = sum((self.config.most_versions(stage, stages) - 1) * parameters[stage] for stage in own)
            found.append(replace(memory, strategy=memory.strategy + round(older)))
        return max(found, key=lambda each: each.total)

    def step(self, measured: Measured, group: Group) -> Step:
        """See `StrategyModel`."""
        each_has, workers = self.config.per_worker, group.workers
        _check(measured, workers * each_has)
        same = of_same_samples(measured, workers)
        sizes, cuts = micro_batches(same, workers), self._cuts(measured, workers)
        order = order_of(self.config.schedule, workers=workers, virtual_stages=each_has, micro_batches=len(sizes))
        each, forward = passes(same, group).total / len(sizes), forward_share(measured)
        shares = loads([block.share for block in measured.blocks], cuts)
        cost = stage_costs(
            order, [share * each * forward for share in shares], [share * each * (1 - forward) for share in shares]
        )
        sent = max(sizes) * max(block.sent_bytes for block in measured.blocks)
        computed, all_there = seconds_of(order, cost), seconds_of(order, cost, group.message(sent))
        largest = max(loads([float(block.parameter_bytes) for block in measured.blocks], cuts))
        updated = largest * self.config.updates(len(sizes))
        return step_of(same, group, compute=computed, exposed=all_there - computed, updated=updated)

    def _cuts(self, measured: Measured, workers: int) -> list[int]:
        stages = workers * self.config.per_worker
        costs = [
            each.share if self.config.cuts == MEASURED else float(each.parameter_bytes) for each in measured.blocks
        ]
        return even_cuts(len(costs), stages) if self.config.cuts == BY_LAYERS else best_cuts(costs, stages)


def _check(measured: Measured, stages: int) -> None:
    if len(measured.blocks) < stages:
        has = f"{len(measured.blocks)} blocks" if measured.blocks else "no blocks that it calls one after the other"
        raise ConfigError(
            f"the model has {has}, and there would be {stages} stages",
            where="strategy='pipeline'",
            fix="plan fewer workers, or write the model in more blocks: docs/pipeline.md says which",
        )


def make(config: Pipeline) -> PipelineModel:
    """What the table of strategies calls."""
    return PipelineModel(config)
