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
)
_MOST_DIMS = 8


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
    headers = torch.zeros((len(tensors), 2 + _MOST_DIMS), dtype=torch.int64, device=world.device)
    for row, tensor in enumerate(tensors):
        if tensor.dim() > _MOST_DIMS or tensor.dtype not in _DTYPES:
            raise ValueError(f"cannot send a tensor of {tensor.dim()} dims and {tensor.dtype}")
        facts = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        headers[row, : len(facts)] = torch.tensor(facts, device=world.device)
    flat = [tensor.detach().to(world.device).contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    payload = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=world.device)
    return [
        _unpack(facts.tolist(), data) for facts, data in zip(world.gather(headers), world.gather(payload), strict=True)
    ]


def _unpack(headers: list[list[int]], payload: Tensor) -> list[Tensor]:
    tensors = []
    begin = 0
    for code, dims, *shape in headers:
        dtype = _DTYPES[code]
        length = math.prod(shape[:dims]) * dtype.itemsize
        # A copy, because a slice that begins at an odd byte cannot be viewed as wider numbers.
        tensors.append(payload[begin : begin + length].clone().view(dtype).reshape(shape[:dims]))
        begin += length
    return tensors


def gather_words(world: Collectives, word: str) -> list[str]:
    """One word of every worker, by rank, on every worker."""
    own = torch.frombuffer(bytearray(word.encode() or b"\0"), dtype=torch.uint8)
    return [bytes(found[0].tolist()).decode().rstrip("\0") for found in gather_lists(world, [own])]


def gather_plain(world: Collectives, own: Any, error: errors.ManyhostsError | None = None) -> list[Any]:
    """What every worker tells, by rank, on every worker: plain values, as JSON has them.

    Raises:
        ManyhostsError: the first `error` that a worker tells in place of a value, on all workers alike.
    """
    reported: list[Any] = [own]
    if error is not None:
        kind = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        reported = [kind.__name__, error.what, error.where, error.fix]
    rows = [json.loads(word) for word in gather_words(world, json.dumps(reported))]
    for name, what, where, fix in (row for row in rows if len(row) > 1):
        raise getattr(errors, name)(what, where=where, fix=fix)
    return [value for (value,) in rows]
