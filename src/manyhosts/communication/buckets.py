"""Gradients summed over the workers in buckets that leave while the backward pass still runs.

Parameters are packed into buckets in the order in which their gradients become ready, found in the first backward pass
and then fixed for all workers by rank 0. A bucket whose last gradient has come is sent at once, in bucket order, so
that every worker sends the same things in the same order whatever its own backward pass did. A parameter that a worker
did not use counts as zero; one that no one used keeps no gradient, as in one process: each bucket carries one number
per parameter that says how many workers used it.

With a compression, what is large in a bucket is sent through it, and the rest of the bucket as it is.

A few numbers may be packed in, the loss for one: they travel in the first bucket, so that they cost no exchange of
their own.

Why not torch's DistributedDataParallel: its reducer belongs to one process group for ever, and its order, its number
format and its reduction cannot be chosen per bucket. Here the world may change between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyhosts.communication.collectives import Collectives, Work
from manyhosts.communication.compression.feedback import Compressor
from manyhosts.communication.gradient_hooks import Buckets, came_late, check_dense, move
from manyhosts.communication.layout import gradient_view, real_dtype, real_numbers
from manyhosts.communication.packing import ReadyOrder, packed


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Parameters whose gradients travel together, one after the other in `buffer`.

    Where there is a compression, the parameters that go through it come first.
    """

    number: int
    places: list[tuple[nn.Parameter, Tensor]]
    """Each parameter, and where its gradient goes: a view of `buffer`, in its shape and strides."""
    buffer: Tensor
    """Shape (elements of all parameters + number of parameters + elements of packed metadata,)."""
    compressible: int
    """Elements of the parameters that go through a compression."""
    used: Tensor
    """How many workers used each parameter: a view of `buffer`, shape (number of parameters,)."""
    packed: Tensor
    """Where packed metadata sit: a view of `buffer`, of no elements in all buckets but the first."""
    missing: int = 0
    """Gradients that the backward pass has not filled yet."""
    all_here: bool = False
    """Whether this worker used all the parameters."""
    work: Work = None

    def move_in(self) -> None:
        """Have the gradients in the buffer, those that are not there yet. A parameter that was not used has zeros."""
        absent, views, gradients, used = [], [], [], []
        for parameter, view in self.places:
            gradient = parameter.grad
            used.append(gradient is not None)
            if gradient is None:
                absent.append(view)
            elif gradient is not view:
                views.append(view)
                gradients.append(gradient)
                parameter.grad = view
        if views:
            move(views, gradients)
        self.all_here = not absent
        if self.all_here:
            self.used.fill_(1)
        else:
            torch._foreach_zero_(absent)
            self.used.copy_(torch.tensor(used), non_blocking=True)


