"""Head and agents prove to each other who they are, and nobody between them reads, changes or says a word."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from head_and_agent import FACTS, TOKEN, Owner, Relay, Scene, one_loop, say

from manyhosts.control import tls
from manyhosts.control.agent import head_connection
from manyhosts.control.agent.node import enrol
from manyhosts.control.enrolment import Enrolment
from manyhosts.control.head.agent_starter import Acceptor
from manyhosts.control.head.checks import host_findings
from manyhosts.control.loop import Channel, Message
from manyhosts.control.proof import PROTOCOL, Answerer, Caller
from manyhosts.control.protocol import Condition, Output

SECRET = "the-value-of-an-env-option"


@pytest.fixture
def scene() -> Iterator[Scene]:
    with one_loop() as made:
        yield made


def test_recorded_conversation_shows_neither_secret_nor_settings_nor_commands(scene: Scene) -> None:
    relay = Relay(scene.loop, scene.acceptor.place)
    scene.call(relay.address)
    scene.run(lambda: bool(scene.admitted))
    assert scene.line is not None
    scene.admitted[0][0].send("prepare", environment={"PASSWORD": SECRET}, command={"program": "secret_train.py"})
    scene.line.say(Output(rank=0, generation=0, member=0, stream="out", lines=["a printed line"] * 10_000))
    scene.run(lambda: bool(scene.at_agent and scene.at_head))
    assert scene.at_agent[0]["environment"] == {"PASSWORD": SECRET}
    assert scene.at_head[-1]["lines"] == ["a printed line"] * 10_000
    assert scene.admitted[0][1].address == "10.1.2.3"
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
    assert [known.read(line) for line in ("ready\n", f"x{announced}", announced.strip(), announced)] == [0, 0, 1, 1]
    scene.run(lambda: not agent.is_alive())
    assert given == [TOKEN]
    assert not known.admits(announced.split()[1]), "what others may read lets nobody in"
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


@pytest.mark.parametrize(
    "changed",
    [
        *({"proof": "0" * 64}, {"proof": None}, {"proof": "ü"}, {"proof": "\ud800"}, {"node": "0"}, {"cores": []}),
        *({"heard": True}, {"marks": [1]}, {"mark": None}),
    ],
    ids=str,
)
def test_whoever_does_not_prove_it_or_says_nonsense_is_hung_up_on(changed: dict[str, Any], scene: Scene) -> None:
    assert say(scene, {"node": 0, **FACTS, **changed}) == ["prove"]
    assert say(scene, {"node": 0, **FACTS}, token="f" * 32) == ["prove"]
    assert scene.admitted == []


def test_proof_of_one_conversation_proves_nothing_in_another() -> None:
    """Whoever has read all of the first, and says it again word for word."""
    caller, first, second = Caller(TOKEN), Answerer(TOKEN, b"own"), Answerer(TOKEN, b"own")
    shown = caller.proof_for(first.prove(caller.call()) or {}, b"own")
    assert first.is_proven_by(shown)
    assert second.prove(caller.call()) is not None
    assert not second.is_proven_by(shown)


@pytest.mark.parametrize("address", ["\x1b[2J10.0.0.1", "", "a b", "x" * 300])
def test_host_whose_address_is_none_is_named_and_its_words_are_not_obeyed(address: str, scene: Scene) -> None:
    scene.take_over()
    assert say(scene, {"node": 0, **FACTS, "address": address}) == ["prove", "leave"]
    reported = str(scene.state.result)
    assert "the agent of host far gives" in reported
    assert "as its address, which is none" in reported
    assert "\x1b" not in reported


@pytest.mark.parametrize("more", [{"gpus": 10**9}, {"gpus": -1}, {"cores": 10**9}])
def test_host_that_has_a_billion_gpus_gets_no_billion_workers(more: dict[str, int], scene: Scene) -> None:
    scene.take_over()
    assert say(scene, {"node": 0, **FACTS, **more}) == ["prove", "leave"]
    assert "the agent of host far says that it has " in str(scene.state.result)


def test_host_whose_message_lacks_what_the_head_looks_for_is_named(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, line = scene.train()
    monkeypatch.setattr(Owner, "receive", lambda self, node, message: host_findings(node.name, message.reported))
    line.say(Condition(reported={}, port=0))
    scene.run(lambda: scene.state.result is not None)
    assert "('condition') of the agent of host far could not be followed: it lacks 'disks'" in str(scene.state.result)


def test_one_who_speaks_another_version_is_told_of_with_both(scene: Scene) -> None:
    """And one for a host that there is not, or that was given up, is sent away."""
    scene.take_over()
    assert say(scene, {"node": 7, **FACTS}) == ["prove", "leave"]
    assert say(scene, {"node": 0, **FACTS, "heard": 3}) == ["prove", "leave"]
    say(scene, {"node": 0, **FACTS}, own=PROTOCOL + 1)
    reported = str(scene.state.result)
    assert f"host far speaks version {PROTOCOL + 1}" in reported
    assert f"this head version {PROTOCOL}" in reported
    assert scene.reported == []
