"""Tensor parallelism: every worker computes all samples with its part of the layers that are cut, and the rest."""

from __future__ import annotations

from manyhosts.config.tensor_cut import Tensor
from manyhosts.errors import ConfigError
from manyhosts.planner.compute import micro_batches, passes
from manyhosts.planner.group import Group
from manyhosts.planner.measured import CutLayers, Measured
from manyhosts.planner.memory import Memory, ModelBytes, model_bytes, part_of
from manyhosts.planner.same_samples import of_same_samples, step_of
from manyhosts.planner.step import Step

TRIAL = 4
"""The model and what a trial of a cut holds, as a multiple of the parameters: a copy of 64 bits, gradients of 32."""


class TensorParallelModel:
    """Over all workers, with the plan that is found."""

    def memory(self, measured: Measured, group: Group) -> Memory:
        """See `StrategyModel`."""
        layers_of(measured)
        return self.largest(model_bytes(measured, group.workers), group.workers)

    def largest(self, model: ModelBytes, workers: int) -> Memory:
        """See `CutStrategyModel`. Activations count as if nothing between layers were cut: not less."""
        activations = model.together * model.activations
        share = share_of(model.divisible, model.parameters, workers)
        return part_of(model, share, activations=activations, workers=workers, at_start=TRIAL * model.parameters)

    def step(self, measured: Measured, group: Group) -> Step:
        """See `StrategyModel`. A layer is taken to take as long as its parameters are many."""
        layers, same = layers_of(measured), of_same_samples(measured, group.workers)
        share = share_of(layers.parameter_bytes, measured.parameter_bytes, group.workers)
        sizes = micro_batches(same, group.workers)
        each = layers.exchanged_bytes / max(1, layers.exchanges)
        exposed = sum(layers.exchanges * group.all_reduce(size * each) for size in sizes)
        updated = share * measured.parameter_bytes
        return step_of(same, group, compute=share * passes(same, group).total, exposed=exposed, updated=updated)


def share_of(cut: int, total: int, workers: int) -> float:
    """Of the parameters that one worker has."""
    part = cut / max(1, total)
    return 1 - part + part / workers


def layers_of(measured: Measured) -> CutLayers:
    """The layers that can be cut.

    Raises:
        ConfigError: there are none.
    """
    if measured.cut_layers is None:
        raise ConfigError(
            "this model has no layers that were found to be cut over workers",
            where="strategy='tensor'",
            fix="run it with --set strategy=tensor on two workers, which says why",
        )
    return measured.cut_layers


def make(_config: Tensor) -> TensorParallelModel:
    """What the table of strategies calls."""
    return TensorParallelModel()
