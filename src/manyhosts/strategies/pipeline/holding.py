"""Which stage holds which tensor: all of it where it is owned, and elsewhere its shape alone, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.holding import Holding
from manyhosts.communication.parts import TensorPart
from manyhosts.communication.world import World


class Stages(Holding):
    """A tensor is held whole by one worker, or, as what is no part of the model, by all."""

    by_stage = True

    def __init__(self, world: World) -> None:
        self.world = world

    def holds(self, tensor: Tensor) -> bool:
        """Whether this worker has its values."""
        return not tensor.is_meta

    def part(self, tensor: Tensor) -> Tensor | TensorPart:
        """`tensor`, or a part of it without elements. A snapshot finds out who has it (`snapshot.merged`)."""
        if not tensor.is_meta:
            return tensor
        shape = tuple(tensor.shape)
        return TensorPart(torch.empty(0, dtype=tensor.dtype), (0,) * len(shape), shape)

    def local(self, tensor: Tensor) -> Tensor:
        """`tensor`, or one without elements; zero in place of a single number."""
        tensor = tensor.detach()
        return torch.zeros((0,) * tensor.dim(), dtype=tensor.dtype) if tensor.is_meta else tensor

    def block(self, tensor: Tensor) -> TensorPart:
        """The same with its place."""
        shape = tuple(tensor.shape)
        return TensorPart(self.local(tensor), (0,) * len(shape), shape)

    def like(self, tensor: Tensor, local: Tensor) -> Tensor:
        """`local`, where this worker holds `tensor`."""
        return tensor if tensor.is_meta else local

    def whole(self, tensor: Tensor) -> Tensor:
        """All of `tensor`, from the first worker that has it. Every worker calls this."""
        tensor, world = tensor.detach(), self.world
        found = world.stack(torch.tensor([not tensor.is_meta], dtype=torch.int64)).flatten().tolist()
        if all(found):
            return tensor
        dense = torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.contiguous().clone()
        flat = torch.view_as_real(dense) if dense.is_complex() else dense
        if flat.numel():
            world.broadcast(flat.reshape(-1).view(torch.uint8), source=found.index(1))
        return dense

    def everywhere(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that every worker has. Every worker calls this."""
        own = [name for name, each in tensors.items() if not each.is_meta]
        common = set(own).intersection(*gather_plain(self.world, own))
        return {name: each for name, each in tensors.items() if name in common}
