"""Somebody who speaks TLS, and nothing else that is right, to either side of a conversation: it ends, at any stage."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from head_and_agent import TOKEN, Scene, one_loop

from manyhosts.control import tls
from manyhosts.control.agent import head_client, head_connection
from manyhosts.control.agent.head_client import HeadClient
from manyhosts.control.handshake import Call, Prove
from manyhosts.control.loop import Channel, Message
from manyhosts.control.proof import Caller
from manyhosts.doctor import channel as doctor_channel
from manyhosts.errors import LaunchError

pytestmark = pytest.mark.timeout(60)

PATIENCE_S = 20
GOODBYE_BEFORE_KEYS = b"\x15\x03\x03\x00\x02\x01\x00"
"""An alert as TLS has it, close_notify, not encrypted."""
LINE = b'{"message": "nothing", "that": ["is", "known"]}\n'


class Peer:
    """One who has OpenSSL, on a thread of its own, and leaves the connection open until the other side ends it."""

    def __init__(self, act: Callable[[Peer], None], *, answers: bool) -> None:
        self.answers, self.act = answers, act
        self.piece = 1 << 20
        """Bytes that go together."""
        self.over = threading.Event()

    def speak(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        context = tls.Identity()._context if self.answers else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if not self.answers:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.socket, self.came, self.going = connection, ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.came, self.going, server_side=self.answers)
        with connection, contextlib.suppress(ConnectionError, ssl.SSLError):
            self.act(self)
            while connection.recv(1 << 16):
                pass
        self.over.set()

    def start(self, connection: socket.socket) -> None:
        threading.Thread(target=self.speak, args=(connection,), daemon=True).start()

    def carry(self) -> None:
        words = self.going.read()
        for begin in range(0, len(words), self.piece):
            self.socket.sendall(words[begin : begin + self.piece])

    def shake_hands(self) -> None:
        while True:
            try:
                self.tls.do_handshake()
                self.carry()
                return
            except ssl.SSLWantReadError:
                self.carry()
                self.came.write(self.socket.recv(1 << 16))

    def say(self, words: bytes, record: int = 1 << 14) -> None:
        for begin in range(0, len(words), record):
            self.tls.write(words[begin : begin + record])
        self.carry()

    def say_goodbye(self) -> None:
        with contextlib.suppress(ssl.SSLError):
            self.tls.unwrap()  # sends close_notify; the other side's is not waited for
        self.carry()


def goodbye_alone(peer: Peer) -> None:
    peer.shake_hands()
    peer.say_goodbye()


def goodbye_before_there_are_keys(peer: Peer) -> None:
    peer.socket.sendall(GOODBYE_BEFORE_KEYS)


def half_a_handshake(peer: Peer) -> None:
    with contextlib.suppress(ssl.SSLWantReadError):
        peer.tls.do_handshake()
    peer.socket.sendall((peer.going.read() or b"\x16\x03\x03\x02\x00")[:50])
    peer.socket.shutdown(socket.SHUT_WR)


def goodbye_in_the_handshake(peer: Peer) -> None:
    with contextlib.suppress(ssl.SSLWantReadError):
        peer.tls.do_handshake()
    peer.carry()
    peer.socket.sendall(GOODBYE_BEFORE_KEYS)


def half_a_line(peer: Peer) -> None:
    peer.shake_hands()
    peer.say(LINE[:20])
    peer.say_goodbye()


def a_line_and_a_half(peer: Peer) -> None:
    peer.shake_hands()
    peer.say(LINE + LINE[:20])
    peer.say_goodbye()


def records_of_one_byte(peer: Peer) -> None:
    peer.shake_hands()
    peer.say(LINE[:-1], record=1)
    peer.say_goodbye()


def byte_by_byte(peer: Peer) -> None:
    peer.piece = 1
    peer.shake_hands()
    peer.say(LINE[:-1])
    peer.say_goodbye()


def goodbye_and_yet_more(peer: Peer) -> None:
    peer.shake_hands()
    peer.tls.write(LINE)
    behind = peer.going.read()
    peer.say_goodbye()
    peer.socket.sendall(behind + bytes(300))


def no_tls_behind_the_handshake(peer: Peer) -> None:
    peer.shake_hands()
    peer.socket.sendall(LINE * 40)


def half_a_record(peer: Peer) -> None:
    peer.shake_hands()
    peer.tls.write(LINE)
    peer.socket.sendall(peer.going.read()[:-5])
    peer.socket.shutdown(socket.SHUT_WR)


def another_handshake(peer: Peer) -> None:
    """What renegotiation would look like; TLS 1.3 has none."""
    peer.shake_hands()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    second = context.wrap_bio(ssl.MemoryBIO(), peer.going)
    with contextlib.suppress(ssl.SSLWantReadError):
        second.do_handshake()
    peer.carry()


ACTS = [
    *(goodbye_alone, goodbye_before_there_are_keys, half_a_handshake, goodbye_in_the_handshake, half_a_line),
    *(a_line_and_a_half, records_of_one_byte, byte_by_byte, goodbye_and_yet_more, no_tls_behind_the_handshake),
    *(half_a_record, another_handshake),
]
each_act = pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with one_loop() as made:
        yield made


@pytest.fixture
def called() -> Iterator[Callable[[Peer], str]]:
    """Has a peer wait for one call; says where."""
    with contextlib.ExitStack() as stack:

        def wait(peer: Peer) -> str:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=lambda: peer.speak(listening.accept()[0]), daemon=True).start()
            return f"127.0.0.1:{listening.getsockname()[1]}"

        yield wait


@each_act
def test_head_goes_on(act: Callable[[Peer], None], scene: Scene) -> None:
    peer = Peer(act, answers=False)
    peer.start(head_connection.connect(scene.acceptor.place))
    scene.run(peer.over.is_set)
    scene.call(scene.acceptor.place)
    scene.run(lambda: bool(scene.admitted))


@each_act
def test_agent_ends(
    act: Callable[[Peer], None],
    scene: Scene,
    called: Callable[[Peer], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_connection, "_PATIENCE_S", 0.0)
    scene.call(called(Peer(act, answers=True)))
    scene.run(lambda: bool(scene.ended))
    assert scene.at_agent == []


def ask(client: HeadClient) -> None:
    client.fingerprint()
    client.say(Call(**Caller(TOKEN).call()))
    client.receive(Prove)


@each_act
def test_host_that_would_join_says_so(act: Callable[[Peer], None], called: Callable[[Peer], str]) -> None:
    place = called(Peer(act, answers=True))
    with head_connection.connect(place) as connection, pytest.raises(LaunchError, match="does not answer as the head"):
        ask(HeadClient(connection, place))


@each_act
def test_doctor_and_its_hosts_end(act: Callable[[Peer], None], called: Callable[[Peer], str]) -> None:
    with head_connection.connect(called(Peer(act, answers=True))) as connection, contextlib.suppress(OSError):
        doctor_channel.call(connection, TOKEN, PATIENCE_S)
        pytest.fail("it was believed")
    ours, theirs = socket.socketpair()
    Peer(act, answers=False).start(theirs)
    with ours, contextlib.suppress(OSError):
        assert doctor_channel.answer(ours, tls.Identity(), TOKEN, PATIENCE_S) is None


def test_what_was_said_before_the_goodbye_is_heard(scene: Scene, called: Callable[[Peer], str]) -> None:
    def act(peer: Peer) -> None:
        peer.shake_hands()
        peer.say(b'{"message": "prove", "protocol": 1, "nonce": "", "proof": ""}\n' * 2)
        peer.say_goodbye()

    heard, ended = list[Message](), list[bool]()
    connection = head_connection.connect(called(Peer(act, answers=True)))
    Channel(scene.loop, connection, heard.append, lambda: ended.append(True), tls=tls.call())
    scene.run(lambda: bool(ended))
    assert [message["message"] for message in heard] == ["prove"] * 2
    place = called(Peer(act, answers=True))
    with head_connection.connect(place) as connection:
        client = HeadClient(connection, place)
        client.fingerprint()
        assert [client.receive(Prove).protocol, client.receive(Prove).protocol] == [1, 1]


def test_one_who_says_a_little_now_and_then_is_not_listened_to_for_ever(
    called: Callable[[Peer], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_client, "ANSWER_S", 0.5)

    def act(peer: Peer) -> None:
        peer.shake_hands()
        while True:  # until the other side is gone
            peer.say(b"x")
            time.sleep(0.05)

    place = called(Peer(act, answers=True))
    with head_connection.connect(place) as connection, pytest.raises(LaunchError, match="no more than a part"):
        HeadClient(connection, place).receive(Prove)
    with head_connection.connect(called(Peer(act, answers=True))) as connection, pytest.raises(TimeoutError):
        doctor_channel.call(connection, TOKEN, 0.5)


def test_one_who_says_too_much_before_a_proof_is_not_heard_out(called: Callable[[Peer], str]) -> None:
    def act(peer: Peer) -> None:
        peer.shake_hands()
        while True:
            peer.say(b"x" * 1000)

    place = called(Peer(act, answers=True))
    with head_connection.connect(place) as connection, pytest.raises(LaunchError, match="more than a head does"):
        HeadClient(connection, place).receive(Prove)


def test_message_in_records_of_one_byte_is_understood(scene: Scene) -> None:
    """Whoever knows the secret may cut its words as it likes."""
    caller, reported = Caller(TOKEN), list[str]()

    def act(peer: Peer) -> None:
        peer.shake_hands()
        peer.say(json.dumps({"message": "call", **caller.call()}).encode() + b"\n", record=1)
        while b"\n" not in "".join(reported).encode():
            with contextlib.suppress(ssl.SSLWantReadError):
                reported.append(peer.tls.read().decode())
                continue
            peer.came.write(peer.socket.recv(1 << 16))
        peer.say_goodbye()

    peer = Peer(act, answers=False)
    peer.start(head_connection.connect(scene.acceptor.place))
    scene.run(peer.over.is_set)
    assert json.loads("".join(reported))["message"] == "prove"
