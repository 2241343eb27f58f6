"""Where agents connect: whoever comes has a few seconds to show that it belongs to the run.

Nothing that a stranger sends ends more than its own connection, and no number of them keeps an agent out for long.
"""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Callable

from manyhosts.launchers import messages
from manyhosts.launchers.loop import Channel, Loop, Message, notice_loss

MOST_STRANGERS = 64
"""Connections that have not yet shown who they are. One more, and the oldest of them is closed."""
STRANGER_LIMIT_S = 5.0
"""How long one may take to show who it is, however slowly it writes."""
_LONGEST_LINE = 1 << 14
"""Bytes, of one that has not shown who it is."""
_SWEEP_S = 0.25
_PAUSE_S = 0.2
"""How long nobody is let in where this process can open no more files."""


class Entrance:
    """The listening socket of the head."""

    def __init__(
        self, loop: Loop, address: tuple[str, int], token: str, admit: Callable[[Channel, Message], bool]
    ) -> None:
        """`admit` takes the connection of one that knows `token`, with its first message, or returns False."""
        self._loop, self._token, self._admit = loop, token, admit
        self._listening = socket.create_server(address, backlog=128)
        self._listening.setblocking(False)
        self._strangers: dict[Channel, float] = {}
        """When each has come, on the monotonic clock; the oldest is the first."""
        loop.watch(self._listening, self._accept)
        self._is_open = True

    @property
    def place(self) -> str:
        """Where it listens, host:port."""
        host, port = self._listening.getsockname()[:2]
        return f"{host}:{port}"

    def close(self) -> None:
        """Let nobody in any more: whoever comes now finds nobody."""
        self._is_open = False
        self._loop.unwatch(self._listening)
        self._listening.close()
        for channel in list(self._strangers):
            self._turn_away(channel)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it is gone already
        except OSError:
            self._rest()
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._turn_away(next(iter(self._strangers)))
        notice_loss(connection)
        channel = Channel(
            self._loop, connection, lambda message: self._hear(channel, message), lambda: self._turn_away(channel)
        )
        channel.longest_line = _LONGEST_LINE
        if not self._strangers:
            self._loop.after(_SWEEP_S, self._sweep)
        self._strangers[channel] = time.monotonic()

    def _rest(self) -> None:
        """This process has no room for one more open file: make some, and try again in a while."""
        for channel in list(self._strangers):
            self._turn_away(channel)
        self._loop.unwatch(self._listening)

        def go_on() -> None:
            if self._is_open:
                self._loop.watch(self._listening, self._accept)

        self._loop.after(_PAUSE_S, go_on)

    def _sweep(self) -> None:
        late = time.monotonic() - STRANGER_LIMIT_S
        for channel in [channel for channel, came in self._strangers.items() if came < late]:
            self._turn_away(channel)
        if self._strangers:
            self._loop.after(_SWEEP_S, self._sweep)

    def _turn_away(self, channel: Channel) -> None:
        self._strangers.pop(channel, None)
        channel.close()

    def _hear(self, channel: Channel, message: Message) -> None:
        """The first message of a connection: whoever does not know the token is not listened to any further."""
        if not self._knows_the_token(message):
            self._turn_away(channel)
            return
        self._strangers.pop(channel, None)
        channel.longest_line = Channel.LONGEST_LINE
        if not self._admit(channel, message):
            channel.close()

    def _knows_the_token(self, message: Message) -> bool:
        if message.get("message") != "hello" or messages.fault_in(message, {"token": str, **messages.HELLO}):
            return False
        # Bytes: of text, letters outside ASCII are refused by an exception. What JSON lets stand alone, too.
        shown = message["token"].encode("utf-8", "surrogatepass")
        return hmac.compare_digest(shown, self._token.encode())
