"""Head and agents prove to each other who they are, and nobody between them reads, changes or says a word."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from manyhosts.control import tls
from manyhosts.control.acceptor import Acceptor
from manyhosts.control.agent import head_connection
from manyhosts.control.agent.enrolling import enrol
from manyhosts.control.agent.head_connection import HeadConnection
from manyhosts.control.enrolment import Enrolment
from manyhosts.control.head.agents import Agents
from manyhosts.control.loop import Channel, Loop, Message
from manyhosts.control.proof import PROTOCOL, Answerer, Caller
from manyhosts.control.protocol import MemberSays

TOKEN = "0123456789abcdef" * 2
HOST = {"host": "h", "address": "10.1.2.3", "process": 1, "cores": 1, "gpus": 0}
FACTS = {"session": "s", "heard": 0, **HOST}
SECRET = "the-value-of-an-env-option"


class Scene:
    """A head's entrance and an agent's line, in one loop; what each of them hears."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.admitted, self.ended = loop, list[tuple[Channel, Message]](), list[bool]()
        self.at_head, self.at_agent = list[Any](), list[Message]()
        self.words: list[str] = []
        self.course = SimpleNamespace(
            loop=loop,
            running=set(),
            result=None,
            is_over=False,
            can_be_taken_over=False,
            job=SimpleNamespace(head_timeout_s=60.0, ports=""),
            told=[],
        )
        self.acceptor = Acceptor(loop, ("127.0.0.1", 0), TOKEN, self.admit)
        self.line: HeadConnection | None = None
        self.agents: Agents | None = None

    def take_over(self) -> Agents:
        """From now on agents are admitted as by a head: to one node, called far."""
        owner = SimpleNamespace(
            welcome=lambda node: self.course.told.append("welcome"),
            hear=lambda node, message: self.at_head.append(message),
            lose=lambda node, why: self.course.told.append(why),
        )
        agent = SimpleNamespace(poll=lambda: None)
        self.agents = Agents(
            cast(Any, self.course), ["far"], lambda *_: cast(Any, agent), "127.0.0.1", cast(Any, owner)
        )
        self.agents._acceptor.close()
        self.acceptor._admit = self.agents._admit
        return self.agents

    def admit(self, channel: Channel, hello: Message, protocol: int) -> None:
        self.admitted.append((channel, hello))
        channel.send("welcome", heard=0)
        channel.on_message = self.at_head.append

    def call(self, place: str = "", token: str = TOKEN) -> None:
        place = place or self.acceptor.place
        self.line = HeadConnection(
            self.loop,
            head_connection.connect(place),
            head=place,
            token=token,
            hello={"node": 0, **HOST},
            on_message=self.at_agent.append,
            on_end=lambda: self.ended.append(True),
            tell=self.words.append,
        )

    def run(self, until: Callable[[], bool], limit_s: float = 20.0) -> None:
        over: list[bool] = []
        cancel = self.loop.after(limit_s, lambda: over.append(True))
        self.loop.run(lambda: bool(over) or until())
        cancel()
        assert not over, "waited in vain"


@pytest.fixture
def scene() -> Iterator[Scene]:
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

    def close(self) -> None:
        for each in [*self.open, self.listening]:
            self.loop.unwatch(each)
            each.close()


def test_recorded_conversation_shows_neither_secret_nor_settings_nor_commands(scene: Scene) -> None:
    relay = Relay(scene.loop, scene.acceptor.place)
    scene.call(relay.address)
    scene.run(lambda: bool(scene.admitted))
    assert scene.line is not None
    scene.admitted[0][0].send("prepare", environment={"PASSWORD": SECRET}, command={"program": "secret_train.py"})
    scene.line.send("output", lines=["a printed line"] * 10_000)
    scene.run(lambda: bool(scene.at_agent and scene.at_head))
    assert scene.at_agent[0]["environment"] == {"PASSWORD": SECRET}
    assert scene.at_head[-1]["lines"] == ["a printed line"] * 10_000
    assert scene.admitted[0][1]["address"] == "10.1.2.3"
    for word in (TOKEN, SECRET, "secret_train", "printed", "prepare", "10.1.2.3", "hello"):
        assert word.encode() not in relay.kept
    relay.close()


