"""An agent's line to its head: nothing is said on it, and nothing heard, before both have proven who they are."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from manyhosts.launchers.loop import Channel, Loop, Message, notice_loss
from manyhosts.launchers.proof import PROTOCOL, Caller

_INHERITED = "fd:"
_CALL_S = 30.0
"""How long one call may take."""
_PROOF_S = 20.0
"""How long the head may take to prove itself: it may be busy with the start of a hundred agents."""
_PATIENCE_S = 60.0
"""How long a head is called again that has hung up before it knew this agent."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


def inherited(connection: socket.socket) -> str:
    """How an agent of this machine is told of a head that it is connected to from its birth."""
    return f"{_INHERITED}{connection.fileno()}"


def connect(head: str) -> socket.socket:
    """A connection to `head`, host:port; or the one that this process was given, where that is what it says.

    Raises:
        OSError: there is none to be had.
    """
    if head.startswith(_INHERITED):
        given = socket.socket(fileno=int(head.removeprefix(_INHERITED)))
        given.set_inheritable(False)  # it is for no worker
        return given
    host, _, port = head.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=_CALL_S)
    notice_loss(connection)
    return connection


class Line:
    """Messages to the head and from it, over one connection after another until it has taken this agent in."""

    def __init__(
        self,
        loop: Loop,
        connection: socket.socket,
        *,
        head: str,
        token: str,
        hello: Mapping[str, Any],
        on_message: Callable[[Message], None],
        on_end: Callable[[], None],
    ) -> None:
        """Say `hello` over `connection`, which leads to `head`, to whoever proves to know `token`.

        Without a token the connection is one that this process was born with, and needs no proof.
        """
        self._loop, self._head, self._token, self._hello = loop, head, token, hello
        self._on_message, self._on_end = on_message, on_end
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        """What is to be said when the head has proven who it is."""
        self._is_known = False
        """Whether the head has said something that only it can say."""
        self._is_open = True
        self._is_proven = not token
        self._deadline = time.monotonic() + _PATIENCE_S
        self._pause_s = _PAUSE_S
        self._channel = self._open(connection)

    @property
    def is_known(self) -> bool:
        """Whether the head has taken this agent in."""
        return self._is_known

    @property
    def backlog_bytes(self) -> int:
        """What is still to be sent."""
        return self._channel.backlog_bytes

    def send(self, kind: str, /, **fields: Any) -> None:
        """Send one message; after the end it is dropped."""
        if self._is_proven:
            self._channel.send(kind, **fields)
        elif self._is_open:
            self._waiting.append((kind, fields))

    def give_sign_of_life(self) -> None:
        """Let the head see that this host is well."""
        if self._is_proven:
            self._channel.send("alive")

    def close(self) -> None:
        """Say and hear no more."""
        self._is_open = False
        self._channel.close()

    # Calls.

    def _open(self, connection: socket.socket) -> Channel:
        if not self._token:
            channel = Channel(self._loop, connection, self._hear, self._lose)
            channel.send("hello", **self._hello)
            return channel
        from manyhosts.launchers import tls  # here, for an agent of the head's own machine need not load OpenSSL

        caller = Caller(self._token)
        channel = Channel(
            self._loop, connection, lambda message: self._see(channel, caller, message), self._lose, tls=tls.call()
        )
        channel.longest_line = 1 << 14
        channel.send("call", **caller.call())
        self._loop.after(_PROOF_S, lambda: self._hang_up_unproven(channel))
        return channel

    def _see(self, channel: Channel, caller: Caller, message: Message) -> None:
        """Whoever answers is to prove that it is the head, before it is told anything or obeyed."""
        proof = caller.proof_for(message, channel.fingerprint) if message.get("message") == "prove" else ""
        if not proof:
            sys.stderr.write(
                f"manyhosts: what answers at {self._head} does not know the secret of this run; it is told nothing\n"
            )
            self._hang_up_unproven(channel)
            return
        channel.longest_line = Channel.LONGEST_LINE
        channel.on_message = self._hear
        channel.send("hello", proof=proof, **self._hello)
        if caller.protocol != PROTOCOL:  # the head, which has heard ours, ends the run
            sys.stderr.write(f"manyhosts: {mismatch(caller.protocol, PROTOCOL)}\n")
            self._is_known = True
            return
        self._is_proven = True
        for kind, fields in self._waiting:
            channel.send(kind, **fields)
        self._waiting.clear()

    def _hang_up_unproven(self, channel: Channel) -> None:
        if channel is self._channel and not self._is_proven and self._is_open:
            channel.close()
            self._lose()

    def _hear(self, message: Message) -> None:
        self._is_known = True
        self._on_message(message)

    def _lose(self) -> None:
        if not self._is_open:
            return
        if self._is_known or not self._token or time.monotonic() > self._deadline:
            if not self._is_known:
                sys.stderr.write(f"manyhosts: the head at {self._head} did not take this agent in\n")
            self.close()
            self._on_end()
            return
        self._is_proven = False
        self._loop.after(self._pause_s, self._call)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _call(self) -> None:
        """Open another connection, on a thread: the head may not answer for long."""
        if not self._is_open:
            return
        reading, writing = os.pipe()
        found: list[socket.socket | OSError] = []

        def call() -> None:
            try:
                found.append(connect(self._head))
            except OSError as error:
                found.append(error)
            os.close(writing)

        def take() -> None:
            self._loop.unwatch(reading)
            os.close(reading)
            self._take(found[0])

        self._loop.watch(reading, take)
        threading.Thread(target=call, daemon=True).start()

    def _take(self, found: socket.socket | OSError) -> None:
        if isinstance(found, OSError):
            if isinstance(found, ConnectionRefusedError):
                self._deadline = 0.0  # nobody is there any more
            self._lose()
        elif self._is_open:
            self._channel = self._open(found)
        else:
            found.close()


def mismatch(head: int, agent: int) -> str:
    """What it means that head and agent speak different versions."""
    return f"the head speaks version {head} of the protocol between head and agents, and this agent version {agent}"
