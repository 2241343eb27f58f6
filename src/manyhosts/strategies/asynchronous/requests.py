"""What workers ask of each other within a step, and the threads that answer.

A step begins with a thread for each other worker wherever something is served, and ends when all of these have said
that they ask no more. So between two steps no thread waits for anybody, however long an evaluation takes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from manyhosts.communication.side_group import SideGroup
from manyhosts.strategies.asynchronous.hand_out import HandOut
from manyhosts.strategies.asynchronous.served import Served

LEADER = 0
"""Who hands out."""
_REQUEST, _REPLY = 1, 2
_NOTHING = torch.empty(0, dtype=torch.uint8)
_JOIN_S = 5.0
"""How long a thread whose connection is cut has to notice."""


class Kind(IntEnum):
    """What is asked for."""

    TAKE = 0
    """The next micro-batch."""
    PULL = 1
    PUSH = 2
    PUSHED = 3
    """Nothing: the worker's gradient is with all servers."""
    END = 4


class RequestHandler:
    """What this worker answers in one step."""

    def __init__(self, served: Served, hand_out: HandOut | None, side: SideGroup | None) -> None:
        """`hand_out`: on the leader."""
        self.served, self.hand_out, self.side = served, hand_out, side
        self.error: BaseException | None = None
        self.threads: list[threading.Thread] = []

    @property
    def is_asked(self) -> bool:
        """Whether others ask anything here."""
        return bool(self.served.values) or self.hand_out is not None

    def open(self) -> None:
        """Answer all other workers from now on."""
        if self.side is None or not self.is_asked:
            return
        for worker in range(self.side.size):
            if worker != self.side.rank:
                thread = threading.Thread(target=self._answer_all, args=(self.side, worker), daemon=True)
                self.threads.append(thread)
                thread.start()

    def close(self) -> None:
        """Return when no one asks any more.

        Raises:
            BaseException: what an answer ended with.
        """
        for thread in self.threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """The connections are cut: wait for the threads, but not for one that sees nothing of it."""
        if self.hand_out is not None:
            self.hand_out.fail(RuntimeError("gloo: connection closed, the workers have changed"))
        for thread in self.threads:
            thread.join(_JOIN_S)

    def answer(self, worker: int, kind: Kind, number: int, payload: Tensor) -> Tensor:
        """What `worker` gets."""
        if self.error is not None:
            raise self.error
        if kind == Kind.PULL:
            version, values = self.served.pull()
            return torch.cat([torch.tensor([version]).view(torch.uint8), values])
        if kind == Kind.PUSH:
            return torch.tensor([self.served.push(number, payload)])
        assert self.hand_out is not None, f"{kind.name} is for the leader, and {worker} has sent it elsewhere"
        if kind == Kind.TAKE:
            return torch.tensor([self.hand_out.take(worker)])
        self.hand_out.pushed(worker)
        return torch.tensor([0])

    def _answer_all(self, side: SideGroup, worker: int) -> None:
        """Answer one worker, until it asks no more."""
        try:
            while True:
                kind, number, size = side.receive(torch.empty(3, dtype=torch.int64), worker, _REQUEST).tolist()
                if kind == Kind.END:
                    return
                payload = torch.empty(size, dtype=torch.uint8)
                if size:
                    side.receive(payload, worker, _REQUEST)
                side.send(self.answer(worker, Kind(kind), number, payload), worker, _REPLY)
        except BaseException as error:  # which belongs to the thread that trains
            self.error = self.error or error
            if self.hand_out is not None:
                self.hand_out.fail(error)


class Asks:
    """This worker's requests to all that serve."""

    def __init__(self, desk: RequestHandler, rank: int, sizes: Sequence[int]) -> None:
        """`sizes`: the bytes of the parameters that each worker keeps, by rank; 0 where it keeps none."""
        self.desk, self.rank, self.sizes = desk, rank, sizes

    def take(self) -> int:
        """The number of the next micro-batch; below 0 where there is none left."""
        return int(self._ask(LEADER, Kind.TAKE))

    def pull(self, server: int) -> tuple[int, Tensor]:
        """The version that worker `server` has now, and its values, packed."""
        reply = self._ask(server, Kind.PULL, reply=torch.empty(8 + self.sizes[server], dtype=torch.uint8))
        return int(reply[:8].clone().view(torch.int64)), reply[8:]

    def push(self, server: int, version: int, payload: Tensor) -> int:
        """Have an update made by gradients; returns how many others were made since `version`."""
        return int(self._ask(server, Kind.PUSH, version, payload))

    def pushed(self) -> None:
        """All servers have the gradient of what was taken last."""
        self._ask(LEADER, Kind.PUSHED)

    def end(self) -> None:
        """Ask no more."""
        for other in range(len(self.sizes)):
            if other != self.rank and self.desk.side is not None and (other == LEADER or self.sizes[other]):
                self.desk.side.send(torch.tensor([Kind.END, 0, 0]), other, _REQUEST)

    def _ask(
        self, other: int, kind: Kind, number: int = 0, payload: Tensor = _NOTHING, reply: Tensor | None = None
    ) -> Tensor:
        if other == self.rank:
            return self.desk.answer(other, kind, number, payload)
        side = self.desk.side
        assert side is not None, "there are others only where there is a group"
        side.send(torch.tensor([kind, number, payload.numel()]), other, _REQUEST)
        if payload.numel():
            side.send(payload, other, _REQUEST)
        return side.receive(torch.empty(1, dtype=torch.int64) if reply is None else reply, other, _REPLY)
