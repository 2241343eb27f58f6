"""Vectors summed over the parts of a batch in the order of the tree, with the same bits on every worker.

A worker adds its own parts as far as the tree allows. What is left, mostly one subtree, is cut into one chunk per
worker; each worker gets its chunk of all subtrees, adds them in the order of the tree, and sends the sum to all. Where
every worker has one subtree that is as many bytes as a ring all-reduce sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from manyhosts.communication.collectives import Work
from manyhosts.communication.tree import Node, Subtrees, subtrees
from manyhosts.communication.world import World

_ROUND = 64
"""Chunks begin at multiples of so many elements, so that no sum begins in the middle of a cache line."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How sums travel."""

    segment_bytes: int
    """About so many bytes of a vector are exchanged at a time."""
    lag: int
    """The second half of a segment's exchange begins after the first half of the `lag`-th one after it."""


ON_CPU = Pace(segment_bytes=2_000_000, lag=32)
"""An all-to-all by itself leaves a third of a cable of 1 Gbit/s empty (Gloo, four hosts); several under way fill it."""
ON_GPU = Pace(segment_bytes=1 << 40, lag=1 << 30)
"""On a GPU nothing is added before the backward pass is over: its stream would wait for the network."""


def pace_on(device: torch.device) -> Pace:
    """The one for workers that compute on `device`."""
    return ON_CPU if device.type == "cpu" else ON_GPU


class TreeSum:
    """One vector of `length` elements, from its parts on this worker to its sum on all.

    For each step: `begin`; `open` and `close` for each part in order; `Exchange.send`, `Exchange.finish`; `result`.

    It travels in segments of about `segment_bytes`, each exchanged by itself: a segment can be on its way to all
    while the next one comes in. In memory one segment lies after the other, and in each the chunk of each worker.
    """

    def __init__(self, length: int, *, dtype: torch.dtype, world: World, segment_bytes: int) -> None:
        self.length, self.dtype, self.world = length, dtype, world
        self.segments = max(1, round(length * dtype.itemsize / segment_bytes))
        self.free: list[Tensor] = []
        self.used: list[Tensor] = []
        self.chunk = 0
        """Elements that one worker adds of one segment."""
        self.assignment: list[range] = []
        self.counts: list[int] = []
        """Subtrees that each worker has, by rank."""
        self.sums: Subtrees[Tensor] = Subtrees(1, torch.Tensor.add_)
        self.works: list[Work] = []
        """What each segment waits for."""
        self.inbox: Tensor | None = None
        """This worker's chunks of every subtree, by segment and rank; kept from step to step, for fresh memory costs
        time."""
        self.sent: list[Tensor] = []
        """What is on its way, by segment."""

    def begin(self, assignment: Sequence[range]) -> None:
        """Forget the last step. `assignment`: the parts of each worker, by rank; together they are all parts."""
        if any(work is not None for work in self.works) or list(assignment) != self.assignment:
            # The last step broke off, and somebody may still write into these; or the workers are not the same.
            self.free, self.used, self.inbox = [], [], None
        self.free, self.used = self.free + self.used, []
        self.assignment = list(assignment)
        self.chunk = -(-self.length // (self.segments * self.world.size * _ROUND)) * _ROUND
        self.counts = [len(subtrees(assignment[-1].stop, each.start, each.stop)) for each in assignment]
        self.sums = Subtrees(assignment[-1].stop, self._add)
        self.works, self.sent = [None] * self.segments, []

    def _buffer(self) -> Tensor:
        buffer = (
            self.free.pop()
            if self.free
            else torch.zeros(self.segments * self.world.size * self.chunk, dtype=self.dtype, device=self.world.device)
        )
        self.used.append(buffer)
        return buffer

    def _add(self, left: Tensor, right: Tensor) -> Tensor:
        left.add_(right)
        self._give_back(right)
        return left

    def _give_back(self, buffer: Tensor) -> None:
        self.used = [other for other in self.used if other is not buffer]
        self.free.append(buffer)

    def open(self, part: int) -> tuple[Tensor, bool]:
        """Where the elements of `part` go, and whether they must be added to what is there or take its place."""
        left = self.sums.left_of(part)
        return (self._buffer(), False) if left is None else (left, True)

    def close(self, part: int, buffer: Tensor, *, added: bool) -> None:
        """`part` is in `buffer` now."""
        if added:
            self.sums.added_to_left_of(part)
        else:
            self.sums.put(Node(0, part), buffer)

    def _segment_of(self, buffer: Tensor, segment: int) -> Tensor:
        """A segment of `buffer`, by worker and element."""
        return buffer.view(self.segments, self.world.size, self.chunk)[segment]

    def start(self, segment: int) -> None:
        """Begin to give every worker its chunk of the subtrees here, in one segment."""
        size = self.world.size
        if size == 1:
            return
        own = [self._segment_of(value, segment) for _, value in self.sums.stack]
        outbox = own[0] if len(own) == 1 else torch.stack(own, dim=1).view(-1, self.chunk)
        if self.inbox is None:
            self.inbox = outbox.new_empty((self.segments, sum(self.counts), self.chunk))
        self.works[segment] = self.world.start_exchange(self.inbox[segment], outbox, self.counts, [len(own)] * size)
        self.sent.append(outbox)

    def turn(self, segment: int) -> None:
        """Add up this worker's chunk of a segment, once it is there, and begin to send it to all."""
        if self.world.size == 1:
            return
        self.world.wait(self.works[segment])
        assert self.inbox is not None, "start() comes before turn()"
        parts = self.assignment[-1].stop
        nodes = [node for own in self.assignment for node in subtrees(parts, own.start, own.stop)]
        sums = Subtrees(parts, torch.Tensor.add_)
        for node, row in zip(nodes, self.inbox[segment].unbind(0), strict=True):
            sums.put(node, row)
        [(_, total)] = sums.stack
        self.sent[segment] = total
        self.works[segment] = self.world.start_gather(self._segment_of(self.result_buffer, segment), total)

    def finish(self) -> None:
        """Wait until the entire sum is here."""
        for work in self.works:
            self.world.wait(work)
        self.works, self.sent = [], []
        for _, buffer in self.sums.stack[1:]:
            self._give_back(buffer)

    @property
    def result_buffer(self) -> Tensor:
        """What `result` is a view of; of the worker's first subtree, which has been sent when the sum comes."""
        return self.sums.stack[0][1]

    @property
    def result(self) -> Tensor:
        """The sum over all parts, shape (length,), after `finish`; valid until the next `begin`."""
        return self.result_buffer[: self.length]


class Exchange:
    """Sums on their way, in an order that is the same on every worker.

    When the second half of a segment's exchange begins is a rule that every worker keeps (see `Pace`), because
    collectives must begin in the same order everywhere.
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.first: deque[Callable[[], None]] = deque()
        """What begins the second half of the exchange of each segment that is in the first half of it."""
        self.under_way: list[TreeSum] = []

    def send(self, total: TreeSum) -> None:
        """Send a sum on its way."""
        self.under_way.append(total)
        for segment in range(total.segments):
            total.start(segment)
            self.first.append(partial(total.turn, segment))
            if len(self.first) > self.pace.lag:
                self.first.popleft()()

    def finish(self) -> None:
        """Wait until every sum is here."""
        while self.first:
            self.first.popleft()()
        for total in self.under_way:
            total.finish()
        self.under_way = []

    def forget(self) -> None:
        """Leave what was on its way when a step broke off."""
        self.first.clear()
        self.under_way.clear()
