"""Vectors summed over the parts of a batch in the order of the tree, with the same bits on every worker.

A worker adds its own parts as far as the tree allows. What is left, mostly one subtree, is cut into one chunk per
worker; each worker gets its chunk of all subtrees, adds them in the order of the tree, and sends the sum to all. Where
every worker has one subtree that is as many bytes as a ring all-reduce sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.communication.tree import Node, Subtrees, subtrees
from manyhands.communication.world import Work, World

_ROUND = 64
"""Chunks begin at multiples of so many elements, so that no sum begins in the middle of a cache line."""


class TreeSum:
    """One vector of `length` elements, from its parts on this worker to its sum on all.

    For each step: `begin`; `open` and `close` for each part in order; `Exchange.send`, `Exchange.finish`; `result`.
    """

    def __init__(self, length: int, *, dtype: torch.dtype, world: World) -> None:
        self.length, self.dtype, self.world = length, dtype, world
        self.free: list[Tensor] = []
        self.used: list[Tensor] = []
        self.chunk = 0
        self.held: list[range] = []
        self.sums: Subtrees[Tensor] = Subtrees(1, torch.Tensor.add_)
        self.work: Work = None
        self.inbox: Tensor | None = None
        """This worker's chunk of every subtree, by rank; kept from step to step, for fresh memory costs time."""
        self.outbox: Tensor | None = None

    def begin(self, held: Sequence[range]) -> None:
        """Forget the last step. `held` are the parts that each worker has, by rank; together they are all parts."""
        chunk = -(-self.length // (self.world.size * _ROUND)) * _ROUND
        if self.work is not None or list(held) != self.held:
            # The last step broke off, and somebody may still write into these; or the workers are not the same.
            self.free, self.used, self.inbox = [], [], None
        self.free, self.used = self.free + self.used, []
        self.chunk, self.held = chunk, list(held)
        self.sums = Subtrees(held[-1].stop, self._add)
        self.work, self.outbox = None, None

    def _buffer(self) -> Tensor:
        buffer = (
            self.free.pop()
            if self.free
            else torch.zeros(self.chunk * self.world.size, dtype=self.dtype, device=self.world.device)
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

    def start(self) -> None:
        """Begin to give every worker its chunk of the subtrees here."""
        size = self.world.size
        if size == 1:
            return
        parts = self.held[-1].stop
        counts = [len(subtrees(parts, held.start, held.stop)) for held in self.held]
        own = [value.view(size, self.chunk) for _, value in self.sums.held]
        self.outbox = own[0] if len(own) == 1 else torch.stack(own, dim=1).view(-1, self.chunk)
        if self.inbox is None:
            self.inbox = self.outbox.new_empty((sum(counts), self.chunk))
        self.work = self.world.start_exchange(self.inbox, self.outbox, counts, [len(own)] * size)

    def turn(self) -> None:
        """Add up this worker's chunk, once it is there, and begin to send it to all."""
        if self.world.size == 1:
            return
        self.world.wait(self.work)
        assert self.inbox is not None, "start() comes before turn()"
        parts = self.held[-1].stop
        nodes = [node for held in self.held for node in subtrees(parts, held.start, held.stop)]
        sums = Subtrees(parts, torch.Tensor.add_)
        for node, row in zip(nodes, self.inbox.unbind(0), strict=True):
            sums.put(node, row)
        [(_, total)] = sums.held
        self.outbox = total
        self.work = self.world.start_gather(self.result_buffer.view(self.world.size, self.chunk), total)

    def finish(self) -> None:
        """Wait until the whole sum is here."""
        if self.world.size > 1:
            self.world.wait(self.work)
        self.work, self.outbox = None, None
        for _, buffer in self.sums.held[1:]:
            self._give_back(buffer)

    @property
    def result_buffer(self) -> Tensor:
        """What `result` is a view of; of the worker's first subtree, which has been sent when the sum comes."""
        return self.sums.held[0][1]

    @property
    def result(self) -> Tensor:
        """The sum over all parts, shape (length,), after `finish`; valid until the next `begin`."""
        return self.result_buffer[: self.length]


class Exchange:
    """Sums on their way, in an order that is the same on every worker.

    The second half of each exchange begins after the first half of the `lag`-th one behind it, a rule that every
    worker keeps, because collectives must begin in the same order everywhere.
    """

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self.first: deque[TreeSum] = deque()
        self.second: list[TreeSum] = []

    def send(self, total: TreeSum) -> None:
        """Send a sum on its way."""
        total.start()
        self.first.append(total)
        while len(self.first) > self.lag:
            self._turn()

    def _turn(self) -> None:
        total = self.first.popleft()
        total.turn()
        self.second.append(total)

    def finish(self) -> None:
        """Wait until every sum is here."""
        while self.first:
            self._turn()
        for total in self.second:
            total.finish()
        self.second = []

    def forget(self) -> None:
        """Leave what was on its way when a step broke off."""
        self.first.clear()
        self.second.clear()
