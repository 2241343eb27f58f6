"""What FSDP2 sends, through our world: counted, waited for as all else is, and ended when the workers are gone.

PyTorch asks these two objects in place of its own calls. On Gloo a sum of parts is made by an exchange of rows, which
each owner adds up in the order of the ranks: Gloo's own sums all on every worker, twice the bytes. So are sums in
bf16 made on every device.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.nn import functional

from manyhosts.communication import volume
from manyhosts.communication.collectives import Collectives, Work
from manyhosts.communication.groups import gather_rows
from manyhosts.communication.world import World
from manyhosts.device import is_asynchronous
from manyhosts.errors import ConfigError

_AT_ONCE, _LEAST_BYTES = 4, 256 << 10
"""Segments of one exchange between hosts that are under way together, and the shortest that is worth a message. Of one
alone Gloo leaves a third of a cable empty: see benchmarks/strategies.md."""
_BITS = 24
"""Of a digest that workers compare: its square is summed over them in float64, and no bit may be lost."""


class StepDigest:
    """What this worker has gathered, computed and summed in a step, unit by unit: all must do alike.

    A worker that leaves out a unit would take another unit's parts for it, and at the end wait for what no one sends.
    So between CPUs a few bytes go before each exchange, and no one waits for an exchange before they are compared.
    """

    def __init__(self, members: Collectives) -> None:
        """`members`: the workers that share one copy of the model."""
        self.members = members
        self.digest = 0
        self._reported: deque[tuple[Tensor, Work]] = deque()
        """What is yet to be compared, in the order in which it was announced."""

    def begin(self) -> None:
        """A step begins."""
        self.digest = 0
        self._reported.clear()  # of one that broke off

    def note(self, *numbers: int) -> None:
        """Something was done that all workers do."""
        self.digest = zlib.crc32(repr(numbers).encode(), self.digest)

    def reported(self) -> list[float]:
        """What workers sum to see whether all have done the same."""
        short = self.digest >> 32 - _BITS
        return [float(short), float(short * short)]

    def announce(self, *numbers: int) -> None:
        """Note what is about to be exchanged; `compare` comes before that exchange is waited for."""
        self.note(*numbers)
        if not is_asynchronous(self.members.device):  # the host waits for no exchange of a GPU: the step's end shows it
            reported = torch.tensor(self.reported(), dtype=torch.float64)
            self._reported.append((reported, self.members.start_all_reduce(reported)))

    def compare(self) -> None:
        """See that all workers have announced the same, also what no one has waited for."""
        while self._reported:
            reported, work = self._reported.popleft()
            self.members.wait(work, confirmed=False)
            check_alike(reported.tolist(), self.members.size)


def check_alike(sums: Sequence[float], workers: int) -> None:
    """See that all have used the same units and parameters, by the sums of what each has `told`.

    Raises:
        ConfigError: they have not; on every worker.
    """
    total, squares = (int(each) for each in sums)
    if workers * squares != total * total:
        raise ConfigError(
            "not all workers have used the same parts of the model in this step, so parts of different parameters were "
            "put together",
            where="strategy='fsdp'",
            fix="compute the same layers for every sample (no layer that is left out by chance or by its input), or "
            "choose strategy='ddp'",
        )


def segments(length: int, itemsize: int, *, is_far: bool) -> list[slice]:
    """How a row of `length` numbers travels, on every worker alike. `is_far`: to other hosts."""
    count = max(1, min(_AT_ONCE, length * itemsize // _LEAST_BYTES)) if is_far else 1
    ends = [length * number // count for number in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]


class _UnderWay(dist.Work):
    """An exchange between CPUs that PyTorch waits for when it needs what comes of it."""

    def __init__(self, works: Sequence[Any], world: World, step_digest: StepDigest) -> None:
        """`works`: of its segments."""
        super().__init__()
        self.works, self.world, self.step_digest, self.begin = works, world, step_digest, time.perf_counter()

    def wait(self, timeout: Any = None) -> bool:
        """Return when it is over."""
        self.step_digest.compare()
        for work in self.works:
            self.world.wait(work, confirmed=False)
        self.world.exchange_s += time.perf_counter() - self.begin
        return True


class Gathering(DefaultAllocMixin, AllGather):
    """Gathers the parameters of one unit."""

    def __init__(self, world: World, step_digest: StepDigest, unit: int, *, is_far: bool) -> None:
        """`is_far`: from other hosts."""
        self.world, self.step_digest, self.unit, self.is_far = world, step_digest, unit, is_far

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Begin to fill `output_tensor` with what each worker of `group` has in `input_tensor`."""
        self.step_digest.announce(0, self.unit, input_tensor.numel())
        self.world.count_sent(volume.all_gather_bytes(input_tensor.nbytes, group.size()))
        rows = output_tensor.view(group.size(), -1)
        cut = segments(input_tensor.numel(), input_tensor.itemsize, is_far=self.is_far)
        works = [gather_rows(rows[:, part], input_tensor[part], group) for part in cut]
        return _started(works, self.world, self.step_digest)


