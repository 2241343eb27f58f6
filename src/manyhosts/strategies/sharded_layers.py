"""Tensor parallelism whose parts of layers are kept in parts: a mesh of `shard` and `tensor`.

Layers are cut first, as `tensor` does and with its trial; then what each worker has of the model is put into units and
parts, as `fsdp` does, over the workers that have the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from manyhosts.communication.world import World
from manyhosts.config.sharded_layers import ShardedLayers
from manyhosts.strategies.cut_model import sum_together
from manyhosts.strategies.fsdp.place import is_kept, is_of_layer
from manyhosts.strategies.fsdp.strategy import FullySharded
from manyhosts.strategies.strategy import Sample
from manyhosts.strategies.tensor.strategy import TensorParallel
from manyhosts.strategies.traits import Traits


class FullyShardedLayers(FullySharded):
    """Parts of the parts of each layer that is cut, and of every other one."""

    traits = Traits(communicates_in_forward=True, holds_full_model=False, survives_loss=False)

    def __init__(self, config: ShardedLayers, world: World) -> None:
        """A strategy for several workers.

        Raises:
            ConfigError: they compute on GPUs, or the mesh does not multiply to them.
        """
        super().__init__(config, world)
        self.mesh.is_cut_twice = True
        self.layers = TensorParallel(config.layers, world, self.mesh)
        self._inner: list[str] = []
        self._kept: list[nn.Parameter] = []

    def look(self, sample: Callable[[], Sample | None]) -> None:
        """Know what the model is called with. Before `place`."""
        self.layers.look(sample)

    def place(self, model: nn.Module) -> nn.Module:
        """Cut the layers, and keep a part of this worker's share of `model`.

        Raises:
            ConfigError: see `TensorParallel.place` and `FullySharded.place`.
        """
        placed = super().place(model)
        self._kept = [each for each in self.parameters if is_of_layer(each) and is_kept(each, self.mesh.size("shard"))]
        return placed

    def cut_layers(self, model: nn.Module, uncut: nn.Module) -> None:
        """Keep this worker's part of the layers that are cut, and all of the others."""
        inner = {id(each) for each in self.layers.cut_layers(model, uncut)}
        self._inner = [name for name, each in model.named_parameters() if id(each) in inner]
        self._model = model

    @torch.no_grad()
    def sum_layers(self) -> None:
        """Sum the gradients of parts that each worker along `shard` keeps, and of what is used between parts."""
        sum_together(self.gradients(self._kept), self.mesh.data.all_reduce)
        sum_together(self.gradients([*map(self._model.get_parameter, self._inner)]), self.layers.layer_exchange.sum)
