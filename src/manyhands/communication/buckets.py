"""Gradients summed over the workers in buckets that leave while the backward pass still runs.

Parameters are packed into buckets in the order in which their gradients become ready, found in the first backward pass
and then fixed for all workers by the leader. A bucket whose last gradient has come is sent at once, in bucket order, so
that every worker sends the same things in the same order whatever its own backward pass did. A parameter that a worker
did not use counts as zero; one that nobody used keeps no gradient, as in one process: each bucket carries one number
per parameter that says how many workers used it.

Why not torch's DistributedDataParallel: its reducer belongs to one process group for ever, and its order, its number
format and its reduction cannot be chosen per bucket. Here the world may change between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyhands.communication.world import Work, World

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the network has something to do early in the backward pass."""


@dataclass(slots=True)
class Bucket:
    """Parameters whose gradients travel together, one behind the other in `buffer`, their use counts at its end."""

    parameters: list[nn.Parameter]
    buffer: Tensor
    """Shape (elements of all parameters + number of parameters,)."""
    views: list[Tensor]
    missing: int = 0
    work: Work = None

    @property
    def used(self) -> Tensor:
        """How many workers used each parameter; shape (number of parameters,)."""
        return self.buffer[-len(self.parameters) :]


class GradientBuckets:
    """Exchanges the gradients of `parameters` over the world.

    For each step: `begin()`, any number of backward passes, `arm()` before the last of them, `finish()`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], world: World, *, bucket_bytes: int) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.world = world
        self.bucket_bytes = bucket_bytes
        self.armed = False
        self.ready_order: list[int] | None = []
        """Parameters by number as their gradients came, while that is being found out; None afterwards."""
        self.number_of = {parameter: number for number, parameter in enumerate(self.parameters)}
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)
        self._pack(list(reversed(range(len(self.parameters)))))  # a guess: the last layer's gradient comes first

    def _pack(self, order: Sequence[int]) -> None:
        """Make the buckets, for parameters in `order`."""
        self.buckets: list[Bucket] = []
        self.place_of: dict[nn.Parameter, tuple[Bucket, int]] = {}
        group: list[nn.Parameter] = []
        size = 0
        for number in order:
            parameter = self.parameters[number]
            limit = self.bucket_bytes if self.buckets else min(FIRST_BUCKET_BYTES, self.bucket_bytes)
            if group and (size >= limit or (parameter.dtype, parameter.device) != (group[0].dtype, group[0].device)):
                self._add(group)
                group, size = [], 0
            group.append(parameter)
            size += parameter.numel() * parameter.element_size()
        if group:
            self._add(group)

    def _add(self, group: list[nn.Parameter]) -> None:
        buffer = torch.zeros(
            sum(parameter.numel() for parameter in group) + len(group), dtype=group[0].dtype, device=group[0].device
        )
        views, begin = [], 0
        for parameter in group:
            views.append(buffer[begin : begin + parameter.numel()].view_as(parameter))
            begin += parameter.numel()
        bucket = Bucket(group, buffer, views)
        for place, parameter in enumerate(group):
            self.place_of[parameter] = bucket, place
        self.buckets.append(bucket)

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        for parameter in self.parameters:
            parameter.grad = None

    def arm(self) -> None:
        """From now on a bucket is sent as soon as the backward pass has filled it."""
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
            bucket.work = None
        self.sent = 0
        self.armed = True

    def _ready(self, parameter: Tensor) -> None:
        """Called by autograd when the gradient of `parameter` is complete for one backward pass."""
        if not self.armed:
            return
        if self.ready_order is not None:
            self.ready_order.append(self.number_of[parameter])  # type: ignore[index]  # the hook gives the parameter
        bucket, _ = self.place_of[parameter]  # type: ignore[index]
        bucket.missing -= 1
        while self.sent < len(self.buckets) and self.buckets[self.sent].missing <= 0:
            self._send(self.buckets[self.sent])

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        gradients = [parameter.grad for parameter in bucket.parameters]
        used = [gradient is not None for gradient in gradients]
        if all(used):
            bucket.used.fill_(1)
        else:
            bucket.buffer.zero_()
            bucket.used.copy_(torch.tensor(used))
        if any(used):
            views = [view for view, there in zip(bucket.views, used, strict=True) if there]
            torch._foreach_copy_(views, [gradient for gradient in gradients if gradient is not None])
        bucket.work = self.world.start_all_reduce(bucket.buffer)
        self.sent += 1

    def finish(self) -> None:
        """Send what is left, wait for all buckets, and put the sums where the optimizer looks for gradients."""
        self.armed = False
        while self.sent < len(self.buckets):
            self._send(self.buckets[self.sent])
        for bucket in self.buckets:
            self.world.wait(bucket.work)
            unused = [parameter.grad is None for parameter in bucket.parameters]
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
            if any(unused):
                self._drop_unused(bucket)
        if self.ready_order is not None:
            self._learn_order()

    def _drop_unused(self, bucket: Bucket) -> None:
        for parameter, workers in zip(bucket.parameters, bucket.used.tolist(), strict=True):
            if workers == 0:
                parameter.grad = None

    def _learn_order(self) -> None:
        """Pack anew in the order that the leader saw; parameters it did not use go last."""
        seen = self.ready_order or []
        order = [*dict.fromkeys(seen), *(number for number in range(len(self.parameters)) if number not in set(seen))]
        agreed = self.world.broadcast(torch.tensor(order, dtype=torch.int64, device=self.world.device)).tolist()
        self.ready_order = None
        gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in self.parameters]
        self._pack(agreed)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
