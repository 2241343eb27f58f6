"""The agents of a run: they come, show that they belong to it, go, and are called back."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from manyhosts.control.handshake import ANY_NODE, Hello, Welcome
from manyhosts.control.head import failures
from manyhosts.control.head.agent_starter import AgentStarter, StartAgent, StartHere
from manyhosts.control.head.state import AgentProcess, ExternalAgent, HeadEndpoint, HeadState, Node, is_connected
from manyhosts.control.loop import Channel, Message
from manyhosts.control.proof import PROTOCOL
from manyhosts.control.protocol import FROM_AGENT, Alive, FromAgent, FromHead, Leave
from manyhosts.control.session import Session
from manyhosts.control.wire_format import read
from manyhosts.errors import LaunchError, ManyhostsError
from manyhosts.hosts import addresses

SEE_ABOVE = "mend that on this host, or run without it; what was printed above may say more"

_MOST_GPUS, _MOST_CORES = 1024, 1 << 16
"""That one host may say it has: as many workers are started there."""
_CALL_AGAIN_S = 2.0
_LONGEST_CALL_AGAIN_S = 10.0
_GOODBYE_LIMIT_S = 5.0
_LOOK_S = 0.2
_COMES_BACK_S = 2.0
"""How long an agent whose connection was ended, and not cut, has to call again: one that is alive does so at once."""
_SILENT_S = 2.25
"""An agent that was not heard for so long when its connection was ended was cut off before that."""
_FINDS_BACK_S = 10.0
"""How long that one has to call again: a call that was begun while the way was broken may take so long to fail."""


class Owner(Protocol):
    """What the head does when agents come, speak and go."""

    def welcome(self, node: Node) -> None:
        """An agent has come."""

    def receive(self, node: Node, message: FromAgent) -> None:
        """An agent says something."""

    def lose(self, node: Node, why: str) -> None:
        """An agent is gone that was not asked to end. `why` is what is known of that."""


class Agents:
    """One agent per node, started here; other connections are closed."""

    def __init__(
        self,
        state: HeadState,
        hosts: Sequence[str],
        start_agent: StartAgent,
        address: str,
        owner: Owner,
        endpoint: HeadEndpoint | None = None,
        start_here: StartHere | None = None,
        *,
        inherits: bool = False,
    ) -> None:
        """Start them all. `address` is where they reach this process, `hosts` the names of the nodes in order.

        Nothing listens where all agents are of this machine. `inherits`: they were started by another head, and call.

        Raises:
            LaunchError: they call a place that this machine cannot listen at.
        """
        self._state, self._owner, self.address = state, owner, address
        self.endpoint = endpoint or HeadEndpoint()
        self.nodes: list[Node] = []
        joining = self.endpoint.joining
        answer = None if joining is None else lambda asking: joining.answer(asking, self.nodes)
        self._starter = AgentStarter(state, start_agent, start_here, address, self.endpoint, self._admit, answer)
        if inherits:
            self._starter.listen()
        begin: Callable[[int], AgentProcess] = (lambda _: ExternalAgent()) if inherits else self._starter.start
        self.nodes = [Node(number, name, begin(number)) for number, name in enumerate(hosts)]

    def present(self) -> list[int]:
        """The numbers of the nodes whose agents are here."""
        return [node.number for node in self.nodes if node.channel is not None]

    @property
    def all_here(self) -> bool:
        """Whether every agent has come."""
        return len(self.present()) == len(self.nodes)

    @property
    def are_enough(self) -> bool:
        """Whether a run whose nodes may go can continue with those whose agents are here."""
        return len(self.present()) >= (self._state.job.least_nodes or 0)

    def send(self, nodes: Sequence[Node], message: FromHead) -> None:
        """Say something to the agents of `nodes`; those that are away do not hear it."""
        for node in nodes:
            if node.channel is not None:
                node.channel.say(message)

    def send_all(self, message: FromHead) -> None:
        """Say something to all agents that are here."""
        self.send(self.nodes, message)

    # They come.

    def _admit(self, channel: Channel, hello: Hello, protocol: int, *, is_local: bool = False) -> None:
        """One that belongs to the run says which node it is."""
        node = self.nodes[hello.node] if 0 <= hello.node < len(self.nodes) else None
        if hello.node == ANY_NODE and self.endpoint.joining is not None:
            node = self.endpoint.joining.place_for(hello, self.nodes)
        if node is not None and protocol != PROTOCOL:
            channel.close()
            self._refuse_version(node, protocol)
        elif node is not None and not (0 <= hello.gpus <= _MOST_GPUS and 0 <= hello.cores <= _MOST_CORES):
            channel.say(Leave(code=None))
            channel.close()
            self._refuse(
                node, f"the agent of host {node.name} says that it has {hello.gpus} GPUs and {hello.cores} cores"
            )
        elif node is not None and not addresses.may_be_one(hello.address):
            channel.say(Leave(code=None))
            channel.close()
            self._refuse(
                node, f"the agent of host {node.name} gives {hello.address[:60]!r} as its address, which is none"
            )
        elif node is None or not self._has_place_for(node, hello):
            channel.say(Leave(code=None))
            channel.close()
        else:
            self._take_in(node, channel, hello, is_local=is_local)

    def _has_place_for(self, node: Node, hello: Hello) -> bool:
        if node.channel is None:
            return not hello.heard  # or it is one that was given up, and whose workers are lost
        if node.session == hello.session:
            return node.channel.has_sent(hello.heard)  # else it has messages that the last head did not save
        if node.channel.channel is None and not hello.heard:
            self._lose(node, "its agent is gone, and another has come in its place")
        return node.channel is None

    def _take_in(self, node: Node, channel: Channel, hello: Hello, *, is_local: bool) -> None:
        is_new = node.channel is None
        if node.channel is None:
            node.channel = self.session_with(node)
            node.facts, node.session, node.is_local = hello, hello.session, is_local
            if hello.node == ANY_NODE and self.endpoint.joining is not None:
                self.endpoint.joining.take_in(node, self.nodes)
        node.heard, node.held_s = time.monotonic(), 0.0
        channel.on_end = lambda: self._lose_connection(node, channel)
        if not is_local:
            channel.say(Welcome(heard=node.channel.heard, node=node.number))
        node.channel.attach(channel, hello.heard)
        self._see_what_started(node)
        if is_new:
            self._owner.welcome(node)

    def _see_what_started(self, node: Node) -> None:
        """ssh may have given the host up while the way was broken; an agent that is heard is no part of it any more."""
        if is_connected(node) and node.agent.poll() is not None:
            node.agent = ExternalAgent()

    def session_with(self, node: Node) -> Session:
        """A conversation with a node's agent that has yet to begin, or to continue."""
        recorded = self._state.can_be_taken_over
        return Session(self._state.loop.after, lambda message: self._receive(node, message), holds_back=recorded)

    @property
    def hold_something_back(self) -> bool:
        """Whether a message waits to be released."""
        return any(node.channel is not None and node.channel.holds_some_back for node in self.nodes)

    def release(self) -> None:
        """Send the messages that waited until the state they follow from was saved."""
        for node in self.nodes:
            if node.channel is not None:
                node.channel.release()

    @property
    def place(self) -> tuple[str, int]:
        """Where they call: an address and a port."""
        return addresses.address_and_port(self._starter.place)

    @property
    def token(self) -> str:
        """The secret by which they know this head."""
        return self.endpoint.token

    @property
    def nobody_has_called(self) -> bool:
        """Whether no agent is connected."""
        return all(node.channel is None or node.channel.channel is None for node in self.nodes)

    def _refuse_version(self, node: Node, protocol: int) -> None:
        self._refuse(
            node,
            f"the agent of host {node.name} speaks version {protocol} of the protocol between head and agents, and this"
            f" head version {PROTOCOL}",
        )

    def _refuse(self, node: Node, why: str) -> None:
        error = LaunchError(why, where=f"host {node.name}", fix="install the same manyhosts there and here")
        if self._state.running:
            self._state.display.warn(f"manyhosts: {error}\nmanyhosts: the run continues without host {node.name}")
        else:
            self._state.result = error

    def _receive(self, node: Node, message: Message) -> None:
        node.heard = time.monotonic()
        try:
            said = read(message, FROM_AGENT)
        except ValueError as fault:
            self.give_up(
                node, f"its agent has sent a message ({message.get('message')!r}) that cannot be read: {fault}"
            )
            return
        node.held_s = said.held_s if isinstance(said, Alive) else 0.0
        try:
            self._owner.receive(node, said)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as cause:
            # Fields of reports, which are not checked before: the fault may be in them or in the head.
            what = (
                f"it lacks {cause}"
                if isinstance(cause, KeyError)
                else f"its fields are not as they should be ({cause})"
            )
            error = LaunchError(
                f"a message ({said.NAME!r}) of the agent of host {node.name} could not be followed: {what}",
                where=f"host {node.name}",
                fix="see that manyhosts is the same there and here; --trace shows where it went wrong",
            )
            error.__cause__ = cause
            self._state.result = error

    # They go, and are called back.

    def may_come_back(self, node: Node) -> bool:
        """Whether an agent that is not heard may call again."""
        return not node.is_local and self._state.job.head_timeout_s > 0

    def _lose_connection(self, node: Node, channel: Channel) -> None:
        """A connection has ended; its agent may be gone, or call again at once, or be out of reach for a while.

        Where it was silent before, what had started it (ssh) may have ended for that alone, which says nothing of it.
        """
        session, now = node.channel, time.monotonic()
        if session is None or session.channel is not channel:
            return
        was_silent = now - node.heard > _SILENT_S
        session.detach()
        if not self.may_come_back(node):
            self._lose(node, failures.why_connection_ended(node.agent, channel.trouble))
            return

        def check(until: float) -> None:
            if node.channel is not session or session.channel is not None:
                return
            now, has_ended = time.monotonic(), node.agent.poll() is not None
            if was_silent and not has_ended:
                until = now + _FINDS_BACK_S  # how long it is silent says what is to be done, until it can be reached
            if (has_ended and not was_silent) or now > until:
                self._lose(node, failures.why_connection_ended(node.agent, channel.trouble))
            else:
                self._state.loop.after(_COMES_BACK_S / 40, lambda: check(until))

        if not channel.is_cut:  # else how long it is silent says what is to be done
            check(now + (_FINDS_BACK_S if was_silent else _COMES_BACK_S))

    def _lose(self, node: Node, why: str) -> None:
        if node.channel is not None:
            node.channel.close()
        node.channel = None
        if not node.leaving and not self._state.is_over:
            self._owner.lose(node, why)

    def give_up(self, node: Node, why: str) -> None:
        """Count an agent as lost whose connection is still open. When it is back, it finds no head, and ends all."""
        if node.channel is not None:
            self._lose(node, why)

    def give_up_silent(self, node: Node, seconds: float) -> None:
        """Count an agent as lost that has given no sign of life for so long."""
        if node.channel is not None:
            held_s = node.held_s if time.monotonic() - node.heard < seconds else 0.0
            self.give_up(node, failures.why_silent(seconds, node.channel.channel, held_s))

    def turn_away(self, node: Node, why: str) -> None:
        """Send a host away that joined by itself and cannot be used, with the reason."""
        self.send([node], Leave(code=None, why=why))
        if node.channel is not None:
            node.channel.flush(timeout_s=1)
        self.give_up(node, why)

    def send_home(self, node: Node) -> None:
        """Do without an agent that is of no use; its host may be mended, and is called again now and then."""
        if node.channel is not None:
            node.channel.close()
            node.channel = None
        node.agent.terminate()
        self.call_again(node)

    def call_again(self, node: Node, pause_s: float = _CALL_AGAIN_S) -> None:
        """Try now and then to start the agent of a node that is away, so that it can come back."""
        state, generation = self._state, self._state.generation

        def call() -> None:
            if state.is_over or generation != state.generation or node.channel is not None:
                return
            if node.agent.poll() is not None:
                node.agent.wait()
                node.agent = self._starter.start(node.number)
            self.call_again(node, min(2 * pause_s, _LONGEST_CALL_AGAIN_S))

        state.loop.after(pause_s, call)

    def begin_missing_again(self) -> None:
        """Start another agent in place of each that is gone."""
        for node in self.nodes:
            if node.channel is None:
                self._begin_again(node)

    def _begin_again(self, node: Node) -> None:
        node.agent.kill()
        node.agent.wait()
        node.agent = self._starter.start(node.number)

    def bring_back(self, node: Node) -> None:
        """Start the agent of a node that is away: at once, for its host may be well, and now and then after that."""
        self._begin_again(node)
        self.call_again(node)

    def call_back(self, node: Node, on_failure: Callable[[], None]) -> None:
        """Try to start the agent of a host that is away; `on_failure` is called where it does not come in time."""
        self.bring_back(node)
        self._expect_back(node, self._state.generation, on_failure, time.monotonic() + self.endpoint.patience_s)

    def _expect_back(self, node: Node, generation: int, on_failure: Callable[[], None], until: float) -> None:
        state = self._state
        if node.channel is not None or state.is_over or generation != state.generation:
            return
        if time.monotonic() > until:
            on_failure()
            return
        state.loop.after(_LOOK_S, lambda: self._expect_back(node, generation, on_failure, until))

    def say_goodbye(self) -> None:
        """Have every agent end what is left, and see that it has gone."""
        for node in self.nodes:
            node.leaving = True
            self._see_what_started(node)
        result = self._state.result
        code = result.exit_code if isinstance(result, ManyhostsError) else result
        self.send_all(Leave(code=1 if code is None else code))
        self._starter.close()
        for node in self.nodes:
            if node.channel is not None:
                node.channel.flush(timeout_s=1)
            else:
                node.agent.terminate()
        until = time.monotonic() + _GOODBYE_LIMIT_S
        for node in self.nodes:
            try:
                node.agent.wait(timeout=_GOODBYE_LIMIT_S)
            except subprocess.TimeoutExpired:
                node.agent.kill()
                node.agent.wait()
            if node.channel is not None:
                if isinstance(node.agent, ExternalAgent):
                    # Its connection shows when it has gone. To close it while messages of the agent are unread would
                    # make the system drop what was sent last, and the agent would not know that the run is over.
                    node.channel.wait_for_end(until - time.monotonic())
                node.channel.close()
        self._state.loop.close()
