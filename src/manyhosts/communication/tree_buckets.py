"""Gradients of the parts of a batch, kept separate and added in the order of the tree, in buckets.

The gradients of a part are moved out of the parameters when its backward pass is over, so that the next part begins
with none. In the backward pass of a worker's last part a bucket leaves as soon as it is full, in bucket order, while
the pass still runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from manyhosts.communication.gradient_hooks import Buckets, came_late, move
from manyhosts.communication.layout import gradient_view, real_dtype, real_numbers
from manyhosts.communication.packing import packed
from manyhosts.communication.tree_sum import Exchange, TreeSum
from manyhosts.communication.world import World

_ALIGNED_BYTES = 64
"""Gradients begin where a tensor of its own would, so that no kernel takes another way for one."""


class TreeBucket:
    """Parameters whose gradients travel together, their use counts after them: how many parts used each."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, *, segment_bytes: int) -> None:
        self.parameters = parameters
        dtype = real_dtype(parameters[0])
        step = _ALIGNED_BYTES // dtype.itemsize
        *self.begins, self.counts_at = accumulate(
            (-(-real_numbers(parameter) // step) * step for parameter in parameters), initial=0
        )
        self.total = TreeSum(self.counts_at + len(parameters), dtype=dtype, world=world, segment_bytes=segment_bytes)
        self.missing = 0
        self.used: list[bool] = []
        """Which parameters were used by a part of this worker."""

    def begin(self, assignment: Sequence[range]) -> None:
        """Forget the last step."""
        self.total.begin(assignment)
        self.missing = len(self.parameters)
        self.used = [False] * len(self.parameters)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Where the gradient of each parameter is in `buffer`."""
        return [
            gradient_view(buffer[begin : begin + real_numbers(parameter)], parameter)
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
        here = [gradient is not None for gradient in gradients]
        self.used = [before or now for before, now in zip(self.used, here, strict=True)]
        counts = self.counts(buffer)
        if not adding:
            counts.zero_()
        counts += 1 if all(here) else torch.tensor(here, dtype=buffer.dtype).to(buffer.device, non_blocking=True)
        if adding:
            for view in absent:
                view.add_(0.0)  # as zeros that come from another worker are added: -0 becomes +0
            if there:
                torch._foreach_add_(views, there)
        else:
            if absent:
                torch._foreach_zero_(absent)
            if there:
                move(views, there)
        for parameter in self.parameters:
            parameter.grad = None
        self.total.close(part, buffer, added=adding)

    def put(self) -> None:
        """Put the sums where the optimizer looks for gradients; a parameter that no part used has none."""
        result = self.total.result
        # Only a worker that did not use them all has to look whether others did, which waits for a GPU.
        parts = self.used if all(self.used) else self.counts(result).tolist()
        for parameter, view, used in zip(self.parameters, self.views(result), parts, strict=True):
            parameter.grad = view if used else None


class TreeBuckets(Buckets):
    """Sums the gradients of `parameters` over the parts.

    For each step: `begin()`; for each part its backward passes and `take(part)`, with `arm(part)` before the last
    backward pass of the last part; `finish()`.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], world: World, exchange: Exchange, *, bucket_bytes: int
    ) -> None:
        super().__init__(parameters)
        self.world, self.exchange = world, exchange
        self.armed: int | None = None
        """The part whose gradients leave as they come."""
        self.seen: list[int] | None = []
        """Parameters by number as their gradients came, in the first pass whose gradients may leave as they come."""
        self.in_parts: set[int] = set()
        """Those of them whose gradient came several times, each time with more in it: see `ReadyOrder`. Every worker
        finds them by itself: the order in which buckets are sent does not depend on it."""
        self.on_handover: Callable[[Sequence[Tensor | None]], None] = unseen
        """Called with the gradients of a bucket when they are handed over, bucket by bucket."""
        # The last layer's gradient mostly comes first. An order found by watching would have to be sent to workers that
        # join later; this one every worker knows.
        backward = range(len(self.parameters) - 1, -1, -1)
        groups = packed(self.parameters, backward, bucket_bytes=bucket_bytes)
        self.buckets = [TreeBucket(group, world, segment_bytes=exchange.pace.segment_bytes) for group in groups]
        place_of = {each: place for place, bucket in enumerate(self.buckets) for each in bucket.parameters}
        self.place_of = [place_of[parameter] for parameter in self.parameters]
        """The number of each parameter's bucket."""
        self.sent = 0

    def begin(self, assignment: Sequence[range]) -> None:
        """Forget the gradients of the last step. `assignment`: the parts of each worker, by rank."""
        for parameter in self.parameters:
            parameter.grad = None
        for bucket in self.buckets:
            bucket.begin(assignment)
        self.sent, self.armed = 0, None

    def arm(self, part: int) -> None:
        """From now on a bucket is sent as soon as the backward pass of `part` has filled it."""
        self.armed = part
        if self.seen is not None:
            self.seen = []

    def rest(self) -> None:
        """See `Buckets`."""
        self.armed = None

    def ready(self, number: int, parameter: Tensor) -> None:
        """See `Buckets`."""
        if self.armed is None:
            return
        place = self.place_of[number]
        if place < self.sent:
            raise came_late(parameter)
        if self.seen is not None:
            self.seen.append(number)
            return
        if number in self.in_parts:
            return
        self.buckets[place].missing -= 1
        while self.sent < len(self.buckets) and self.buckets[self.sent].missing <= 0:
            self._send(self.armed)

    def _send(self, part: int) -> None:
        bucket = self.buckets[self.sent]
        self._take(bucket, part)
        self.exchange.send(bucket.total)
        self.sent += 1

    def take(self, part: int, *, last: bool) -> None:
        """The backward passes of `part` are over. After the worker's last part everything is sent."""
        if self.armed is not None and self.seen:
            counts = Counter(self.seen)
            self.in_parts, self.seen = {number for number in counts if counts[number] > 1}, None
        self.armed = None
        if not last:
            for bucket in self.buckets:
                self._take(bucket, part)
            return
        while self.sent < len(self.buckets):
            self._send(part)

    def _take(self, bucket: TreeBucket, part: int) -> None:
        self.on_handover([parameter.grad for parameter in bucket.parameters])
        bucket.take(part)

    def drop(self) -> None:
        """Show the gradients that are there to `on_handover`, as if they were handed over, and forget them."""
        for bucket in self.buckets:
            self.on_handover([parameter.grad for parameter in bucket.parameters])
            for parameter in bucket.parameters:
                parameter.grad = None

    def send(self) -> None:
        """Send everything, where `take` was given no last part."""
        for bucket in self.buckets:
            self.exchange.send(bucket.total)

    def put(self) -> None:
        """Once the exchange has finished: put the sums where the optimizer looks for gradients."""
        for bucket in self.buckets:
            bucket.put()


def unseen(gradients: Sequence[Tensor | None]) -> None:
    """Nothing looks at what is handed over."""
