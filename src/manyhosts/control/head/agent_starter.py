"""Starts the agents of a run, on this machine or elsewhere, and listens where those that are elsewhere call."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Protocol

from manyhosts.cluster.ports import Range
from manyhosts.control.handshake import Hello
from manyhosts.control.head.state import AgentProcess, HeadEndpoint, HeadState
from manyhosts.control.loop import Channel, Message
from manyhosts.control.proof import PROTOCOL
from manyhosts.control.wire_format import by_name, read
from manyhosts.errors import LaunchError

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
        from manyhosts.control.acceptor import Acceptor  # here, for it loads OpenSSL, which few runs need

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
