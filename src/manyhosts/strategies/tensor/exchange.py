"""What workers exchange within a forward and a backward pass, as functions that autograd knows.

Each is the counterpart of another: what is the same everywhere (`shared`) has a gradient that is summed; what is summed
(`summed`) a gradient that is the same everywhere; what is put together (`gathered`) one of which each takes its part,
and what each takes its part of (`taken`) one that is put together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyhosts.communication.mesh import Mesh


class OtherFailed(Exception):
    """Another worker has failed in a trial, and says so."""


class Exchange:
    """The workers that compute parts of each layer. In a trial each says before it sends anything that it is well."""

    def __init__(self, mesh: Mesh) -> None:
        self.workers = mesh.along("tensor")
        self.size, self.rank = mesh.size("tensor"), mesh.coordinate("tensor")
        """How many there are, and which of them this one is, as long as it lives: also before it has met the others."""
        self.is_trial = False

    def bounds(self, total: int) -> tuple[int, int]:
        """Where this worker's part of a dim of `total` begins, and how long it is, as PyTorch cuts a DTensor."""
        return part_of(total, self.size, self.rank)

    def check(self, failed: bool = False) -> None:
        """In a trial: see that no worker has failed. `failed`: this one has.

        Raises:
            OtherFailed: another one has.
        """
        if self.is_trial and self.workers.any(failed) and not failed:
            raise OtherFailed

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the workers, in new memory. Numbers of 16 bits are added in fp32."""
        self.check()
        wide = torch.float32 if tensor.dtype.itemsize == 2 else tensor.dtype
        own = tensor.to(wide, copy=True, memory_format=torch.contiguous_format)
        return self.workers.all_reduce(own).to(tensor.dtype)

    def put_together(self, part: Tensor, total: int) -> Tensor:
        """Parts of the last dim, of all workers, as one tensor whose last dim is `total`."""
        self.check()
        longest = math.ceil(total / self.size)
        full = torch.cat([*self.workers.stack(torch.constant_pad_nd(part, (0, longest - part.shape[-1])))], dim=-1)
        return full if full.shape[-1] == total else full[..., :total].clone()  # only the last parts are shorter

    def take(self, full: Tensor) -> Tensor:
        """This worker's part of the last dim."""
        return full.narrow(-1, *self.bounds(full.shape[-1])).clone(memory_format=torch.contiguous_format)


def part_of(total: int, workers: int, rank: int) -> tuple[int, int]:
    """Where the part of worker `rank` begins, and how long it is."""
    longest = math.ceil(total / workers)
    begin = min(total, longest * rank)
    return begin, min(total, begin + longest) - begin


def has_parts(total: int, workers: int) -> bool:
    """Whether each worker has something of a dim of `total`."""
    return part_of(total, workers, workers - 1)[1] > 0


class _Both(torch.autograd.Function):
    """One function forward, and its counterpart for the gradient."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        return there(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


Way = Callable[[Tensor], Tensor]
_both: Callable[[Tensor, Way, Way], Tensor] = _Both.apply


def shared(given: Tensor, exchange: Exchange) -> Tensor:
    """`given`, which all workers have alike; its gradient is the sum of theirs."""
    return _both(given, lambda each: each.view_as(each), exchange.sum)


def summed(given: Tensor, exchange: Exchange) -> Tensor:
    """The sum over the workers, which all then have alike."""
    return _both(given, exchange.sum, lambda gradient: gradient)


def gathered(given: Tensor, exchange: Exchange, total: int) -> Tensor:
    """Parts of a last dim of `total`, put together, which all then have alike."""
    return _both(given, lambda part: exchange.put_together(part, total), exchange.take)


def taken(given: Tensor, exchange: Exchange) -> Tensor:
    """This worker's part of the last dim of what all have alike."""
    total = given.shape[-1]
    return _both(given, exchange.take, lambda part: exchange.put_together(part, total))