class Summing(DefaultAllocMixin, ReduceScatter):
    """Sums the gradients of one unit; each worker gets its part of the sum."""

    def __init__(self, world: World, step_digest: StepDigest, unit: int, *, in_bf16: bool, is_far: bool) -> None:
        """`in_bf16`: gradients are rounded to travel. `is_far`: to other hosts."""
        self.world, self.step_digest, self.unit = world, step_digest, unit
        self.in_bf16, self.is_far = in_bf16, is_far

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Put into `output_tensor` this worker's part of the sum over `group`; it is read at once."""
        size = group.size()
        self.step_digest.announce(1, self.unit, input_tensor.numel())
        sent = rounded(input_tensor) if self.in_bf16 else input_tensor
        self.world.count_sent(volume.all_to_all_bytes(sent.nbytes, size))
        if self.world.backend == "gloo" or self.in_bf16:
            rows, own = sent.view(size, -1), output_tensor.view(-1)
            cut = segments(own.numel(), sent.itemsize, is_far=self.is_far)
            given = [rows[:, part].contiguous() for part in cut]
            came = [torch.empty_like(each) for each in given]
            works = [
                dist.all_to_all_single(as_bytes(into), as_bytes(each), group=group, async_op=True)
                for into, each in zip(came, given, strict=True)
            ]
            _wait(works, self.world, self.step_digest)
            for part, each in zip(cut, came, strict=True):
                torch.sum(each, 0, dtype=own.dtype, out=own[part])  # in the order of the ranks
            return None
        # PyTorch 2.13 has given the function another name.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        _wait([scatter(output_tensor, input_tensor, op=op, group=group, async_op=True)], self.world, self.step_digest)
        return None


def _started(works: Sequence[Any], world: World, step_digest: StepDigest) -> dist.Work | None:
    """What PyTorch is to wait for; nothing on a GPU, where its stream for exchanges waits, during the computation."""
    if is_asynchronous(world.device):
        for work in works:
            work.wait()
        return None
    return _UnderWay(works, world, step_digest)


def _wait(works: Sequence[Any], world: World, step_digest: StepDigest) -> None:
    """Wait for an exchange; on a GPU it is the current stream that waits."""
    if (under_way := _started(works, world, step_digest)) is not None:
        under_way.wait()


# Gradients that travel in bf16: each worker's are rounded once, and what came is added in fp32. PyTorch's own
# `reduce_dtype` would have them added in bf16, where each further worker costs a bit of the sum.


def rounded(gradient: Tensor) -> Tensor:
    """What is sent of `gradient`; what is not real has no bf16, and is sent as it is."""
    return gradient.to(torch.bfloat16) if gradient.is_floating_point() else gradient


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: not every Gloo knows bf16."""
    return tensor.view(-1).view(torch.uint8)


def rounded_sum(members: Collectives, gradient: Tensor) -> Tensor:
    """The sum of `gradient`, flat, over `members`, the same bits on each: rounded again on its way back."""
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
    torch.sum(received, 0, dtype=own.dtype, out=own)
    summed = members.stack(as_bytes(rounded(own)))
    return summed.view(torch.bfloat16).view(-1)[: gradient.numel()].to(gradient.dtype)
