"""Cut layers whose parts are kept in parts: those who cut a layer act as one worker of `fsdp`, with its share of it."""

from __future__ import annotations

from dataclasses import replace

from manyhosts.config.sharded_layers import ShardedLayers
from manyhosts.planner.compute import batch_of, micro_batches, slowdown
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Measured, Network
from manyhosts.planner.memory import Memory, ModelBytes, model_bytes, snapshot
from manyhosts.planner.step import Step
from manyhosts.planner.strategies.fsdp import FullyShardedModel, shards, units_of
from manyhosts.planner.strategies.tensor import TRIAL, layers_of, share_of


class ShardedLayersModel:
    """With the settings of `config`, which say over how many workers each layer is cut."""

    def __init__(self, config: ShardedLayers) -> None:
        self.config, self.readers = config, FullyShardedModel(config)

    def memory(self, measured: Measured, group: Group) -> Memory:
        """See `StrategyModel`."""
        units_of(measured)
        layers_of(measured)
        readers, _ = by_axis(group, self.config.size)
        return self._held(model_bytes(measured, group.workers), group.workers, shards(self.config, readers))

    def largest(self, model: ModelBytes, workers: int) -> Memory:
        """See `CutStrategyModel`. All of them share one copy."""
        return self._held(model, workers, workers // self.config.size)

    def _held(self, model: ModelBytes, workers: int, shard: int) -> Memory:
        """What those hold who share out a worker's part of the layers; activations count as if no layer were cut."""
        tensor = self.config.size
        share = share_of(model.divisible, model.parameters, tensor)
        # Each has the samples of so many, or of all together where passes are no larger for it.
        together = min(float(tensor), model.together)
        own = replace(
            model,
            parameters=round(share * model.parameters),
            gradients=round(share * model.gradients),
            optimizer=round(share * model.optimizer),
            update=round(share * model.update),
            units=tuple(round(share * each) for each in model.units),
            tail=round(share * model.tail),
            activations=round(together * model.activations),
            backward=round(together * model.backward),
            several=model.passes > workers // tensor,
        )
        found = replace(self.readers.held_by(own, workers, shard), passing=snapshot(model, workers))
        return replace(found, strategy=found.strategy + max(0, TRIAL * model.parameters - found.total))

    def step(self, measured: Measured, group: Group) -> Step:
        """See `StrategyModel`."""
        layers, (readers, together) = layers_of(measured), by_axis(group, self.config.size)
        own = as_one_reader(measured, group, self.config.size)
        step = self.readers.step(own, readers)
        each = layers.exchanged_bytes / max(1, layers.exchanges)
        sizes = micro_batches(own, readers.workers)
        exposed = sum(layers.exchanges * together.all_reduce(size * each) for size in sizes)
        return replace(step, communication_exposed=step.communication_exposed + exposed)


def by_axis(group: Group, tensor: int) -> tuple[Group, Group]:
    """Those of `group` who hold the same part of each layer, and those who cut one, next to each other.

    On each machine there are as many of one kind as there are workers of the other: they share its connections.
    """
    inside = min(tensor, group.workers_per_node)
    nodes = -(-tensor // inside)
    readers = group.shared_by(max(1, group.nodes // nodes), group.workers_per_node // inside)
    return _sharing(readers, inside), _sharing(group.shared_by(nodes, inside), group.workers_per_node // inside)


def _sharing(group: Group, groups: int) -> Group:
    def shared(network: Network) -> Network:
        owners = network.owners_bytes_per_second / groups
        return replace(network, bytes_per_second=network.bytes_per_second / groups, owners_bytes_per_second=owners)

    return replace(group, between=shared(group.between), within=shared(group.within))


def as_one_reader(measured: Measured, group: Group, tensor: int) -> Measured:
    """The training as those have it who cut a layer: more samples for each, and its share of what there is of them."""
    readers, _ = by_axis(group, tensor)
    share = share_of(layers_of(measured).parameter_bytes, measured.parameter_bytes, tensor)
    units = tuple(round(share * each) for each in units_of(measured))
    buckets = tuple(replace(each, bytes=round(share * each.bytes)) for each in measured.buckets)
    crowded = slowdown(measured, group) / slowdown(measured, readers)
    return replace(
        measured.slower(compute=share * crowded),
        step_other_s=crowded * measured.step_other_s,
        parameter_bytes=sum(units),
        unit_bytes=units,
        buckets=buckets,
        gradient_bytes=sum(each.bytes for each in buckets),
        optimizer_bytes=round(share * measured.optimizer_bytes),
        global_batch=-(-batch_of(measured, group.workers) // readers.workers),
        batch_grows=True,
    )


def make(config: ShardedLayers) -> ShardedLayersModel:
    """What the table of strategies calls."""
    return ShardedLayersModel(config)
