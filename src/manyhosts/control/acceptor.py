"""Where agents connect: a caller has a few seconds to show that it belongs to the run.

Nothing that a stranger sends ends more than its own connection, and no number of them keeps an agent out for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from manyhosts.cluster.ports import Range
from manyhosts.control import tls
from manyhosts.control.handshake import FROM_CALLER, Ask, Call, Enrol, FromCalled, Hello, Offer, Prove, Secret
from manyhosts.control.loop import Channel, Loop, Message, notice_loss
from manyhosts.control.proof import Answerer
from manyhosts.control.wire_format import content_of, read
from manyhosts.hosts import addresses
from manyhosts.hosts.ports import listen

MOST_STRANGERS = 64
"""Connections that have not yet shown who they are. One more, and the oldest of them is closed."""
STRANGER_LIMIT_S = 5.0
"""How long one may take to show who it is, however slowly it writes."""
_LONGEST_LINE = 1 << 14
"""Bytes, of one that has not shown who it is."""
_BACKLOG = 128
_SWEEP_S = 0.25
_PAUSE_S = 0.2
"""How long no connection is accepted when this process can open no more files."""


@dataclass(frozen=True, slots=True)
class _Stranger:
    """A connection that has not shown yet who it is."""

    came: float
    """On the monotonic clock."""
    proof: Answerer


class Acceptor:
    """The listening socket of the head. Everything that goes over its connections is encrypted."""

    def __init__(
        self,
        loop: Loop,
        address: tuple[str, int],
        token: str,
        admit: Callable[[Channel, Hello, int], None],
        *,
        ports: Range | None = None,
        identity: tls.Identity | None = None,
        enrols: Callable[[str], bool] | None = None,
        answer: Callable[[Ask], Offer] | None = None,
    ) -> None:
        """`admit` is given the connection of one that knows `token`, its `Hello` and which version it speaks.

        It listens at `address`; where the port there is 0, at one of `ports`, or at any free one.
        `enrols` says whether a caller that sends a key is given `token`; None: never.
        `answer` answers a caller that knows `token` and asks whether it may join; None: none may.
        """
        self._loop, self._token, self._admit = loop, token, admit
        self._identity = identity or tls.Identity()
        self._answer, self._enrols = answer, enrols
        host, port = address
        if port:
            self._listening = addresses.listen(host, port, backlog=_BACKLOG)
        else:
            self._listening = listen(host, ports, backlog=_BACKLOG, what="the head of the run")
        self._listening.setblocking(False)
        self._strangers: dict[Channel, _Stranger] = {}
        """The oldest is the first."""
        loop.watch(self._listening, self._accept)
        self._is_open = True

    @property
    def place(self) -> str:
        """Where it listens, host:port."""
        return addresses.place(*self._listening.getsockname()[:2])

    def close(self) -> None:
        """Accept no more connections."""
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
            self._loop,
            connection,
            lambda message: self._hear(channel, message),
            lambda: self._turn_away(channel),
            tls=self._identity.answer(),
        )
        channel.longest_line = _LONGEST_LINE
        if not self._strangers:
            self._loop.after(_SWEEP_S, self._sweep)
        self._strangers[channel] = _Stranger(time.monotonic(), Answerer(self._token, self._identity.fingerprint))

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
        for channel in [channel for channel, each in self._strangers.items() if each.came < late]:
            self._turn_away(channel)
        if self._strangers:
            self._loop.after(_SWEEP_S, self._sweep)

    def _turn_away(self, channel: Channel) -> None:
        self._strangers.pop(channel, None)
        channel.close()

    def _hear(self, channel: Channel, found: Message) -> None:
        """A caller's message: we prove that we know the token, then it does, or its connection is closed."""
        answer: FromCalled | None = None
        proof = self._strangers[channel].proof
        try:
            message = read(found, FROM_CALLER)
        except ValueError:
            self._turn_away(channel)
            return
        match message:
            case Call() if (proven := proof.prove(content_of(message))) is not None:
                answer = Prove(**proven)
            case Enrol() if self._enrols is not None and self._enrols(message.key):
                answer = Secret(token=self._token)  # it calls on another connection
            case Ask() if self._answer is not None and proof.is_proven_by(message.proof):
                answer = self._answer(message)  # it says goodbye itself, or is turned away in a while
            case Hello() if proof.is_proven_by(message.proof):
                self._strangers.pop(channel)
                channel.longest_line = Channel.LONGEST_LINE
                self._admit(channel, message, proof.protocol)
                return
        if answer is None:
            self._turn_away(channel)
        else:
            channel.say(answer)
