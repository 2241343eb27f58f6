"""Sums of encoded numbers: every worker owns a part, decodes what the others send of it, adds, and encodes the sum.

Narrow numbers are never added to each other: the owner adds in full precision, so a sum cannot overflow and is rounded
once, not once per worker. Costs what a ring costs: `2 (W-1)/W` of the encoded size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from manyhosts.communication.compression.exchange import Chunk
from manyhosts.communication.link import Link
from manyhosts.config.strategies import DDP

_TOP = 15
_EXPONENTS = 100
"""No scale beyond 2**±100: a row of numbers below 1e-30 is sent as it is."""
BLOCK = 256
_STEPS = 127


class ThroughOwners(ABC):
    """Exchanges chunks as rows of bytes."""

    block = 1
    """The length of a row is a multiple of this."""

    def __init__(self, _config: DDP | None = None) -> None:
        """What the table of compressions calls: nothing of the settings changes anything here."""
        super().__init__()

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Shape (rows, elements), floating point → (rows, bytes), uint8."""

    @abstractmethod
    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """Shape (rows, bytes), uint8 → (rows, elements) in the dtype of `like`."""

    def __call__(self, chunk: Chunk, link: Link) -> Tensor:
        """See `Compression`."""
        values = chunk.values
        count = values.numel()
        part = -(-count // (link.size * self.block)) * self.block
        own = functional.pad(values, (0, part * link.size - count)).view(link.size, part)
        mine = own[link.rank]  # what an owner keeps for itself needs no rounding
        wire = self.encode(own)
        sent = self.decode(wire, own)
        sent[link.rank] = mine
        received = self.decode(link.all_to_all(wire), own)
        received[link.rank] = mine
        total = received.sum(0)
        spread = link.all_gather(self.encode(total[None])[0])
        result = self.decode(spread, own)
        sent[link.rank] -= total - result[link.rank]  # what the second rounding dropped is the owner's to keep
        values.copy_(result.view(-1)[:count])
        return sent.view(-1)[:count]


class Bf16Codec(ThroughOwners):
    """Two bytes for each number: the range of fp32, 8 bits that matter."""

    def encode(self, rows: Tensor) -> Tensor:
        """See `ThroughOwners`."""
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """See `ThroughOwners`."""
        return wire.view(torch.bfloat16).to(like.dtype)


class Fp16Codec(ThroughOwners):
    """Two bytes for each number, two more for the scale of a row: its own range is too small. 11 bits matter.

    The scale is a power of two that brings a row's largest number to just below 2**15, so nothing overflows, whatever a
    loss scaler did, and numbers 2**-29 of the largest are still exact to all 11 bits. Scaling by a power of two rounds
    nothing. (Dividing by the number of workers before the cast, as is usual, guards the sum against overflow; here the
    owner adds in full precision, so there is no narrow sum to guard.)
    """

    def encode(self, rows: Tensor) -> Tensor:
        """See `ThroughOwners`."""
        largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1, keepdim=True)
        _, exponents = torch.frexp(torch.nan_to_num(largest, nan=1.0, posinf=1.0))
        shift = (_TOP - exponents).clamp(-_EXPONENTS, _EXPONENTS).to(torch.int16)
        scaled = (rows * torch.exp2(shift.to(rows.dtype))).to(torch.float16)
        return torch.cat([scaled.view(torch.uint8), shift.view(torch.uint8)], 1)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """See `ThroughOwners`."""
        numbers = wire[:, :-2].contiguous().view(torch.float16).to(like.dtype)
        shift = wire[:, -2:].contiguous().view(torch.int16)
        return numbers.mul_(torch.exp2(-shift.to(like.dtype)))


class Int8Codec(ThroughOwners):
    """One byte for each number, four more for the scale of each block: that of the largest of its 256 numbers.

    Source: Dettmers 2016, "8-Bit Approximations for Parallelism in Deep Learning", arXiv:1511.04561, with one scale per
    block; rounding to the nearest is unbiased over time because what it drops is kept for the next step.
    """

    block = BLOCK

    def encode(self, rows: Tensor) -> Tensor:
        """See `ThroughOwners`."""
        count = rows.shape[0]
        blocks = rows.reshape(count, -1, BLOCK)
        scales = torch.linalg.vector_norm(blocks, ord=float("inf"), dim=2, keepdim=True).div_(_STEPS).float()
        # A block of zeros has scale 0; a block with a number that is none has such a scale, and arrives as one.
        numbers = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        return torch.cat([numbers.view(torch.uint8).view(count, -1), scales.view(torch.uint8).view(count, -1)], 1)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """See `ThroughOwners`."""
        count, bytes_in_row = wire.shape
        blocks = bytes_in_row // (BLOCK + 4)
        numbers = wire[:, : blocks * BLOCK].view(torch.int8).reshape(count, blocks, BLOCK).to(like.dtype)
        scales = wire[:, blocks * BLOCK :].contiguous().view(torch.float32).view(count, blocks, 1)
        return numbers.mul_(scales).view(count, -1)
