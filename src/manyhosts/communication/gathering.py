"""Tensors of any shape and dtype, words and plain values, from every worker to every worker, without pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyhosts import errors
from manyhosts.communication.collectives import Collectives
from manyhosts.communication.layout import bytes_of

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_MOST_DIMS = 8
_COLUMNS = 2 + _MOST_DIMS
"""Of what says how a tensor looks: its dtype, how many dims it has, and its shape."""


def can_travel(tensor: Tensor) -> bool:
    """Whether `gather_lists` takes `tensor`."""
    return tensor.dim() <= _MOST_DIMS and tensor.dtype in _DTYPES and tensor.layout is torch.strided


def gather_lists(world: Collectives, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The lists of all workers, by rank, on every worker. Lists may differ in length, and tensors in shape and dtype.

    Raises:
        ValueError: a tensor has more than 8 dims, or a dtype that cannot travel.
    """
    if world.size == 1:
        return [list(tensors)]
    return [parted(each) for each in world.gather(joined([each.to(world.device) for each in tensors]).to(world.device))]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one device as one of bytes, shape (bytes,) uint8, which `parted` splits again.

    Raises:
        ValueError: a tensor has more than 8 dims, or a dtype that cannot travel.
    """
    rows = [[len(tensors)]]
    for tensor in tensors:
        if tensor.dim() > _MOST_DIMS or tensor.dtype not in _DTYPES:
            raise ValueError(f"cannot send a tensor of {tensor.dim()} dims and {tensor.dtype}")
        rows.append([_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape])
    headers = torch.tensor([row + [0] * (_COLUMNS - len(row)) for row in rows])
    parts = [bytes_of(tensor.detach()) for tensor in tensors]
    return torch.cat([bytes_of(headers).to(parts[0].device if parts else "cpu"), *parts])


def parted(data: Tensor) -> list[Tensor]:
    """The tensors that `joined` has put together, on the device of `data`."""
    begin = 8 * _COLUMNS * (1 + int(data[:8].clone().view(torch.int64)))  # `data` may begin at an odd byte of another
    tensors = []
    for code, dims, *shape in data[:begin].clone().view(torch.int64).view(-1, _COLUMNS)[1:].tolist():
        dtype = _DTYPES[code]
        length = math.prod(shape[:dims]) * dtype.itemsize
        # A copy, because a slice that begins at an odd byte cannot be viewed as wider numbers.
        tensors.append(data[begin : begin + length].clone().view(dtype).reshape(shape[:dims]))
        begin += length
    return tensors


def gather_words(world: Collectives, word: str) -> list[str]:
    """One word of every worker, by rank, on every worker."""
    own = torch.frombuffer(bytearray(word.encode() or b"\0"), dtype=torch.uint8)
    return [bytes(found[0].tolist()).decode().rstrip("\0") for found in gather_lists(world, [own])]


def gather_plain(world: Collectives, own: Any, error: errors.ManyhostsError | None = None) -> list[Any]:
    """What every worker sends, by rank, on every worker: plain values, as JSON has them.

    Raises:
        ManyhostsError: the first `error` that a worker sends in place of a value, on all workers alike.
    """
    reported: list[Any] = [own]
    if error is not None:
        kind = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        reported = [kind.__name__, error.what, error.where, error.fix]
    rows = [json.loads(word) for word in gather_words(world, json.dumps(reported))]
    for name, what, where, fix in (row for row in rows if len(row) > 1):
        raise getattr(errors, name)(what, where=where, fix=fix)
    return [value for (value,) in rows]
