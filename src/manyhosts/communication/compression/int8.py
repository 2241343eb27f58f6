"""int8: a quarter of the bytes; every 256 numbers share one scale, that of the largest of them.

Source: Dettmers 2016, "8-Bit Approximations for Parallelism in Deep Learning", arXiv:1511.04561, with one scale per
block; rounding to the nearest is unbiased over time because what it drops is kept for the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyhosts.communication.compression.owners import ThroughOwners
from manyhosts.config.strategies import DDP

BLOCK = 256
_STEPS = 127


class Int8Codec:
    """One byte for each number, four more for the scale of each block."""

    block = BLOCK

    def encode(self, rows: Tensor) -> Tensor:
        """See `Codec`."""
        count = rows.shape[0]
        blocks = rows.reshape(count, -1, BLOCK)
        scales = torch.linalg.vector_norm(blocks, ord=float("inf"), dim=2, keepdim=True).div_(_STEPS).float()
        # A block of zeros has scale 0; a block with a number that is none has such a scale, and arrives as one.
        numbers = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        return torch.cat([numbers.view(torch.uint8).view(count, -1), scales.view(torch.uint8).view(count, -1)], 1)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """See `Codec`."""
        count, bytes_in_row = wire.shape
        blocks = bytes_in_row // (BLOCK + 4)
        numbers = wire[:, : blocks * BLOCK].view(torch.int8).reshape(count, blocks, BLOCK).to(like.dtype)
        scales = wire[:, blocks * BLOCK :].contiguous().view(torch.float32).view(count, blocks, 1)
        return numbers.mul_(scales).view(count, -1)


def make(_config: DDP) -> ThroughOwners:
    """What the table of compressions calls."""
    return ThroughOwners(Int8Codec())
