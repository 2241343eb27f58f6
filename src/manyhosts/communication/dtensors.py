"""Tensors that PyTorch keeps in parts as DTensors: which part a worker holds, and the full tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from manyhosts.communication.holding import Holding
from manyhosts.communication.layout import as_real
from manyhosts.communication.mesh import AXES, Mesh
from manyhosts.communication.parts import TensorPart


def gathered(tensor: DTensor) -> Tensor:
    """All of `tensor`, by way of the devices of its mesh: its parts may lie in the memory of hosts. All call this."""
    return cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()


class DTensors(Holding):
    """A `Holding` where what is cut is a DTensor, and what is not is complete on every worker."""

    def __init__(self, mesh: Mesh, *, alike: Sequence[str] = AXES) -> None:
        """`mesh`: the workers. Those along an axis of `alike` hold the same, where no DTensor says otherwise."""
        self.mesh, self.alike = mesh, alike

    def part(self, tensor: Tensor) -> Tensor | TensorPart:
        """This worker's block of a DTensor; of blocks that several hold the first of them gives it."""
        if not isinstance(tensor, DTensor):
            return tensor
        block, known = self.block(tensor), tensor.device_mesh.mesh_dim_names or ()
        if not any(self.mesh.coordinate(axis) for axis in self.alike if axis not in known) and not any(
            self._copies(tensor)
        ):
            return block
        return TensorPart(block.local.new_empty((0,) * block.local.dim()), (0,) * block.local.dim(), block.shape)

    def _copies(self, tensor: DTensor) -> list[int]:
        """This worker's number along each dim of its mesh on which PyTorch knows that workers hold the same."""
        place = tensor.device_mesh.get_coordinate()
        assert place is not None, "a worker holds a DTensor of a mesh that it is not in"
        return [number for number, each in zip(place, tensor.placements, strict=True) if isinstance(each, Replicate)]

    def local(self, tensor: Tensor) -> Tensor:
        """The block in this worker's memory."""
        tensor = tensor.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def block(self, tensor: Tensor) -> TensorPart:
        """The block with its place in the full tensor."""
        if not isinstance(tensor, DTensor):
            return TensorPart.all_of(tensor)
        local, shape = self.local(tensor), tuple(tensor.shape)
        found, offset = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
        assert tuple(found) == tuple(local.shape), f"PyTorch holds {tuple(local.shape)} where {tuple(found)} belongs"
        return TensorPart(local, tuple(offset) if local.numel() else (0,) * len(shape), shape)

    def full(self, tensor: Tensor) -> Tensor:
        """All of a DTensor; every worker of its mesh calls this."""
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            return tensor
        return self._full_now(tensor) if tensor.device_mesh.device_type == "cpu" else gathered(tensor)

    def _full_now(self, tensor: DTensor) -> Tensor:
        """The same from the workers of now, who may be others than those that PyTorch knows."""
        full = tensor.to_local()
        for axis, placement in zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True):
            if isinstance(placement, Shard):
                found = torch.cat(self.mesh.along(axis).gather(as_real(full.movedim(placement.dim, 0).contiguous())))
                found = torch.view_as_complex(found) if full.is_complex() else found
                full = found.movedim(0, placement.dim).contiguous()
        return full

    def like(self, tensor: Tensor, local: Tensor) -> Tensor:
        """A DTensor with the mesh, placements and shape of `tensor`, on the device of `local`."""
        if not isinstance(tensor, DTensor):
            return local
        if local.device.type != tensor.device_mesh.device_type:  # `from_local` would copy it to the GPU
            made = torch.empty_like(tensor, dtype=local.dtype, device=local.device)
            cast(DTensor, made).to_local().copy_(local)
            return made
        return cast(
            Tensor,
            DTensor.from_local(
                local,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            ),
        )
