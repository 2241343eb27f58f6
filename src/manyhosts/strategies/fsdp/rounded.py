"""Gradients that travel in bf16: half the bytes. Each worker's are rounded once, and what came is added in fp32.

PyTorch's own `reduce_dtype` would have them added in bf16, where each further worker costs a bit of the sum.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from manyhosts.communication import volume
from manyhosts.communication.collectives import Collectives


def rounded(gradient: Tensor) -> Tensor:
    """What is sent of `gradient`; what is not real has no bf16, and is sent as it is."""
    return gradient.to(torch.bfloat16) if gradient.is_floating_point() else gradient


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: not every Gloo knows bf16."""
    return tensor.view(-1).view(torch.uint8)


def add_rows(rows: Tensor, into: Tensor) -> None:
    """Put the sum of `rows`, shape (workers, …), into `into`, added in its dtype in the order of the ranks."""
    torch.sum(rows, 0, dtype=into.dtype, out=into)


def all_reduce(members: Collectives, gradient: Tensor) -> Tensor:
    """The sum of `gradient`, flat, over `members`, the same bits on each: rounded once more on its way back."""
    if not gradient.is_floating_point():
        return members.all_reduce(gradient)
    part = -(-gradient.numel() // members.size)
    padded = functional.pad(gradient, (0, part * members.size - gradient.numel()))
    sent = rounded(padded).view(members.size, part)
    received = torch.empty_like(sent)
    members.count_sent(volume.all_to_all_bytes(sent.nbytes, members.size))
    group = members.process_group
    members.wait(dist.all_to_all_single(as_bytes(received), as_bytes(sent), group=group, async_op=True))
    own = gradient.new_empty(part)
    add_rows(received, own)
    summed = members.stack(as_bytes(rounded(own)))
    return summed.view(torch.bfloat16).view(-1)[: gradient.numel()].to(gradient.dtype)
