"""A few numbers that travel in a bucket of gradients, exact to the last bit whatever the bucket's dtype.

The bucket is summed element by element, in a dtype that may round. So each worker has a place of its own for each
number, in which all others have zeros, and lays its float64 into it as eight bytes: whole numbers from 0 to 255, which
every floating dtype holds. What arrives is what each worker laid there, and is added in float64, in the order of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BYTES = 8
"""Of a float64."""


def elements_for(numbers: int, workers: int) -> int:
    """Elements of a bucket that `numbers` numbers of each worker take."""
    return numbers * workers * _BYTES


def pack(packed: Tensor, numbers: Tensor, rank: int) -> None:
    """Lay this worker's `numbers`, float64 of shape (n,), into `packed`, of `elements_for(n, workers)` elements."""
    packed.zero_()
    place = numbers.numel() * _BYTES
    packed[rank * place : (rank + 1) * place].copy_(numbers.view(torch.uint8))


def unpack(packed: Tensor, workers: int) -> Tensor:
    """The sums of the numbers over the workers, float64 of shape (n,), once `packed` have been summed."""
    return packed.to(torch.uint8).view(torch.float64).view(workers, -1).sum(0)
