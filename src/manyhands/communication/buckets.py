"""Gradients summed over the workers in buckets that leave while the backward pass still runs.

Parameters are packed into buckets in the order in which their gradients become ready, found in the first backward pass
and then fixed for all workers by the leader. A bucket whose last gradient has come is sent at once, in bucket order, so
that every worker sends the same things in the same order whatever its own backward pass did. A parameter that a worker
did not use counts as zero; one that nobody used keeps no gradient, as in one process: each bucket carries one number
per parameter that says how many workers used it.

With a compression, what is large in a bucket is sent through it, and the rest of the bucket as it is.

Why not torch's DistributedDataParallel: its reducer belongs to one process group for ever, and its order, its number
format and its reduction cannot be chosen per bucket. Here the world may change between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyhands.communication.compression.feedback import Compressor
from manyhands.communication.packing import Members, ReadyOrder, packed
from manyhands.communication.world import Work


@dataclass(slots=True)
class Bucket:
    """Parameters whose gradients travel together, one behind the other in `buffer`, their use counts at its end.

    Where there is a compression, the parameters that go through it stand first.
    """

    number: int

    parameters: list[nn.Parameter]
    buffer: Tensor
    """Shape (elements of all parameters + number of parameters,)."""
    views: list[Tensor]
    compressible: int
    """Elements of the parameters that go through a compression."""
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

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        world: Members,
        *,
        bucket_bytes: int,
        compressor: Compressor | None = None,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.world = world
        self.bucket_bytes = bucket_bytes
        self.compressor = compressor
        self.compressing = False
        """Whether this step's gradients go through the compressor."""
        self.armed = False
        self.order = ReadyOrder(self.parameters, world)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)
        self._pack(self.order.guess)

    def _pack(self, order: Sequence[int]) -> None:
        """Make the buckets, for parameters in `order`."""
        self.packed_order = order
        self.buckets: list[Bucket] = []
        self.place_of: dict[nn.Parameter, tuple[Bucket, int]] = {}
        for group in packed(self.parameters, order, bucket_bytes=self.bucket_bytes):
            self._add(group)
        if self.compressor is not None:
            self.compressor.lay_out(
                [
                    (bucket.buffer[: bucket.compressible], [p for p in bucket.parameters if self._compressed(p)])
                    for bucket in self.buckets
                ]
            )

    def _compressed(self, parameter: nn.Parameter) -> bool:
        return self.compressor is not None and self.compressor.takes(parameter)

    def _add(self, group: list[nn.Parameter]) -> None:
        group = sorted(group, key=lambda parameter: not self._compressed(parameter))
        buffer = torch.zeros(
            sum(parameter.numel() for parameter in group) + len(group), dtype=group[0].dtype, device=group[0].device
        )
        views, begin = [], 0
        for parameter in group:
            views.append(buffer[begin : begin + parameter.numel()].view_as(parameter))
            begin += parameter.numel()
        compressible = sum(parameter.numel() for parameter in group if self._compressed(parameter))
        bucket = Bucket(len(self.buckets), group, buffer, views, compressible)
        for place, parameter in enumerate(group):
            self.place_of[parameter] = bucket, place
        self.buckets.append(bucket)

    def use(self, compressor: Compressor) -> None:
        """From the next step on, send through `compressor`. Called by all workers, between two steps."""
        self.compressor = compressor
        self._pack(self.packed_order)

    def meet(self, source: int) -> None:
        """The workers have changed: pack as worker `source` does."""
        self._pack(self.order.meet(source))

    def begin(self, *, compressing: bool = True, scale: Tensor | None = None) -> None:
        """Forget the gradients of the last step.

        `scale`, shape (), is what the loss of this step is multiplied by; None for 1.
        """
        self.armed = False
        for parameter in self.parameters:
            parameter.grad = None
        self.compressing = compressing and self.compressor is not None
        if self.compressing and self.compressor is not None:
            self.compressor.begin(scale)

    def arm(self) -> None:
        """From now on a bucket is sent as soon as the backward pass has filled it."""
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
            bucket.work = None
        self.sent = 0
        self.first_left = 0.0
        """When the first bucket was sent, by the host's clock."""
        self.armed = True

    def _ready(self, parameter: Tensor) -> None:
        """Called by autograd when the gradient of `parameter` is complete for one backward pass."""
        if not self.armed:
            return
        self.order.note(parameter)
        bucket, _ = self.place_of[parameter]  # type: ignore[index]
        bucket.missing -= 1
        while self.sent < len(self.buckets) and self.buckets[self.sent].missing <= 0:
            self._send(self.buckets[self.sent])

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        if self.sent == 0:
            self.first_left = time.perf_counter()
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
        if self.compressing and self.compressor is not None and bucket.compressible:
            self.compressor.start(bucket.number)
            bucket.work = self.world.start_all_reduce(bucket.buffer[bucket.compressible :])
        else:
            bucket.work = self.world.start_all_reduce(bucket.buffer)
        self.sent += 1

    def finish(self) -> None:
        """Send what is left, wait for all buckets, and put the sums where the optimizer looks for gradients."""
        self.armed = False
        while self.sent < len(self.buckets):
            self._send(self.buckets[self.sent])
        for bucket in self.buckets:
            self.world.wait(bucket.work)
            if self.compressing and self.compressor is not None:
                self.compressor.finish(bucket.number)
            unused = [parameter.grad is None for parameter in bucket.parameters]
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
            if any(unused):
                self._drop_unused(bucket)
        if self.compressing and self.compressor is not None:
            self.compressor.settle()
        if (order := self.order.agree()) is not None:
            self._pack_anew(order)

    def _drop_unused(self, bucket: Bucket) -> None:
        for parameter, view, workers in zip(bucket.parameters, bucket.views, bucket.used.tolist(), strict=True):
            # What a compression kept of earlier steps may arrive in a step that does not use the parameter.
            if workers == 0 and not (self.compressing and bool(view.any())):
                parameter.grad = None

    def _pack_anew(self, order: Sequence[int]) -> None:
        gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in self.parameters]
        self._pack(order)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
