"""Somebody who listens where the head of a run should: agents tell it nothing, and do nothing for it."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from launching import environment

from manyhosts.control import enrolment, tls
from manyhosts.control.proof import PROTOCOL, Answerer, Caller

pytestmark = pytest.mark.multiprocess

TOKEN = "5e" * 16
HOST = "manyhosts.control.agent"

Message = dict[str, Any]
Say = Callable[[Mapping[str, Any]], None]


class FakeHead:
    """It has TLS and speaks the protocol, but does not know the secret. Each call is answered in the next way."""

    def __init__(self, ways: list[Callable[[FakeHead, Message, Say], None]]) -> None:
        self.identity, self.heard, self.ways = tls.Identity(), list[Message](), ways
        self.calls = 0
        self.over = threading.Event()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            for way in self.ways:
                connection = self.listening.accept()[0]
                self.calls += 1
                with connection, contextlib.suppress(OSError, ssl.SSLError):
                    self.talk(connection, way)
        self.listening.close()
        self.over.set()

    def talk(self, connection: socket.socket, way: Callable[[FakeHead, Message, Say], None]) -> None:
        connection.settimeout(20)
        own, came = self.identity.answer(), bytearray()

        def say(message: Mapping[str, Any]) -> None:
            own.send(json.dumps(message).encode() + b"\n")
            connection.sendall(own.take())

        while chunk := connection.recv(1 << 16):
            came += own.receive(chunk)
            connection.sendall(own.take())
            while b"\n" in came:
                line, _, rest = bytes(came).partition(b"\n")
                came = bytearray(rest)
                self.heard.append(json.loads(line))
                way(self, self.heard[-1], say)


def everything_that_a_head_says(program: Path) -> list[Message]:
    """Commands, all of which would run `program` or tell something of this host."""
    command = {"kind": "executable", "program": str(program), "arguments": [], "folder": str(program.parent)}
    prepare = {"message": "prepare", "command": command, "preload": [], "environment": {}, "workers": 1}
    prepare |= {"run_dir": str(program.parent / "run"), "tell_condition": True, "listen": True, "n": 1}
    workers = [{"rank": 0, "local_rank": 0, "member": 0, "environment": {}}]
    return [
        {"message": "welcome", "heard": 0, "node": 0},
        prepare,
        {"message": "open_store", "generation": 0, "address": "127.0.0.1", "n": 2},
        {"message": "start", "generation": 0, "workers": workers, "n": 3},
        {"message": "look", "round": 1, "n": 4},
        {"message": "secret", "token": "0" * 32},
        {"message": "offer"},
    ]


Proof = Callable[[FakeHead, Message], Mapping[str, Any] | None]


def of_another_secret(head: FakeHead, message: Message) -> Mapping[str, Any] | None:
    return Answerer("f" * 32, head.identity.fingerprint).prove(message)


def what_it_was_told(head: FakeHead, message: Message) -> Mapping[str, Any]:
    return {"protocol": message["protocol"], "nonce": message["nonce"], "proof": message["nonce"] * 2}


def as_a_caller(head: FakeHead, message: Message) -> Mapping[str, Any]:
    return {**Caller("").call(), "proof": "0" * 64}


def of_another_certificate(head: FakeHead, message: Message) -> Mapping[str, Any] | None:
    """What the true head has said to somebody in between, with this very nonce."""
    return Answerer(TOKEN, tls.Identity().fingerprint).prove(message)


def of_another_conversation(head: FakeHead, message: Message) -> Mapping[str, Any] | None:
    """What the true head has said to an agent before, with this very certificate."""
    return Answerer(TOKEN, head.identity.fingerprint).prove({"protocol": PROTOCOL, "nonce": "a" * 32})


def of_an_older_version(head: FakeHead, message: Message) -> Mapping[str, Any]:
    return {**(Answerer(TOKEN, head.identity.fingerprint).prove(message) or {}), "protocol": 1}


def of_no_sense(head: FakeHead, message: Message) -> Mapping[str, Any]:
    return {"protocol": True, "nonce": [], "proof": None}


PROOFS: list[Proof] = [
    of_another_secret,
    what_it_was_told,
    as_a_caller,
    of_another_certificate,
    of_another_conversation,
    of_an_older_version,
    of_no_sense,
]


def ways(program: Path) -> list[Callable[[FakeHead, Message, Say], None]]:
    """With no proof and with each of these, followed by commands."""
    reported = everything_that_a_head_says(program)

    def answer(head: FakeHead, message: Message, say: Say, proof: Proof | None = None) -> None:
        for each in [] if proof is None else [{"message": "prove", **(proof(head, message) or {})}]:
            say(each)
        for each in reported:
            say(each)

    return [answer, *(partial(answer, proof=proof) for proof in PROOFS)]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Path]:
    """What a fake head wants to be run: it leaves a file behind."""
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    path.chmod(0o755)
    yield path
    assert sorted(each.name for each in tmp_path.iterdir()) == ["program"], "nothing has run, and no folder was made"


def start(module: str, *words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-P", "-m", f"{HOST}.{module}", *words]
    return subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_agent_tells_a_fake_head_nothing_and_obeys_none_of_its_commands(program: Path) -> None:
    head = FakeHead(ways(program))
    agent = start("agent", "--head", head.place, "--node", "0")
    _, err = agent.communicate(f"{TOKEN}\n", timeout=120)
    assert (agent.returncode, head.calls) == (3, len(head.ways)), err
    assert err.count("does not know the secret of this run; nothing was sent") == 1
    assert [sorted(message) for message in head.heard] == [["message", "nonce", "protocol"]] * head.calls


def test_agent_of_an_engine_says_no_word_to_a_head_with_another_certificate(program: Path) -> None:
    head, true = FakeHead(ways(program)[:1]), tls.Identity()
    agent = start("node", "--head", head.place, "--certificate", true.fingerprint.hex(), "--nodes", "0")
    out, err = agent.communicate(timeout=120)
    assert (agent.returncode, head.calls, head.heard) == (3, 1, []), err
    assert "is not the head of this run: it shows another certificate; nothing was sent" in err
    assert enrolment.Enrolment(true).read(out), "what it has printed for its head is the hash of a key"
