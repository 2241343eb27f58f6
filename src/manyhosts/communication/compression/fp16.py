"""fp16: half the bytes, 11 bits that matter, and a scale for each row, because fp16's own range is too small.

The scale is a power of two that brings a row's largest number to just below 2**15, so nothing overflows, whatever a
loss scaler did, and numbers 2**-29 of the largest are still exact to all 11 bits. Scaling by a power of two rounds
nothing. (Dividing by the number of workers before the cast, as is usual, guards the sum against overflow; here the
owner adds in full precision, so there is no narrow sum to guard.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyhosts.communication.compression.owners import ThroughOwners
from manyhosts.config.strategies import DDP

_TOP = 15
_EXPONENTS = 100
"""No scale beyond 2**±100: a row of numbers below 1e-30 is sent as it is."""


class Fp16Codec:
    """Two bytes for each number, two more for the scale of a row."""

    block = 1

    def encode(self, rows: Tensor) -> Tensor:
        """See `Codec`."""
        largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1, keepdim=True)
        _, exponents = torch.frexp(torch.nan_to_num(largest, nan=1.0, posinf=1.0))
        shift = (_TOP - exponents).clamp(-_EXPONENTS, _EXPONENTS).to(torch.int16)
        scaled = (rows * torch.exp2(shift.to(rows.dtype))).to(torch.float16)
        return torch.cat([scaled.view(torch.uint8), shift.view(torch.uint8)], 1)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """See `Codec`."""
        numbers = wire[:, :-2].contiguous().view(torch.float16).to(like.dtype)
        shift = wire[:, -2:].contiguous().view(torch.int16)
        return numbers.mul_(torch.exp2(-shift.to(like.dtype)))


def make(_config: DDP) -> ThroughOwners:
    """What the table of compressions calls."""
    return ThroughOwners(Fp16Codec())
