"""The agent's part of the store: passes workers' questions on to the head, and keeps a TCPStore where one is asked for.

`cluster.store_line` says what workers ask. A TCPStore is there for clients that do not ask through the agent: scripts
without a Trainer, and NCCL. Its port is reserved when workers start, and opened when the first of them needs it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from manyhosts.cluster.ports import Range
from manyhosts.control.loop import Channel, Message
from manyhosts.control.protocol import AnswerStore, AskStore, FromAgent
from manyhosts.hosts import ports


class StoreLines:
    """The connections over which workers of this host ask."""

    def __init__(self, say: Callable[[FromAgent], None]) -> None:
        """`say` sends to the head."""
        self._say = say
        self._lines: dict[int, Channel] = {}
        self._numbers: dict[Channel, int] = {}
        self._next = 0
        self._shared: dict[str, int] = {}
        """Questions for what all workers put there, and by which line they were passed on: each once for this host."""
        self._sharing: dict[int, list[tuple[Channel, int]]] = {}
        """By line: who is to hear the answer, and what each calls its question."""

    def ask(self, channel: Channel, question: Message) -> None:
        """A worker asks."""
        number, do, asked = int(question["id"]), str(question["store"]), dict(question["fields"])
        if do == "get_all":
            self._share(channel, number, asked)
            return
        if channel not in self._numbers:
            self._numbers[channel], self._lines[self._next] = self._next, channel
            self._next += 1
        self._say(AskStore(line=self._numbers[channel], id=number, do=do, fields=asked))

    def _share(self, channel: Channel, number: int, asked: dict[str, Any]) -> None:
        key = json.dumps(asked, sort_keys=True)
        line = self._shared.get(key)
        if line is not None:
            self._sharing[line].append((channel, number))
            return
        self._shared[key], self._sharing[self._next] = self._next, [(channel, number)]
        self._next += 1
        self._say(AskStore(line=self._shared[key], id=number, do="get_all", fields=asked))

    def answer(self, message: AnswerStore) -> None:
        """The head answers. A worker that is gone, or waits no more, gets nothing."""
        if (asked := self._sharing.pop(message.line, None)) is not None:
            self._shared = {key: line for key, line in self._shared.items() if line != message.line}
            for each, number in asked:
                each.send("answer", **{**message.answer, "id": number})
        elif (channel := self._lines.get(message.line)) is not None:
            channel.send("answer", **message.answer)

    def forget(self, channel: Channel) -> None:
        """The worker has ended the connection."""
        self._lines.pop(self._numbers.pop(channel, -1), None)


class TcpStore:
    """The port of a TCPStore on this host, and the process that serves it once it was asked for."""

    def __init__(self, serve: Callable[[int, str], None], end: Callable[[str], None]) -> None:
        """`serve` starts a process that keeps a store at a socket that listens, under a name; `end` kills it."""
        self._serve, self._end = serve, end
        self._reserved: socket.socket | None = None
        """Bound but not listening, so that no other process gets the port."""
        self._count = 0

    def open(self, address: str, allowed: Range | None, *, listens: bool) -> int:
        """The port of a new one; or, where only its port was taken so far, of the same. `listens`: have it served.

        Raises:
            LaunchError: none of the allowed ports is free.
        """
        bound = self._reserved
        if bound is None or not listens:
            self.close()
            bound = ports.reserve(address, allowed, what="the store of the workers")
        port = int(bound.getsockname()[1])
        self._reserved = None if listens else bound
        if listens:
            with bound:
                bound.listen(4096)
                self._count += 1
                self._serve(bound.fileno(), f"store {self._count}")
        return port

    def close(self) -> None:
        """Release the clients that wait there."""
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        if self._count:
            self._end(f"store {self._count}")
