"""Gradients of the parts of a batch, kept apart and added in the order of the tree, in buckets.

The gradients of a part are moved out of the parameters when its backward pass is over, so that the next part begins
with none. In the backward pass of a worker's last part a bucket leaves as soon as it is full, in bucket order, while
the pass still runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from manyhosts.communication.packing import packed
from manyhosts.communication.tree_sum import Exchange, TreeSum
from manyhosts.communication.world import World

_ALIGNED_BYTES = 64
"""Gradients begin where a tensor of its own would, so that no kernel takes another way for one."""


class TreeBucket:
    """Parameters whose gradients travel together, their use counts behind them: how many parts used each."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, *, stretch_bytes: int) -> None:
        self.parameters = parameters
        dtype = parameters[0].dtype
        step = _ALIGNED_BYTES // dtype.itemsize
        self.begins: list[int] = []
        length = 0
        for parameter in parameters:
            self.begins.append(length)
            length += -(-parameter.numel() // step) * step
        self.counts_at = length
        self.total = TreeSum(length + len(parameters), dtype=dtype, world=world, stretch_bytes=stretch_bytes)
        self.missing = 0
        self.used: list[bool] = []
        """Which parameters were used by a part of this worker."""

    def begin(self, held: Sequence[range]) -> None:
        """Forget the last step."""
        self.total.begin(held)
        self.missing = len(self.parameters)
        self.used = [False] * len(self.parameters)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Where the gradient of each parameter is in `buffer`."""
        return [
            buffer[begin : begin + parameter.numel()].view(parameter.shape)
            for begin, parameter in zip(self.begins, self.parameters, strict=True)
        ]

    def counts(self, buffer: Tensor) -> Tensor:
        """How many parts used each parameter; shape (number of parameters,)."""
        return buffer[self.counts_at : self.counts_at + len(self.parameters)]

    @torch.no_grad()
    def take(self, part: int) -> None:
        """Move the gradients of `part` out of the parameters. One that it did not use counts as zeros."""
        buffer, adding = self.total.open(part)
        gradients = [parameter.grad for parameter in self.parameters]
        pairs = list(zip(self.views(buffer), gradients, strict=True))
        absent = [view for view, gradient in pairs if gradient is None]
        views = [view for view, gradient in pairs if gradient is not None]
        there = [gradient for gradient in gradients if gradient is not None]
        self._count(buffer, gradients, adding=adding)
        if adding:
            for view in absent:
                view.add_(0.0)  # as zeros that come from another worker are added: -0 becomes +0
            if there:
                torch._foreach_add_(views, there)
        else:
            if absent:
                torch._foreach_zero_(absent)
            if there:
                torch._foreach_copy_(views, there)
        for parameter in self.parameters:
            parameter.grad = None
        self.total.close(part, buffer, added=adding)

    def _count(self, buffer: Tensor, gradients: Sequence[Tensor | None], *, adding: bool) -> None:
        here = [gradient is not None for gradient in gradients]
        self.used = [before or now for before, now in zip(self.used, here, strict=True)]
        counts = self.counts(buffer)
        if not adding:
            counts.zero_()
        counts += 1 if all(here) else torch.tensor(here, dtype=buffer.dtype).to(buffer.device, non_blocking=True)

    def put(self) -> None:
        """Put the sums where the optimizer looks for gradients; a parameter that no part used has none."""
        result = self.total.result
        # Only a worker that did not use them all has to look whether others did, which waits for a GPU.
        parts = self.used if all(self.used) else self.counts(result).tolist()
        for parameter, view, used in zip(self.parameters, self.views(result), parts, strict=True):
            parameter.grad = view if used else None


class TreeBuckets:
    """Sums the gradients of `parameters` over the parts.

    For each step: `begin()`; for each part its backward passes and `take(part)`, with `arm(part)` before the last
    backward pass of the last part; `finish()`.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], world: World, exchange: Exchange, *, bucket_bytes: int
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.world, self.exchange = world, exchange
        self.armed: int | None = None
        """The part whose gradients leave as they come."""
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)
        # The last layer's gradient mostly comes first. An order found by watching would have to be told to workers that
        # join later; this one every worker knows.
        backward = range(len(self.parameters) - 1, -1, -1)
        groups = packed(self.parameters, backward, bucket_bytes=bucket_bytes)
        self.buckets = [TreeBucket(group, world, stretch_bytes=exchange.pace.stretch_bytes) for group in groups]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self.sent = 0

    def begin(self, held: Sequence[range]) -> None:
        """Forget the gradients of the last step. `held` are the parts that each worker has, by rank."""
        for parameter in self.parameters:
            parameter.grad = None
        for bucket in self.buckets:
            bucket.begin(held)
        self.sent = 0
        self.armed = None

    def arm(self, part: int) -> None:
        """From now on a bucket is sent as soon as the backward pass of `part` has filled it."""
        self.armed = part

    def _ready(self, parameter: Tensor) -> None:
        """Called by autograd when the gradient of `parameter` is complete for one backward pass."""
        if self.armed is None:
            return
        self.bucket_of[parameter].missing -= 1  # type: ignore[index]  # the hook gives the parameter
        while self.sent < len(self.buckets) and self.buckets[self.sent].missing <= 0:
            self._send(self.armed)

    def _send(self, part: int) -> None:
        bucket = self.buckets[self.sent]
        bucket.take(part)
        self.exchange.send(bucket.total)
        self.sent += 1

    def take(self, part: int, *, last: bool) -> None:
        """The backward passes of `part` are over. After the worker's last part everything is sent."""
        self.armed = None
        if not last:
            for bucket in self.buckets:
                bucket.take(part)
            return
        while self.sent < len(self.buckets):
            self._send(part)

    def put(self) -> None:
        """Once the exchange has finished: put the sums where the optimizer looks for gradients."""
        for bucket in self.buckets:
            bucket.put()
