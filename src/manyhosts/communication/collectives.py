"""What workers can exchange: all of a world, or those along some axes of a mesh, by the same calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from manyhosts import device
from manyhosts.communication import volume
from manyhosts.communication.groups import gather_rows


class Waitable(Protocol):
    """Something under way."""

    def wait(self) -> Any:
        """Return when it is there, in the order of the current stream on a GPU."""


Work = Waitable | None


class Collectives(ABC):
    """`size` workers, of which this is number `rank`. With one nothing is sent, and no group is needed."""

    device: torch.device
    timeout_s: float
    """How long they wait for each other."""
    world: Collectives
    """All workers, where these are some of them: what is sent and waited for counts there, and is over there."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This worker's number, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many workers there are."""

    @property
    @abstractmethod
    def process_group(self) -> dist.ProcessGroup | None:
        """That of these workers; None for the default one, and where there is but one worker."""

    @property
    def is_broken(self) -> bool:
        """Whether the present group was aborted, so that no exchange in it would come to an end."""
        return self.world.is_broken

    @property
    def group(self) -> object:
        """What is another object whenever the workers have changed."""
        return self.world.group

    @property
    def is_on_one_host(self) -> bool:
        """Whether all workers are known to be on one host."""
        return self.world.is_on_one_host

    def count_waited(self, seconds: float) -> None:
        """Count so many seconds as waited for others."""
        self.world.count_waited(seconds)

    def count_sent(self, payload: int) -> None:
        """Count so many bytes as put on the wire."""
        self.world.count_sent(payload)

    def confirm(self) -> None:
        """See that all exchanges that were asked for so far came to their end; see `World.confirm`."""
        self.world.confirm()

    def wait(self, work: Work, *, confirmed: bool = True) -> None:
        """Wait for what a call that begins with `start_` began. On a GPU it is the stream that waits, not this thread.

        `confirmed`: see that the exchange came to its end. What only goes into a later one, which is confirmed, need
        not be.
        """
        self.world.wait(work, confirmed=confirmed)

    def all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, confirmed: bool = True
    ) -> Tensor:
        """Replace `tensor` on every worker by the sum (or what `op` says) over all, and give it back.

        `confirmed`: see `wait`.
        """
        if self.size > 1:
            self.count_sent(volume.all_reduce_bytes(tensor.nbytes, self.size))
            work = dist.all_reduce(tensor, op=op, group=self.process_group, async_op=True)
            self.wait(work, confirmed=confirmed)
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Begin to sum `tensor` over all workers, in place; `wait()` on what comes back before it is read."""
        if self.size == 1:
            return None
        self.count_sent(volume.all_reduce_bytes(tensor.nbytes, self.size))
        work: Work = dist.all_reduce(tensor, group=self.process_group, async_op=True)
        return work

    def start_gather(self, rows: Tensor, own: Tensor) -> Work:
        """Begin to fill `rows` with what every worker has in `own`, by rank in the first dim."""
        self.count_sent(volume.all_gather_bytes(own.nbytes, self.size))
        return gather_rows(rows, own, self.process_group)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Replace `tensor` on every worker by that of `source`, and give it back."""
        if self.size > 1:
            self.count_sent(volume.broadcast_bytes(tensor.nbytes, self.size))
            dist.broadcast(tensor, group=self.process_group, group_src=source)
            self.confirm()
        return tensor

    def barrier(self) -> None:
        """Wait until every worker is here. The host waits, too, since what it does next is seldom work of a GPU."""
        if self.size > 1:
            self.all_reduce(torch.zeros(1, device=self.device))
            device.wait_for(self.device)

    def agree(self, value: float) -> float:
        """Rank 0's `value`, on every worker: for decisions that must fall alike, such as a limit on time."""
        return float(self.broadcast(torch.tensor([value], dtype=torch.float64, device=self.device)).item())

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on at least one worker."""
        return bool(self.all_reduce(torch.tensor([float(flag)], device=self.device), dist.ReduceOp.MAX).item())

    def stack(self, tensor: Tensor, *, confirmed: bool = True) -> Tensor:
        """The tensors of all workers, of one shape and dtype, stacked by rank in a new first dim.

        `confirmed`: see `wait`.
        """
        if self.size == 1:
            return tensor[None]
        stacked = tensor.new_empty((self.size, *tensor.shape))
        self.wait(self.start_gather(stacked, tensor.contiguous()), confirmed=confirmed)
        return stacked

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all workers by rank, on every worker. Shapes may differ in the first dim, the rest may not.

        A worker without data gives a tensor with 0 rows, of the same dtype.
        """
        if self.size == 1:
            return [tensor]
        rows = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        rows[self.rank] = tensor.shape[0]
        counts: Sequence[int] = self.all_reduce(rows).tolist()
        padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        return [part[:count] for part, count in zip(self.stack(padded), counts, strict=True)]
