"""A head's entrance and an agent's line, in one loop, for tests; and a relay between them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hosts_at_head import Display

from manyhosts.control import tls
from manyhosts.control.agent import head_connection
from manyhosts.control.agent.head_connection import HeadConnection
from manyhosts.control.handshake import Hello, Welcome
from manyhosts.control.head.agent_starter import Acceptor
from manyhosts.control.head.agents import Agents
from manyhosts.control.head.state import ExternalAgent, HeadState, Node
from manyhosts.control.job import Job
from manyhosts.control.loop import Channel, Loop, Message
from manyhosts.control.proof import PROTOCOL, Caller
from manyhosts.control.protocol import FromAgent, ListenForHost

TOKEN = "0123456789abcdef" * 2
FACTS = {"session": "s", "heard": 0, "host": "h", "address": "10.1.2.3", "process": 1, "cores": 1, "gpus": 0}


class Scene:
    """A head's entrance and an agent's line, in one loop; what each of them hears."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.admitted, self.ended = loop, list[tuple[Channel, Hello]](), list[bool]()
        self.at_head, self.at_agent = list[Any](), list[Message]()
        self.words: list[str] = []
        self.ssh: int | None = None
        """How what has started the agent has ended, if it has."""
        self.reported: list[str] = []
        """What the head was told of its agent."""
        job = Job(program="t.py", folder=Path("/w"), run_dir=Path("/w/run"), head_timeout_s=60.0)
        self.state = HeadState(job, Display(), loop)
        self.acceptor = Acceptor(loop, ("127.0.0.1", 0), TOKEN, self.admit)
        self.line: HeadConnection | None = None
        self.agents: Agents | None = None

    def take_over(self) -> Agents:
        """From now on agents are admitted as by a head: to one node, called far."""
        self.agents = Agents(self.state, ["far"], lambda *_: FarAgent(self), "127.0.0.1", Owner(self))
        self.agents._starter.close()
        self.acceptor._admit = self.agents._admit
        return self.agents

    def admit(self, channel: Channel, hello: Hello, protocol: int) -> None:
        self.admitted.append((channel, hello))
        channel.say(Welcome(heard=0, node=0))
        channel.on_message = self.at_head.append

    def call(self, place: str = "", token: str = TOKEN) -> None:
        place = place or self.acceptor.place
        self.line = HeadConnection(
            self.loop,
            head_connection.connect(place),
            head=place,
            token=token,
            hello=Hello(node=0, **FACTS | {"session": "own"}),  # type: ignore[arg-type]
            on_message=self.at_agent.append,
            on_end=lambda: self.ended.append(True),
            show=self.words.append,
        )

    def train(self, relay: Relay | None = None) -> tuple[Node, HeadConnection]:
        """The agent calls, through `relay` where there is one, and both have spoken, as in a run that continues."""
        agents = self.take_over()
        self.call(relay.address if relay else "")
        self.run(lambda: agents.nodes[0].channel is not None)
        session = agents.nodes[0].channel
        assert self.line is not None
        assert session is not None
        self.line.patience_s = 60
        session.say(ListenForHost())
        self.run(lambda: bool(self.at_agent))
        return agents.nodes[0], self.line

    def run(self, until: Callable[[], bool], limit_s: float = 20.0) -> None:
        over: list[bool] = []
        cancel = self.loop.after(limit_s, lambda: over.append(True))
        self.loop.run(lambda: bool(over) or until())
        cancel()
        assert not over, "waited in vain"


class Owner:
    """What a head does when its agent comes, speaks and goes: it notes that."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def welcome(self, node: Node) -> None:
        self.scene.reported.append("welcome")

    def receive(self, node: Node, message: FromAgent) -> None:
        self.scene.at_head.append(message)

    def lose(self, node: Node, why: str) -> None:
        self.scene.reported.append(why)


class FarAgent(ExternalAgent):
    """One that ssh has started."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def poll(self) -> int | None:
        return self.scene.ssh


@contextmanager
def one_loop() -> Iterator[Scene]:
    """A scene that leaves nothing open."""
    loop = Loop()
    made = Scene(loop)
    yield made
    if made.line is not None:
        made.line.close()
    if made.agents is not None and (session := made.agents.nodes[0].channel) is not None:
        session.close()
    for channel, _ in made.admitted:
        channel.close()
    made.acceptor.close()
    loop.close()


class Relay:
    """Passes bytes on between an agent and the head, and keeps them. `change` may make others of them."""

    def __init__(self, loop: Loop, place: str) -> None:
        self.loop, self.place, self.kept = loop, place, bytearray()
        self.calls = 0
        self.change: Callable[[bytes], bytes] = lambda words: words
        self.listening = socket.create_server(("127.0.0.1", 0))
        loop.watch(self.listening, self.accept)
        self.open: list[socket.socket] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listening.getsockname()[1]}"

    def accept(self) -> None:
        self.calls += 1
        one, other = self.listening.accept()[0], head_connection.connect(self.place)
        self.open += [one, other]
        self.loop.watch(one, lambda: self.carry(one, other))
        self.loop.watch(other, lambda: self.carry(other, one))

    def carry(self, one: socket.socket, other: socket.socket) -> None:
        try:
            words = one.recv(1 << 16)
            self.kept += words
            other.sendall(self.change(words) if words else b"")
        except OSError:
            words = b""
        if not words:
            for each in (one, other):
                self.loop.unwatch(each)
                each.close()

    def end_connections(self) -> None:
        for each in self.open:
            self.loop.unwatch(each)
            each.close()
        self.open.clear()

    def close(self) -> None:
        self.end_connections()
        self.loop.unwatch(self.listening)
        self.listening.close()


def say(scene: Scene, hello: dict[str, Any], token: str = TOKEN, own: int = PROTOCOL) -> list[str]:
    """Prove to know `token`, say `hello`, and return what comes back until the head hangs up."""
    caller, heard, ended = Caller(token, own), list[str](), list[bool]()

    def answer(message: Message) -> None:
        heard.append(message["message"])
        if message["message"] == "prove":
            proof = caller.proof_for(message, channel.fingerprint) or "0" * 64
            channel.send("hello", **{"proof": proof, **hello})

    channel = Channel(
        scene.loop, head_connection.connect(scene.acceptor.place), answer, lambda: ended.append(True), tls=tls.call()
    )
    channel.send("call", **caller.call())
    scene.run(lambda: bool(ended or scene.admitted))
    channel.close()
    return heard
