"""What an exchange sends through: the collectives of one group of workers, every byte counted."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from manyhosts.communication import volume
from manyhosts.communication.groups import gather_rows


class Link:
    """`size` workers that exchange tensors, of which this is number `rank`. Each call returns when its result is there.

    On a GPU "there" means in the order of the current stream: nothing waits on the host.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.inside: Link | None = None
        """The link to those of this worker's node, where there are several nodes of several workers each."""
        self.across: Link | None = None
        """Then: the link to those in this worker's place on the other nodes."""
        self.bytes_sent = 0
        """By this worker through this link, all in all: see `communication.volume`."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by the sum over the workers, the same bits on each, and give it back."""
        if self.size > 1:
            self.bytes_sent += volume.all_reduce_bytes(tensor.nbytes, self.size)
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all workers, of one shape and dtype, stacked by rank in a new first dim."""
        if self.size == 1:
            return tensor[None]
        self.bytes_sent += volume.all_gather_bytes(tensor.nbytes, self.size)
        stacked = tensor.new_empty((self.size, *tensor.shape))
        gather_rows(stacked, tensor.contiguous(), self.group).wait()
        return stacked

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send row r of `parts` to worker r. Returns what came: row r from worker r. Shape (size, …) both."""
        if self.size == 1:
            return parts
        self.bytes_sent += volume.all_to_all_bytes(parts.nbytes, self.size)
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        return received

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Replace `tensor` on every worker by that of worker `source` of this link, and give it back."""
        if self.size > 1:
            self.bytes_sent += volume.broadcast_bytes(tensor.nbytes, self.size)
            dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor
