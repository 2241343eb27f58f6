"""One worker as the first of several of which the others are not there: what they would say is what it says itself.

So a strategy for several workers computes all that it computes among them, and waits for no one. PyTorch's own group
for this does not exchange anything; sums of ours are made as if all had given the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from manyhosts.communication.collectives import Work
from manyhosts.communication.world import World


class Mirror(World):
    """`size` workers, of which this is the first; made by `mirrored`."""

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Sum what all of them would have."""
        tensor.mul_(self.size)
        return super().start_all_reduce(tensor)

    def all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, confirmed: bool = True
    ) -> Tensor:
        """The same, and wait for it; of another `op` than a sum it is what this worker has."""
        if op == dist.ReduceOp.SUM:
            tensor.mul_(self.size)
        return super().all_reduce(tensor, op, confirmed=confirmed)


@contextmanager
def mirrored(world: World, size: int) -> Iterator[World]:
    """Within, `world`, which has one worker, as one of `size`, each on a machine of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield Mirror(replace(world.place, rank=0, size=size), backend="gloo")
    finally:
        dist.destroy_process_group()
