"""How the tensors of a user's model lie in memory, and how they travel whatever that is.

A collective reads and writes as many bytes as a tensor has elements, one after another from its first one. So it must
never be given a tensor whose elements have gaps between them, are in another order or on top of each other: a slice, a
transposed matrix, an expanded row. Nor does Gloo know every dtype. What is given to it here are contiguous bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from manyhosts.communication.world import World

_TOGETHER_BYTES = 1 << 20
"""Smaller tensors travel in one message of about so many bytes: each message costs a round trip."""


def is_dtensor(tensor: object) -> bool:
    """Whether PyTorch keeps `tensor` in parts as a DTensor. What makes none does not load their module: 0.5 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def memory_order(tensor: Tensor) -> list[int] | None:
    """The dims of `tensor` from the farthest strides to the nearest, where its elements lie without gap or overlap.

    None where they do not. A dim of size 1 comes where its stride says, which changes no element's place.
    """
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -tensor.shape[dim]))
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and strides[dim] != expected:
            return None
        expected *= tensor.shape[dim]
    return order


def memory_shape(tensor: Tensor) -> torch.Size:
    """The shape of a gradient of `tensor` as it lies in memory, from the farthest dim to the nearest."""
    order = memory_order(tensor)
    return tensor.shape if order is None else torch.Size(tensor.shape[dim] for dim in order)


def real_numbers(tensor: Tensor) -> int:
    """How many real numbers `tensor` holds: two for each complex one."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def real_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of these numbers."""
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def gradient_view(flat: Tensor, parameter: Tensor) -> Tensor:
    """`flat`, of shape (real numbers of `parameter`,), as a gradient of it, with the strides autograd would give.

    Those are the parameter's own where it lies without gap or overlap, and contiguous ones where it does not. Fused
    optimizers read parameter and gradient side by side and rely on that.
    """
    if parameter.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    if memory_order(parameter) is None:
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as a view of its real and imaginary parts, in a last dim of 2; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def without_repeats(tensor: Tensor) -> Tensor:
    """The view of an expanded `tensor` that has each element of its memory once; any other as it is.

    PyTorch refuses to write into an expanded tensor; it does write into this.
    """
    for dim, size in enumerate(tensor.shape):
        if size > 1 and tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@torch.no_grad()
def put_flat(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the numbers of `flat`, one after another, into `tensors`, which have as many together."""
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def write(tensor: Tensor, value: Tensor) -> None:
    """Copy `value`, of the shape of `tensor`, into it, whether it is expanded or not."""
    own = without_repeats(tensor)
    for dim, size in enumerate(own.shape):
        value = value.narrow(dim, 0, size)
    own.detach().copy_(value)


@torch.no_grad()
def spread(tensors: Iterable[Tensor], world: World, source: int = 0) -> None:
    """Replace each tensor on every worker by that of worker `source`: of any dtype, layout and shape, also of none.

    Called by all workers, with tensors of the same dtypes and shapes; how they lie in memory may differ.
    """
    if world.size == 1:
        return
    group: list[Tensor] = []
    for tensor in map(without_repeats, tensors):
        if tensor.numel():
            group.append(tensor.detach())
        if sum(each.nbytes for each in group) >= _TOGETHER_BYTES:
            _spread(group, world, source)
            group = []
    _spread(group, world, source)


def _spread(tensors: Sequence[Tensor], world: World, source: int) -> None:
    if not tensors:
        return
    parts = [bytes_of(tensor).to(world.device) for tensor in tensors]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    if len(parts) == 1 and world.rank != source and flat.data_ptr() != tensors[0].data_ptr():
        flat = torch.empty_like(flat)
    world.broadcast(flat, source)
    if world.rank == source:
        return
    for tensor, part in zip(tensors, flat.split([part.numel() for part in parts]), strict=True):
        if part.data_ptr() != tensor.data_ptr():
            # A slice may begin at a byte that no wider number may begin at.
            tensor.copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements of `tensor` one after another, as bytes; its own memory where they lie so."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(math.prod(plain.shape)).view(torch.uint8)