class GradientBuckets(Buckets):
    """Exchanges the gradients of `parameters` over the world.

    For each step: `begin()`, any number of backward passes, `arm()` before the last of them, `finish()`. From the last
    backward pass on the gradients are views of the buckets, so that nothing is copied back when the sums are there.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        world: Collectives,
        *,
        bucket_bytes: int,
        compressor: Compressor | None = None,
    ) -> None:
        super().__init__(parameters)
        self.world = world
        self.bucket_bytes = bucket_bytes
        self.compressor = compressor
        self.compressing = False
        """Whether this step's gradients go through the compressor."""
        self.armed = False
        self.filling = False
        """Whether a step is under way, whose gradients move in before the last backward pass, too."""
        self.packed_metadata: Tensor | None = None
        """What travels with the gradients of this step."""
        self.packed_numbers = 0
        """For how many of them the buckets are made."""
        self.moves_at_once = world.device.type == "cpu"
        """Whether a gradient moves into its bucket as it comes: it is in the cache yet, and the next one can have its
        memory. On a GPU all of a bucket move in one kernel."""
        self.order = ReadyOrder(self.parameters, world)
        self._pack(self.order.guess)

    def _pack(self, order: Sequence[int]) -> None:
        """Make the buckets, for parameters in `order`."""
        self.packed_order = order
        self.place_of: list[tuple[Bucket, Tensor]] = []  # the buckets before these are gone before there are new ones
        self.buckets: list[Bucket] = []
        for group in packed(self.parameters, order, bucket_bytes=self.bucket_bytes):
            self.buckets.append(self._made(group))
        place_of = {parameter: (bucket, view) for bucket in self.buckets for parameter, view in bucket.places}
        self.place_of = [place_of[parameter] for parameter in self.parameters]
        if self.compressor is not None:
            self.compressor.lay_out(
                [
                    (bucket.buffer[: bucket.compressible], [p for p, _ in bucket.places if self._compressed(p)])
                    for bucket in self.buckets
                ]
            )

    def _compressed(self, parameter: nn.Parameter) -> bool:
        return self.compressor is not None and self.compressor.takes(parameter)

    def _made(self, group: list[nn.Parameter]) -> Bucket:
        """The next bucket, of the parameters in `group`."""
        group = sorted(group, key=lambda parameter: not self._compressed(parameter))
        sizes = [real_numbers(parameter) for parameter in group]
        elements = sum(sizes)
        packed = 0 if self.buckets else elements_for(self.packed_numbers, self.world.size)
        buffer = torch.zeros(elements + len(group) + packed, dtype=real_dtype(group[0]), device=group[0].device)
        parts = buffer[:elements].split(sizes)
        return Bucket(
            number=len(self.buckets),
            places=[(each, gradient_view(part, each)) for each, part in zip(group, parts, strict=True)],
            buffer=buffer,
            compressible=sum(parameter.numel() for parameter in group if self._compressed(parameter)),
            used=buffer[elements : elements + len(group)],
            packed=buffer[elements + len(group) :],
        )

    def use(self, compressor: Compressor | None) -> None:
        """From the next step on, send through `compressor`, or as they are. By all workers, between two steps."""
        self.compressor = compressor
        self._pack(self.packed_order)

    def resync(self, source: int, world: Collectives | None = None) -> None:
        """The workers have changed, or are those of `world` from now on: pack as worker `source` of them does."""
        if world is not None:
            self.world = self.order.world = world
        self._pack(self.order.resync(source))

    def pack_as(self, present: Sequence[int], in_parts: Sequence[int]) -> None:
        """Pack in an order that was found before, in a pass in which other parameters may have been trained.

        What is compressed together decides how it is rounded.
        """
        self.order.seen, self.order.present, self.order.in_parts = None, list(present), set(in_parts)
        self._pack(self.order.present)

    def rest(self) -> None:
        """See `Buckets`."""
        self.armed = self.filling = False

    def begin(self, *, compressing: bool = True, scale: Tensor | None = None) -> None:
        """Forget the gradients of the last step.

        `scale`, shape (), is what the loss of this step is multiplied by; None for 1.
        """
        self.armed, self.filling = False, True
        for parameter in self.parameters:
            parameter.grad = None
        self.compressing = compressing and self.compressor is not None
        if self.compressing and self.compressor is not None:
            self.compressor.begin(scale)

    def arm(self, packed_metadata: Tensor | None = None) -> None:
        """From now on a bucket is sent as soon as the backward pass has filled it.

        `packed_metadata`: float64, shape (n,), the same n on all workers. `finish` gives back their sums over them.
        """
        self.order.forget()
        self.packed_metadata = packed_metadata if self.buckets else None
        if self.packed_metadata is not None:
            if self.buckets[0].packed.numel() != elements_for(len(self.packed_metadata), self.world.size):
                self.packed_numbers = len(self.packed_metadata)
                self._pack(self.packed_order)
            pack(self.buckets[0].packed, self.packed_metadata, self.world.rank)
        for bucket in self.buckets:
            bucket.missing, bucket.work = len(bucket.places), None
        self.sent, self.first_left = 0, 0.0
        """When the first bucket was sent, by the host's clock."""
        self.armed = True

    def ready(self, number: int, parameter: Tensor) -> None:
        """See `Buckets`."""
        if not self.filling:
            return
        bucket, view = self.place_of[number]
        if self.armed:
            self.order.note(number)
            if bucket.number < self.sent:
                raise came_late(parameter)
        if self.moves_at_once and parameter.grad is not None and parameter.grad is not view:
            try:
                view.copy_(parameter.grad)
            except RuntimeError:
                check_dense(parameter.grad)
                raise
            parameter.grad = view  # the gradients of further micro-batches are added to it there
        if not self.armed or self.order.seen is not None or number in self.order.in_parts:
            return  # or it is not known to be complete before the pass is over
        bucket.missing -= 1
        while self.sent < len(self.buckets) and self.buckets[self.sent].missing <= 0:
            self._send(self.buckets[self.sent])

    def _send(self, bucket: Bucket) -> None:
        if self.sent == 0:
            self.first_left = time.perf_counter()
        bucket.move_in()
        if self.compressing and self.compressor is not None and bucket.compressible:
            self.compressor.start(bucket.number)
            bucket.work = self.world.start_all_reduce(bucket.buffer[bucket.compressible :])
        else:
            bucket.work = self.world.start_all_reduce(bucket.buffer)
        self.sent += 1

    def finish(self) -> Tensor | None:
        """Send what is left, and wait until the sums are where the optimizer looks for gradients.

        Returns the sums of the packed metadata; None where there is none.
        """
        self.armed = self.filling = False
        while self.sent < len(self.buckets):
            self._send(self.buckets[self.sent])
        for bucket in self.buckets:
            self.world.wait(bucket.work)
            if self.compressing and self.compressor is not None:
                self.compressor.finish(bucket.number)
        self._look_who_used([bucket for bucket in self.buckets if not bucket.all_here])
        if self.compressing and self.compressor is not None:
            self.compressor.settle()
        summed = None if self.packed_metadata is None else unpack(self.buckets[0].packed, self.world.size)
        if (order := self.order.agree()) is not None:
            self._pack_anew(order)
        return summed

    def _look_who_used(self, buckets: Sequence[Bucket]) -> None:
        """Of the parameters that this worker did not use, give a gradient to those that another one did.

        On a GPU the host waits for the sums, and does so once however many there are.
        """
        lacking, used = [], []
        for bucket in buckets:
            for number, (parameter, view) in enumerate(bucket.places):
                if parameter.grad is None:
                    lacking.append((parameter, view))
                    one = bucket.used[number] > 0
                    # What a compression kept of earlier steps may arrive in a step that does not use the parameter.
                    used.append(one | view.any() if self.compressing and parameter.requires_grad else one)
        if not lacking:
            return
        for (parameter, view), one in zip(lacking, torch.stack(used).tolist(), strict=True):
            if one:
                parameter.grad = view

    def _pack_anew(self, order: Sequence[int]) -> None:
        """Make the buckets again, with the sums of this step in them; the ones before are gone then."""
        gradients = [parameter.grad for parameter in self.parameters]
        self._pack(order)
        for parameter, gradient, (_, view) in zip(self.parameters, gradients, self.place_of, strict=True):
            if gradient is not None:
                view.copy_(gradient)
                parameter.grad = view


_BYTES = 8
"""Of a float64."""


def elements_for(numbers: int, workers: int) -> int:
    """Elements of a bucket that `numbers` numbers of each worker take."""
    return numbers * workers * _BYTES


def pack(packed: Tensor, numbers: Tensor, rank: int) -> None:
    """Lay this worker's `numbers`, float64 of shape (n,), into `packed`, of `elements_for(n, workers)` elements.

    They travel in a bucket of gradients, exact to the last bit whatever its dtype, in which it is summed and which may
    round. So each worker has a place of its own for each number, in which all others have zeros, and lays its float64
    into it as eight bytes: integers from 0 to 255, which every floating dtype holds. What arrives is what each worker
    laid there, and is added in float64, in the order of ranks.
    """
    packed.zero_()
    place = numbers.numel() * _BYTES
    packed[rank * place : (rank + 1) * place].copy_(numbers.view(torch.uint8))


def unpack(packed: Tensor, workers: int) -> Tensor:
    """The sums of the numbers over the workers, float64 of shape (n,), once `packed` have been summed."""
    return packed.to(torch.uint8).view(torch.float64).view(workers, -1).sum(0)