def test_agent_of_an_engine_is_given_the_secret_when_the_engine_has_brought_the_hash_of_its_key(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not before; and who records what they say, and knows what the engine has brought, learns nothing."""
    known = Enrolment()
    acceptor = Acceptor(scene.loop, ("127.0.0.1", 0), TOKEN, scene.admit, identity=known.identity, enrols=known.admits)
    relay, given = Relay(scene.loop, acceptor.place), list[str]()
    agent = threading.Thread(target=lambda: given.append(enrol(relay.address, known.certificate)))
    agent.start()
    scene.run(lambda: relay.calls > 1)
    assert given == [], "nobody has said that it belongs to the run"
    announced = capsys.readouterr().out
    assert [known.hear(line) for line in ("ready\n", f"x{announced}", announced.strip(), announced)] == [0, 0, 1, 1]
    scene.run(lambda: not agent.is_alive())
    assert given == [TOKEN]
    assert not known.admits(announced.split()[1]), "what others may read lets nobody in"
    assert not known.admits(None)
    for word in (TOKEN, "enrol", announced.split()[1]):
        assert word.encode() not in relay.kept
    relay.close()
    acceptor.close()


def test_changed_byte_ends_the_connection_and_the_agent_calls_again(scene: Scene) -> None:
    relay = Relay(scene.loop, scene.acceptor.place)
    relay.change = lambda words: words if relay.calls > 1 or len(relay.kept) < 900 else words[:-1] + b"\x5a"
    scene.call(relay.address)
    scene.run(lambda: bool(scene.admitted))
    assert relay.calls == 2
    relay.close()


@pytest.mark.parametrize("token", ["f" * 32, "", "ü"], ids=["another", "empty", "not_ascii"])
def test_fake_head_is_told_nothing_and_not_obeyed(token: str, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has TLS and knows the protocol, but not the secret; and sends a command as the head would."""
    monkeypatch.setattr(head_connection, "_PATIENCE_S", 0.0)
    identity, heard = tls.Identity(), list[Message]()
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(message: Message) -> None:
        heard.append(message)
        channel.send("prepare", command={"program": "/bin/sh"})
        channel.send("prove", **(Answerer(token, identity.fingerprint).prove(message) or {}))
        channel.send("prepare", command={"program": "/bin/sh"})

    scene.call(f"127.0.0.1:{listening.getsockname()[1]}")
    channel = Channel(scene.loop, listening.accept()[0], answer, lambda: None, tls=identity.answer())
    scene.run(lambda: bool(scene.ended))
    assert [sorted(message) for message in heard] == [["message", "nonce", "protocol"]]
    assert scene.at_agent == []
    assert "does not know the secret of this run" in scene.words[0]
    channel.close()
    listening.close()


def test_one_in_the_middle_with_its_own_certificate_is_believed_by_neither_side(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes every word on, decrypted and encrypted again."""
    monkeypatch.setattr(head_connection, "_PATIENCE_S", 0.0)
    identity, listening = tls.Identity(), socket.create_server(("127.0.0.1", 0))
    heard: list[Message] = []

    def pass_on(message: Message, to: Channel) -> None:
        heard.append(dict(message))
        to.send(message.pop("message"), **message)

    scene.call(f"127.0.0.1:{listening.getsockname()[1]}")
    to_agent = Channel(
        scene.loop, listening.accept()[0], lambda m: pass_on(m, to_head), lambda: None, tls=identity.answer()
    )
    to_head = Channel(
        scene.loop,
        head_connection.connect(scene.acceptor.place),
        lambda m: pass_on(m, to_agent),
        lambda: None,
        tls=tls.call(),
    )
    scene.run(lambda: bool(scene.ended))
    assert [message["message"] for message in heard] == ["call", "prove"]
    assert scene.admitted == []
    to_agent.close()
    to_head.close()
    listening.close()


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


@pytest.mark.parametrize(
    "changed",
    [{"proof": "0" * 64}, {"proof": None}, {"proof": "ü"}, {"proof": "\ud800"}, {"node": "0"}, {"cores": []}],
    ids=str,
)
def test_whoever_does_not_prove_it_or_says_nonsense_is_hung_up_on(changed: dict[str, Any], scene: Scene) -> None:
    assert say(scene, {"node": 0, **FACTS, **changed}) == ["prove"]
    assert say(scene, {"node": 0, **FACTS}, token="f" * 32) == ["prove"]
    assert scene.admitted == []


def test_one_who_speaks_another_version_is_told_of_with_both(scene: Scene) -> None:
    """And one for a host that there is not, or that was given up, is sent away."""
    scene.take_over()
    assert say(scene, {"node": 7, **FACTS}) == ["prove", "leave"]
    assert say(scene, {"node": 0, **FACTS, "heard": 3}) == ["prove", "leave"]
    say(scene, {"node": 0, **FACTS}, own=PROTOCOL + 1)
    told = str(scene.course.result)
    assert f"host far speaks version {PROTOCOL + 1}" in told
    assert f"this head version {PROTOCOL}" in told
    assert scene.course.told == []


def test_messages_come_once_and_in_order_though_the_connection_breaks_again_and_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a byte that is changed, and by an end without a word; a second agent has no chance meanwhile."""
    monkeypatch.setattr(head_connection, "_PAUSE_S", 0.001)
    agents, relay, chance = scene.take_over(), Relay(scene.loop, scene.acceptor.place), random.Random(7)
    scene.call(relay.address)
    scene.run(lambda: agents.nodes[0].channel is not None)
    session = agents.nodes[0].channel
    assert scene.line is not None
    assert session is not None
    scene.line.patience_s = 60

    def disturb(words: bytes) -> bytes:
        if relay.calls > 12 or chance.random() > 0.1:
            return words
        if chance.random() < 0.5:
            raise ConnectionError
        return words[:-1] + bytes([words[-1] ^ 1])

    relay.change = disturb
    count = 300

    def said(number: int) -> MemberSays:
        return MemberSays(member=1, kind="done", fields={"number": number, "x": "x" * 500})

    for number in range(count):
        scene.loop.after(number / 200, lambda number=number: scene.line.say(said(number)))
        scene.loop.after(number / 200, lambda number=number: session.send("tell", number=number))

    def arrived() -> tuple[list[int], list[int]]:
        reports = [message.fields["number"] for message in scene.at_head if isinstance(message, MemberSays)]
        return reports, [message["number"] for message in scene.at_agent if message["message"] == "tell"]

    scene.run(lambda: all(len(numbers) == count for numbers in arrived()), 60)
    assert arrived() == (list(range(count)), list(range(count)))
    assert relay.calls > 5
    assert say(scene, {"node": 0, **FACTS}) == ["prove", "leave"], "another agent for the same host"
    scene.run(lambda: scene.line.backlog_bytes == session.backlog_bytes == 0)
    assert scene.course.told == ["welcome"]
    relay.close()


def test_agent_that_was_given_up_finds_its_place_taken_and_ends(scene: Scene) -> None:
    agents = scene.take_over()
    scene.call()
    scene.run(lambda: agents.nodes[0].channel is not None)
    session = agents.nodes[0].channel
    assert scene.line is not None
    assert session is not None
    scene.line.patience_s = 60
    session.send("tell")
    scene.run(lambda: bool(scene.at_agent))
    agents.give_up(agents.nodes[0], "it was silent")
    scene.run(lambda: bool(scene.ended))
    assert scene.course.told == ["welcome", "it was silent"]


def test_agent_that_is_not_heard_again_is_lost_and_gives_up_too(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_connection, "_REFUSED_S", 0.2)
    agents, relay = scene.take_over(), Relay(scene.loop, scene.acceptor.place)
    scene.call(relay.address)
    scene.run(lambda: agents.nodes[0].channel is not None)
    assert scene.line is not None
    assert agents.nodes[0].channel is not None
    scene.line.patience_s = 60
    agents.nodes[0].channel.send("tell")
    scene.run(lambda: bool(scene.at_agent))
    relay.close()
    scene.run(lambda: bool(scene.ended and scene.course.told[1:]))
    assert scene.course.told == ["welcome", "its agent is gone"]
