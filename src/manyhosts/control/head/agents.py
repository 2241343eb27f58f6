"""The agents of a run: they come, show that they belong to it, go, and are called back."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from manyhosts.cluster.ports import Range
from manyhosts.control.head import failures
from manyhosts.control.head.placement import AgentProcess, ExternalAgent, HeadEndpoint, Node
from manyhosts.control.head.state import Course
from manyhosts.control.loop import Channel, Message
from manyhosts.control.proof import PROTOCOL
from manyhosts.control.protocol import HELLO, Alive, FromAgent, FromHead, Leave, content_of, fault_in, from_agent
from manyhosts.control.session import Session
from manyhosts.errors import LaunchError, ManyhostsError
from manyhosts.hosts import addresses

SEE_ABOVE = "mend that on this host, or run without it; what was printed above may say more"

_GATHER_S = 15.0
"""How long a run that may begin with fewer nodes waits for the others."""
_CALL_AGAIN_S = 2.0
_LONGEST_CALL_AGAIN_S = 10.0
_GOODBYE_LIMIT_S = 5.0
_LOOK_S = 0.2
_COMES_BACK_S = 2.0
"""How long an agent whose connection was ended, and not cut, has to call again: one that is alive does so at once."""

StartAgent = Callable[[int, str, str], AgentProcess]
"""Starts the agent of a node, given the head's address (host:port) and the run's token."""
ANY_NODE = -1
"""What an agent says in place of its number, when it is for the head to say which node it is."""
StartHere = Callable[[int, socket.socket], AgentProcess | None]
"""Starts the agent of a node on this machine with one end of a pair of sockets; None for a node that is elsewhere."""


class Owner(Protocol):
    """What the head does when agents come, speak and go."""

    def welcome(self, node: Node) -> None:
        """An agent has come."""

    def hear(self, node: Node, message: FromAgent) -> None:
        """An agent says something."""

    def lose(self, node: Node, why: str) -> None:
        """An agent is gone, and nobody had asked it to go. `why` is what is known of that."""


class Agents:
    """One agent per node, started here; whoever else connects is hung up on."""

    def __init__(
        self,
        course: Course,
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
        self._course, self._start_agent, self._owner, self.address = course, start_agent, owner, address
        self._start_here = start_here
        self._endpoint = endpoint or HeadEndpoint()
        self._acceptor: Any = None
        self._goes_without = False
        """Whether the run begins without those that are not here."""
        self._unheard: set[Channel] = set()
        """The connections of agents of this machine that have not said a word yet."""
        if inherits:
            self._listen()
        begin: Callable[[int], AgentProcess] = (lambda _: ExternalAgent()) if inherits else self._begin
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
        """Whether a run whose nodes may go can go on with those whose agents are here."""
        return len(self.present()) >= (self._course.job.least_nodes or 0)

    def tell(self, nodes: Sequence[Node], message: FromHead) -> None:
        """Say something to the agents of `nodes`; those that are away do not hear it."""
        for node in nodes:
            if node.channel is not None:
                node.channel.send(message.NAME, **content_of(message))

    def tell_all(self, message: FromHead) -> None:
        """Say something to all agents that are here."""
        self.tell(self.nodes, message)

    # They come.

    def _begin(self, number: int) -> AgentProcess:
        if self._start_here is not None and (started := self._begin_here(self._start_here, number)) is not None:
            return started
        self._listen()
        return self._start_agent(number, self._acceptor.place, self._endpoint.token)

    def _listen(self) -> None:
        if self._acceptor is not None:
            return
        from manyhosts.control.acceptor import Acceptor  # here, for it loads OpenSSL, which few runs need

        address, port, joining = self.address, self._endpoint.port, self._endpoint.joining
        enrolment = self._endpoint.enrolment
        try:
            self._acceptor = Acceptor(
                self._course.loop,
                (address, port),
                self._endpoint.token,
                self._admit,
                ports=Range.of(self._course.job.ports),
                identity=self._endpoint.identity,
                enrols=None if enrolment is None else enrolment.admits,
                answer=None if joining is None else lambda asking: joining.answer(asking, self.nodes),
            )
        except OSError as cause:
            if not port:
                raise
            raise LaunchError(
                f"the hosts of this run call its head at {address} port {port}, and this machine cannot listen there:"
                f" {cause.strerror}",
                where=str(self._course.job.run_dir),
                fix="see that this is the machine, with the address, that the run was started from, and that no other"
                " program has that port",
            ) from cause

    def _begin_here(self, start_here: StartHere, number: int) -> AgentProcess | None:
        """Start an agent that nobody else can speak for, nor listen to: the two ends know of each other alone."""
        ours, theirs = socket.socketpair()
        with theirs:
            started = start_here(number, theirs)
        if started is None:
            ours.close()
            return None

        def admit(hello: Message) -> None:
            self._unheard.discard(channel)
            self._admit(channel, hello, PROTOCOL, is_beside=True)

        channel = Channel(self._course.loop, ours, admit, lambda: self._unheard.discard(channel))
        self._unheard.add(channel)
        return started

    def _admit(self, channel: Channel, hello: Message, protocol: int, *, is_beside: bool = False) -> None:
        """One that belongs to the run says which node it is."""
        number = hello.get("node")
        if fault_in(hello, HELLO) or not isinstance(number, int):
            channel.close()
            return
        node = self.nodes[number] if 0 <= number < len(self.nodes) else None
        if number == ANY_NODE and self._endpoint.joining is not None:
            node = self._endpoint.joining.place_for(hello, self.nodes)
        if node is not None and protocol != PROTOCOL:
            channel.close()
            self._refuse_version(node, protocol)
        elif node is None or not self._has_place_for(node, hello):
            channel.send(Leave.NAME, **content_of(Leave(code=None)))
            channel.close()
        else:
            self._take_in(node, channel, hello, is_beside=is_beside)

    def _has_place_for(self, node: Node, hello: Message) -> bool:
        if node.channel is None:
            return not hello["heard"]  # or it is one that was given up, and whose workers are lost
        if node.session == hello["session"]:
            return node.channel.has_sent(hello["heard"])  # else it was told things that the last head has not written
        if node.channel.channel is None and not hello["heard"]:
            self._lose(node, "its agent is gone, and another has come in its place")
        return node.channel is None

    def _take_in(self, node: Node, channel: Channel, hello: Message, *, is_beside: bool) -> None:
        is_new = node.channel is None
        if node.channel is None:
            node.channel = self.session_with(node)
            node.facts, node.session, node.is_beside = hello, hello["session"], is_beside
            if hello["node"] == ANY_NODE and self._endpoint.joining is not None:
                self._endpoint.joining.take_in(node, self.nodes)
        node.heard, node.held_s = time.monotonic(), 0.0
        channel.on_end = lambda: self._lose_connection(node, channel)
        if not is_beside:
            channel.send("welcome", heard=node.channel.heard, node=node.number)
        node.channel.attach(channel, hello["heard"])
        if is_new:
            self._owner.welcome(node)

    def session_with(self, node: Node) -> Session:
        """A conversation with a node's agent that has yet to begin, or to go on."""
        recorded = self._course.can_be_taken_over
        return Session(self._course.loop.after, lambda message: self._hear(node, message), holds_back=recorded)

    @property
    def hold_something_back(self) -> bool:
        """Whether something is to be told to any of them."""
        return any(node.channel is not None and node.channel.holds_some_back for node in self.nodes)

    def release(self) -> None:
        """Let go what was held back until all that it follows from was written down."""
        for node in self.nodes:
            if node.channel is not None:
                node.channel.release()

    @property
    def place(self) -> tuple[str, int]:
        """Where they call: an address and a port."""
        return addresses.address_and_port(self._acceptor.place)

    @property
    def token(self) -> str:
        """The secret by which they know this head."""
        return self._endpoint.token

    @property
    def nobody_has_called(self) -> bool:
        """Whether no agent is connected."""
        return all(node.channel is None or node.channel.channel is None for node in self.nodes)

    def _refuse_version(self, node: Node, protocol: int) -> None:
        error = LaunchError(
            f"the agent of host {node.name} speaks version {protocol} of the protocol between head and agents, and this"
            f" head version {PROTOCOL}",
            where=f"host {node.name}",
            fix="install the same manyhosts there and here",
        )
        if self._course.running:
            self._course.display.warn(f"manyhosts: {error}\nmanyhosts: the run goes on without host {node.name}")
        else:
            self._course.result = error

    def _hear(self, node: Node, message: Message) -> None:
        node.heard = time.monotonic()
        try:
            said = from_agent(message)
        except ValueError as fault:
            self.give_up(
                node, f"its agent has sent a message ({message.get('message')!r}) that cannot be read: {fault}"
            )
            return
        node.held_s = said.held_s if isinstance(said, Alive) else 0.0
        try:
            self._owner.hear(node, said)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as cause:
            # Fields of reports, which nobody has looked at before: what is wrong may be in them or in the head.
            error = LaunchError(
                f"a message ({said.NAME!r}) of the agent of host {node.name} could not be followed:"
                f" {type(cause).__name__}: {cause}",
                where=f"host {node.name}",
                fix="see that manyhosts is the same there and here; --trace shows where it went wrong",
            )
            error.__cause__ = cause
            self._course.result = error

    @property
    def have_gathered(self) -> bool:
        """Whether the workers can start: all agents are here, or enough where the others may come later."""
        return self.all_here or self._goes_without

    def expect(self) -> None:
        """Look now and then whether the agents that have not said hello are still on their way."""
        self._goes_without = False
        self._look_for_missing(0)

    def _look_for_missing(self, waited_s: float) -> None:
        course = self._course
        missing = [node for node in self.nodes if node.channel is None]
        if not missing or course.is_over:
            return
        dead = [node for node in missing if node.agent.poll() is not None]
        if course.job.is_elastic:
            if (len(dead) == len(missing) or waited_s > _GATHER_S) and self._begin_without(missing, waited_s):
                return
        elif dead or waited_s > self._endpoint.patience_s:
            course.result = self._not_here(missing, dead)
        course.loop.after(_LOOK_S, lambda: self._look_for_missing(waited_s + _LOOK_S))

    def _not_here(self, missing: Sequence[Node], dead: Sequence[Node]) -> LaunchError:
        """Why the run does not begin."""
        if self._endpoint.joining is not None and not dead:
            return LaunchError(
                f"{len(missing)} of {len(self.nodes)} hosts have not joined within {self._endpoint.patience_s:.0f} s",
                where="--on join",
                fix="type the line shown above on each; -o wait=8h waits longer, and with --nodes MIN:MAX the run"
                " begins without the others",
            )
        why = "ended before it said a word" if dead else f"did not report within {self._endpoint.patience_s:.0f} s"
        return LaunchError(
            f"the agent {why}",
            where="host " + ", ".join(node.name for node in dead or missing),
            fix=f"see what it printed above, and that it can open a connection to {self.address}",
        )

    def _begin_without(self, missing: Sequence[Node], waited_s: float) -> bool:
        """Begin with the nodes that are here, if they are enough; the others may come later."""
        present, least = len(self.present()), self._course.job.least_nodes
        if present < (least or len(self.nodes)):
            if waited_s > self._endpoint.patience_s or all(node.agent.poll() is not None for node in missing):
                names = ", ".join(node.name for node in missing)
                self._course.result = LaunchError(
                    f"only {present} of at least {least} nodes are here",
                    where=f"not here: {names}",
                    fix="see what their agents printed above",
                )
            return False
        self._goes_without = True
        for node in missing:
            self.call_again(node)
        return True

    # They go, and are called back.

    def may_come_back(self, node: Node) -> bool:
        """Whether an agent that is not heard may call again."""
        return not node.is_beside and self._course.job.head_timeout_s > 0

    def _lose_connection(self, node: Node, channel: Channel) -> None:
        """A connection has ended; its agent may be gone, or call again at once, or be out of reach for a while."""
        session, until = node.channel, time.monotonic() + _COMES_BACK_S
        if session is None or session.channel is not channel:
            return
        session.detach()
        if not self.may_come_back(node):
            self._lose(node, failures.why_connection_ended(node.agent, channel))
            return

        def look() -> None:
            if node.channel is not session or session.channel is not None:
                return
            if node.agent.poll() is not None or time.monotonic() > until:
                self._lose(node, failures.why_connection_ended(node.agent, channel))
            else:
                self._course.loop.after(_COMES_BACK_S / 40, look)

        if not channel.is_cut:  # else how long it is silent says what is to be done
            look()

    def _lose(self, node: Node, why: str) -> None:
        if node.channel is not None:
            node.channel.close()
        node.channel = None
        if not node.leaving and not self._course.is_over:
            self._owner.lose(node, why)

    def give_up(self, node: Node, why: str) -> None:
        """Count an agent as lost that is connected still. Should it go on one day, it finds nobody, and ends all."""
        if node.channel is not None:
            self._lose(node, why)

    def give_up_silent(self, node: Node, seconds: float) -> None:
        """Count an agent as lost that has given no sign of life for so long."""
        if node.channel is not None:
            held_s = node.held_s if time.monotonic() - node.heard < seconds else 0.0
            self.give_up(node, failures.why_silent(seconds, node.channel.channel, held_s))

    def turn_away(self, node: Node, why: str) -> None:
        """Let go of a host that has come by itself and is of no use, and tell it why."""
        self.tell([node], Leave(code=None, why=why))
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
        course, generation = self._course, self._course.generation

        def call() -> None:
            if course.is_over or generation != course.generation or node.channel is not None:
                return
            if node.agent.poll() is not None:
                node.agent.wait()
                node.agent = self._begin(node.number)
            self.call_again(node, min(2 * pause_s, _LONGEST_CALL_AGAIN_S))

        course.loop.after(pause_s, call)

    def begin_missing_again(self) -> None:
        """Start another agent in place of each that is gone."""
        for node in self.nodes:
            if node.channel is None:
                self._begin_again(node)

    def _begin_again(self, node: Node) -> None:
        node.agent.kill()
        node.agent.wait()
        node.agent = self._begin(node.number)

    def bring_back(self, node: Node) -> None:
        """Start the agent of a node that is away: at once, for its host may be well, and now and then after that."""
        self._begin_again(node)
        self.call_again(node)

    def call_back(self, node: Node, on_failure: Callable[[], None]) -> None:
        """Try to start the agent of a host that is away; `on_failure` is called where it does not come in time."""
        self.bring_back(node)
        self._expect_back(node, self._course.generation, on_failure, time.monotonic() + self._endpoint.patience_s)

    def _expect_back(self, node: Node, generation: int, on_failure: Callable[[], None], until: float) -> None:
        course = self._course
        if node.channel is not None or course.is_over or generation != course.generation:
            return
        if time.monotonic() > until:
            on_failure()
            return
        course.loop.after(_LOOK_S, lambda: self._expect_back(node, generation, on_failure, until))

    def say_goodbye(self) -> None:
        """Have every agent end what is left, and see that it has gone."""
        for node in self.nodes:
            node.leaving = True
        result = self._course.result
        code = result.exit_code if isinstance(result, ManyhostsError) else result
        self.tell_all(Leave(code=1 if code is None else code))
        if self._acceptor is not None:
            self._acceptor.close()  # whoever comes now finds nobody, and leaves
        for channel in self._unheard:
            channel.close()
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
                    # Its connection shows when it has gone. To close it while words of the agent are unread would have
                    # the system take back what it was told last, and it would not know that all is over.
                    node.channel.wait_for_end(until - time.monotonic())
                node.channel.close()
        self._course.loop.close()
