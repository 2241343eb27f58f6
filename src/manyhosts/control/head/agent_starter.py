"""Starts the agents of a run, on this machine or elsewhere, and accepts the connections of those that are elsewhere.

A caller has a few seconds to show that it belongs to the run. Nothing that a stranger sends ends more than its own
connection, and no number of them keeps an agent out for long.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from manyhosts.cluster.ports import Range
from manyhosts.control import tls
from manyhosts.control.handshake import FROM_CALLER, Ask, Call, Enrol, FromCalled, Hello, Offer, Prove, Secret
from manyhosts.control.head.state import AgentProcess, HeadEndpoint, HeadState
from manyhosts.control.loop import Channel, Loop, Message, notice_loss
from manyhosts.control.proof import PROTOCOL, Answerer
from manyhosts.control.wire_format import by_name, content_of, read
from manyhosts.errors import LaunchError
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
            lambda message: self._receive(channel, message),
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

    def _receive(self, channel: Channel, found: Message) -> None:
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


StartAgent = Callable[[int, str, str], AgentProcess]
"""Starts the agent of a node, given the head's address (host:port) and the run's token."""
StartHere = Callable[[int, socket.socket], AgentProcess | None]
"""Starts the agent of a node on this machine with one end of a pair of sockets; None for a node that is elsewhere."""


class Admit(Protocol):
    """Takes in an agent that has shown that it belongs to the run."""

    def __call__(self, channel: Channel, hello: Hello, protocol: int, *, is_local: bool = False) -> None:
        """`is_local`: it was started on this machine, with one end of a pair of sockets."""


class AgentStarter:
    """That of one run. Nothing listens where all agents are of this machine."""

    def __init__(  # made in one place
        self,
        state: HeadState,
        start_agent: StartAgent,
        start_here: StartHere | None,
        address: str,
        endpoint: HeadEndpoint,
        admit: Admit,
        answer: Callable[[Any], Any] | None,
    ) -> None:
        """`address` is where agents reach this process; `answer` is for hosts that join by themselves."""
        self._state, self._start_agent, self._start_here = state, start_agent, start_here
        self._address, self._endpoint, self._admit, self._answer = address, endpoint, admit, answer
        self._acceptor: Any = None
        self._unheard: set[Channel] = set()
        """The connections of agents of this machine that have not said a word yet."""

    @property
    def place(self) -> str:
        """Where agents call, as host:port."""
        return str(self._acceptor.place)

    def start(self, number: int) -> AgentProcess:
        """Start the agent of node `number`.

        Raises:
            LaunchError: it calls a place that this machine cannot listen at.
        """
        if self._start_here is not None and (started := self._on_this_host(self._start_here, number)) is not None:
            return started
        self.listen()
        return self._start_agent(number, self._acceptor.place, self._endpoint.token)

    def listen(self) -> None:
        """Be where agents call, if not yet.

        Raises:
            LaunchError: this machine cannot listen there.
        """
        if self._acceptor is not None:
            return

        address, port, enrolment = self._address, self._endpoint.port, self._endpoint.enrolment
        try:
            self._acceptor = Acceptor(
                self._state.loop,
                (address, port),
                self._endpoint.token,
                self._admit,
                ports=Range.of(self._state.job.ports),
                identity=self._endpoint.identity,
                enrols=None if enrolment is None else enrolment.admits,
                answer=self._answer,
            )
        except OSError as cause:
            if not port:
                raise
            raise LaunchError(
                f"the hosts of this run call its head at {address} port {port}, and this machine cannot listen there:"
                f" {cause.strerror}",
                where=str(self._state.job.run_dir),
                fix="see that this is the machine, with the address, that the run was started from, and that no other"
                " program has that port",
            ) from cause

    def _on_this_host(self, start_here: StartHere, number: int) -> AgentProcess | None:
        """Start an agent over a socket pair that no other process can reach."""
        ours, theirs = socket.socketpair()
        with theirs:
            started = start_here(number, theirs)
        if started is None:
            ours.close()
            return None

        def admit(found: Message) -> None:
            self._unheard.discard(channel)
            try:
                hello = read(found, by_name(Hello))
            except ValueError:
                channel.close()
            else:
                self._admit(channel, hello, PROTOCOL, is_local=True)

        channel = Channel(self._state.loop, ours, admit, lambda: self._unheard.discard(channel))
        self._unheard.add(channel)
        return started

    def close(self) -> None:
        """Start no more agents; one that connects from now on is refused, and ends."""
        if self._acceptor is not None:
            self._acceptor.close()
        for channel in self._unheard:
            channel.close()
