"""Connections of the workers besides those that they train over: for a thread that sends while training continues."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from manyhosts.communication.world import World


class SideGroup:
    """The workers of `world`, on connections of their own. Made by all together, and gone with the group of all."""

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.rank, world.size
        self.device = torch.device("cpu")
        """Where tensors have to be."""
        self._group = world.new_group(backend="gloo")
        self._made_for = world.group
        self._sent_bytes = self._counted = 0

    def uncounted(self) -> int:
        """Bytes that were sent since the last call, which may come from another thread than what sends."""
        before, self._counted = self._counted, self._sent_bytes
        return self._counted - before

    def is_of(self, world: World) -> bool:
        """Whether the workers are still those that it was made for."""
        return self._made_for is world.group

    def send(self, tensor: Tensor, rank: int, tag: int = 0) -> None:
        """Send `tensor` to one worker, who must `receive` one of its shape and dtype with the same `tag`.

        Messages of several tags between the same two workers do not wait for each other.

        Raises:
            RuntimeError: the group is no more.
        """
        self._sent_bytes += tensor.numel() * tensor.element_size()
        dist.send(tensor, dst=rank, group=self._group, tag=tag)

    def receive(self, tensor: Tensor, rank: int, tag: int = 0) -> Tensor:
        """Fill `tensor` with what worker `rank` sends with this `tag`, and give it back.

        Raises:
            RuntimeError: the group is no more.
        """
        dist.recv(tensor, src=rank, group=self._group, tag=tag)
        return tensor
