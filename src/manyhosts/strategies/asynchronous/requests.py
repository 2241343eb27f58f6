"""What workers ask of each other within a step, and the threads that answer.

They ask for micro-batches, for parameters, and for an update by a gradient. A free worker takes the next micro-batch.

A step begins with a thread for each other worker wherever something is served, and ends when all of these have said
that they ask no more. So between two steps no thread waits for anybody, however long an evaluation takes.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch
from torch import Tensor

from manyhosts.communication.side_group import SideGroup
from manyhosts.strategies.asynchronous.served import Served

RANK_0 = 0
"""Who hands out."""
NONE_LEFT = -1
TAKE, PULL, PUSH, END = range(4)
"""What is asked for: the next micro-batch, which with a number above 0 says that what the worker took before is with
all servers; parameters; an update by gradients; and nothing any more."""
_REQUEST, _REPLY = 1, 2
_NOTHING = torch.empty(0, dtype=torch.uint8)
_JOIN_S = 5.0
"""How long a thread whose connection is cut has to notice."""


class HandOut:
    """The micro-batches of one step, each to one worker, by their numbers. Its calls may come from any thread.

    A worker's clock is the number of micro-batches whose gradients it has pushed in this step. Under a bound n it
    begins another only where its clock is at most n above the lowest of those that still compute: then it sees all that
    any worker has pushed up to n + 1 clocks before (Ho et al. 2013, "More Effective Distributed ML via a Stale
    Synchronous Parallel Parameter Server").
    """

    def __init__(self, pieces: int, workers: int, bound: int | None, *, first: int = 0) -> None:
        """`first`: the first worker that computes."""
        self.pieces, self.bound = pieces, bound
        self.clocks = [0] * workers
        self.taken = 0
        self.most_ahead = [0] * workers
        """Of each worker the most that it was ahead when it began one."""
        self._computing = set(range(first, workers))
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def take(self, worker: int) -> int:
        """The next for `worker`, which has pushed what it took before; `NONE_LEFT` where there is none for it.

        Waits until the bound allows it.

        Raises:
            RuntimeError: a server has `fail`ed meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.may_begin(worker) or self.taken == self.pieces or self._error)
            if self._error is not None:
                raise RuntimeError(f"a server has failed: {self._error}") from self._error
            if self.taken == self.pieces or worker not in self._computing:
                self._computing.discard(worker)
                self._changed.notify_all()
                return NONE_LEFT
            self.most_ahead[worker] = max(self.most_ahead[worker], self._ahead(worker))
            self.taken += 1
            return self.taken - 1

    def pushed(self, worker: int) -> None:
        """The gradient of what `worker` took is with all servers."""
        with self._changed:
            self.clocks[worker] += 1
            self._changed.notify_all()

    def may_begin(self, worker: int) -> bool:
        """Whether the bound lets `worker` begin one now."""
        return self.bound is None or self._ahead(worker) <= self.bound

    def fail(self, error: BaseException) -> None:
        """Let no one wait any more."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _ahead(self, worker: int) -> int:
        return self.clocks[worker] - min(self.clocks[each] for each in self._computing | {worker})


class Requests:
    """What this worker asks of others in one step, and what it answers them."""

    def __init__(
        self, served: Served | None, hand_out: HandOut, side: SideGroup | None, servers: Collection[int]
    ) -> None:
        """`side`: None where there is one worker; `servers`: those that keep parameters."""
        self.served, self.hand_out, self.side = served, hand_out, side
        self.rank = 0 if side is None else side.rank
        self.asked = sorted({RANK_0, *servers})
        """The workers that are asked something."""
        self.error: BaseException | None = None
        self.threads: list[threading.Thread] = []

    def open(self) -> None:
        """Answer all other workers from now on, where they ask anything here."""
        if self.side is not None and self.rank in self.asked:
            for worker in set(range(self.side.size)) - {self.rank}:
                self.threads.append(threading.Thread(target=self._answer_all, args=(self.side, worker), daemon=True))
                self.threads[-1].start()

    def ask(self, worker: int, kind: int, number: int = 0, payload: Tensor = _NOTHING) -> tuple[int, Tensor]:
        """The number and the bytes that `worker` answers with."""
        if self.side is None or worker == self.rank:
            return self._answer(worker, kind, number, payload)
        send(self.side, worker, _REQUEST, kind, number, payload)
        return receive(self.side, worker, _REPLY)[1:]

    def close(self) -> None:
        """Ask no more, and return when no other worker does.

        Raises:
            BaseException: what an answer ended with.
        """
        for worker in self.asked:
            if self.side is not None and worker != self.rank:
                send(self.side, worker, _REQUEST, END)
        for thread in self.threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """The connections are cut: wait for the threads, but not for one that sees nothing of it."""
        self.hand_out.fail(RuntimeError("gloo: connection closed, the workers have changed"))
        for thread in self.threads:
            thread.join(_JOIN_S)

    def _answer(self, worker: int, kind: int, number: int, payload: Tensor) -> tuple[int, Tensor]:
        if self.error is not None:
            raise self.error
        if kind == TAKE:
            if number:
                self.hand_out.pushed(worker)
            return self.hand_out.take(worker), _NOTHING
        assert self.served is not None, f"nothing is kept here, and {worker} has asked for it"
        return self.served.pull() if kind == PULL else (self.served.push(number, payload), _NOTHING)

    def _answer_all(self, side: SideGroup, worker: int) -> None:
        """Answer one worker, until it asks no more."""
        try:
            while (request := receive(side, worker, _REQUEST))[0] != END:
                send(side, worker, _REPLY, 0, *self._answer(worker, *request))
        except BaseException as error:  # which belongs to the thread that trains
            self.error = self.error or error
            self.hand_out.fail(error)


def send(side: SideGroup, worker: int, tag: int, kind: int = 0, number: int = 0, payload: Tensor = _NOTHING) -> None:
    """Send two numbers and bytes to `worker`, which must `receive` them."""
    side.send(torch.tensor([kind, number, payload.numel()]), worker, tag)
    if payload.numel():
        side.send(payload, worker, tag)


def receive(side: SideGroup, worker: int, tag: int) -> tuple[int, int, Tensor]:
    """What `worker` sends."""
    kind, number, size = side.receive(torch.empty(3, dtype=torch.int64), worker, tag).tolist()
    payload = torch.empty(size, dtype=torch.uint8)
    return kind, number, side.receive(payload, worker, tag) if size else payload
