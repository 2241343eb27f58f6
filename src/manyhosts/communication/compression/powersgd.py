"""PowerSGD: a gradient matrix M is sent as two thin ones, P = M Q and Q = Mᵀ P, found by one step of power iteration.

Source: Vogels, Karimireddy and Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", arXiv:1905.13727. Q is kept from step to step (warm start), P made orthogonal in between. The Ps of a
chunk travel together, and so do the Qs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from manyhosts import device
from manyhosts.communication.compression.exchange import Chunk
from manyhosts.communication.link import Link
from manyhosts.config.strategies import DDP

_SEED = 0x905


class PowerSGD:
    """Sends `rank * (rows + columns)` numbers in place of `rows * columns`."""

    full_tensors = True

    def __init__(self, config: DDP) -> None:
        self.rank = config.powersgd_rank
        self.q: dict[int, Tensor] = {}
        """Of each tensor by its key, what its Q was in the step before; shape (columns, rank), equal on all workers."""

    def worth_it(self, shape: torch.Size) -> bool:
        """Whether two thin matrices are smaller than one of `shape`."""
        return len(shape) >= 2 and self.rank * (shape[0] + shape[1:].numel()) < shape.numel()

    def __call__(self, chunk: Chunk, link: Link) -> Tensor:
        """See `Compression`."""
        values = chunk.values.float()
        counts = [shape.numel() for shape in chunk.shapes]
        matrices = [part.view(shape[0], -1) for part, shape in zip(values.split(counts), chunk.shapes, strict=True)]
        qs = [self._start(key, matrix) for key, matrix in zip(chunk.keys, matrices, strict=True)]
        ps = _summed_at_once(link, [matrix @ q for matrix, q in zip(matrices, qs, strict=True)])
        ps = [torch.linalg.qr(p).Q for p in ps]
        own = [matrix.T @ p for matrix, p in zip(matrices, ps, strict=True)]
        sent = torch.cat([(p @ q.T).view(-1) for p, q in zip(ps, own, strict=True)])
        summed = _summed_at_once(link, own)
        for key, q, before in zip(chunk.keys, summed, qs, strict=True):
            self.q[key] = torch.where(q.isfinite().all(), q, before)  # an overflow must not be remembered
        chunk.values.copy_(torch.cat([(p @ q.T).view(-1) for p, q in zip(ps, summed, strict=True)]))
        return sent.to(chunk.values.dtype)

    def _start(self, key: int, matrix: Tensor) -> Tensor:
        """The Q of the step before; at first random numbers, the same on every worker."""
        columns = matrix.shape[1]
        rank = min(self.rank, *matrix.shape)
        known = self.q.get(key)
        if known is not None and known.shape == (columns, rank):
            device.read_here(known)
            return known.to(matrix.device)
        source = torch.Generator().manual_seed(_SEED + key)
        return torch.randn(columns, rank, generator=source).to(matrix.device)

    def state_dict(self) -> dict[str, Any]:
        """The Qs, for snapshots."""
        return {"q": {str(key): q for key, q in self.q.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.q = {int(key): q for key, q in state["q"].items()}


def _summed_at_once(link: Link, matrices: list[Tensor]) -> list[Tensor]:
    """The sums of `matrices` over the workers, in one message."""
    flat = link.all_reduce(torch.cat([matrix.reshape(-1) for matrix in matrices]))
    parts = flat.split([math.prod(matrix.shape) for matrix in matrices])
    return [part.view(matrix.shape) for part, matrix in zip(parts, matrices, strict=True)]
