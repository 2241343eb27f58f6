"""Head and agent find back to each other when their connection ends, and know when that is in vain."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest
from head_and_agent import FACTS, Relay, Scene, one_loop, say

from manyhosts.control.agent import head_connection
from manyhosts.control.head import agents
from manyhosts.control.head.state import is_connected
from manyhosts.control.protocol import MemberSays, ToWorker


@pytest.fixture
def scene() -> Iterator[Scene]:
    with one_loop() as made:
        yield made


def test_messages_come_once_and_in_order_though_the_connection_breaks_again_and_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a byte that is changed, and by an end without a word; a second agent has no chance meanwhile."""
    monkeypatch.setattr(head_connection, "_PAUSE_S", 0.001)
    relay, chance = Relay(scene.loop, scene.acceptor.place), random.Random(7)
    node, line = scene.train(relay)
    session = node.channel
    assert session is not None

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
        scene.loop.after(number / 200, lambda number=number: line.say(said(number)))
        scene.loop.after(number / 200, lambda number=number: session.say(ToWorker(member=number, content={})))

    def arrived() -> tuple[list[int], list[int]]:
        reports = [message.fields["number"] for message in scene.at_head if isinstance(message, MemberSays)]
        return reports, [message["member"] for message in scene.at_agent if message["message"] == "tell"]

    scene.run(lambda: all(len(numbers) == count for numbers in arrived()), 60)
    assert arrived() == (list(range(count)), list(range(count)))
    assert relay.calls > 5
    assert say(scene, {"node": 0, **FACTS}) == ["prove", "leave"], "another agent for the same host"
    scene.run(lambda: line.backlog_bytes == session.backlog_bytes == 0)
    assert scene.reported == ["welcome"]
    relay.close()


def test_message_that_is_missing_between_others_is_asked_for_again_and_none_after_it_is_obeyed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_connection, "_PAUSE_S", 0.001)
    relay = Relay(scene.loop, scene.acceptor.place)
    node, line = scene.train(relay)
    session, calls = node.channel, relay.calls
    assert session is not None
    assert session.channel is not None
    to_agent = session.channel.send_words
    monkeypatch.setattr(session.channel, "send_words", lambda words: b'"x1"' in words or to_agent(words))
    for number in range(4):
        session.say(ToWorker(member=number, content={"x": f"x{number}"}))

    def arrived() -> list[int]:
        return [message["member"] for message in scene.at_agent if message["message"] == "tell"]

    scene.run(lambda: len(arrived()) == 4)
    assert arrived() == [0, 1, 2, 3]
    assert relay.calls == calls + 1
    scene.run(lambda: line.backlog_bytes == session.backlog_bytes == 0)
    relay.close()


def test_agent_that_has_lost_its_head_makes_one_call_at_a_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that came at once would end each other; the time in which the head had to prove itself begins no second."""
    asked, over, after = list[float](), list[Callable[[], None]](), scene.loop.after

    def note(seconds: float, act: Callable[[], None]) -> Callable[[], None]:
        asked.append(seconds)
        if seconds == head_connection._PROOF_S:
            over.append(act)
        return after(seconds, act)

    monkeypatch.setattr(scene.loop, "after", note)
    relay = Relay(scene.loop, scene.acceptor.place)
    node, line = scene.train(relay)
    relay.end_connections()
    scene.run(lambda: line.is_away)
    calls = len(asked)
    over[0]()
    assert len(asked) == calls, "the head is being called already"
    scene.run(lambda: is_connected(node) and not line.is_away)
    assert scene.reported == ["welcome"]
    relay.close()


@pytest.mark.parametrize("silent_s", [0.0, 20.0], ids=["killed", "cut_off"])
def test_agent_whose_ssh_has_ended_is_lost_at_once_but_not_where_the_way_to_it_was_broken(
    silent_s: float, scene: Scene
) -> None:
    relay = Relay(scene.loop, scene.acceptor.place)
    node, line = scene.train(relay)
    node.heard, scene.ssh = time.monotonic() - silent_s, 255
    relay.end_connections()
    scene.run(lambda: not is_connected(node))
    if silent_s:
        scene.run(lambda: is_connected(node) and not line.is_away)
        assert (scene.reported, node.agent.poll()) == (["welcome"], None), "it has outlived what had started it"
    else:
        assert scene.reported[1:] == ["its agent is gone: it was killed, or ssh has lost the host (exit code 255)"]
    relay.close()


def test_agent_whose_way_is_being_opened_again_is_waited_for_until_that_has_been_done_for_a_while(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While what had started it says nothing of its end, silence alone decides; from then on it has so long to call."""
    monkeypatch.setattr(agents, "_FINDS_BACK_S", 0.3)
    relay = Relay(scene.loop, scene.acceptor.place)
    node, line = scene.train(relay)
    line.close()  # it cannot call
    node.heard = time.monotonic() - 20.0
    relay.end_connections()
    scene.run(lambda: not is_connected(node))
    over: list[bool] = []
    scene.loop.after(3 * agents._FINDS_BACK_S, lambda: over.append(True))
    scene.run(lambda: bool(over))
    assert scene.reported == ["welcome"], "it could not call yet"
    scene.ssh = 255
    scene.run(lambda: bool(scene.reported[1:]))
    assert scene.reported[1:] == ["its agent is gone: it was killed, or ssh has lost the host (exit code 255)"]
    relay.close()


def test_goodbye_to_an_agent_that_ssh_had_given_up_lasts_until_it_has_heard_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tunnel may have been counted as cut when it came back: that its ssh has ended is seen only at the end."""
    monkeypatch.setattr(agents, "_GOODBYE_LIMIT_S", 0.2)
    node, _ = scene.train()
    scene.ssh, session, waited = 255, node.channel, list[float]()
    assert scene.agents is not None
    assert session is not None
    wait = session.wait_for_end
    monkeypatch.setattr(session, "wait_for_end", lambda seconds: (waited.append(seconds), wait(seconds)))
    monkeypatch.setattr(scene.loop, "close", lambda: None)  # the scene does
    scene.agents.say_goodbye()
    assert len(waited) == 1
    scene.run(lambda: [said["message"] for said in scene.at_agent][-1] == "leave")


def test_agent_that_was_given_up_finds_its_place_taken_and_ends(scene: Scene) -> None:
    node, _ = scene.train()
    assert scene.agents is not None
    scene.agents.give_up(node, "it was silent")
    scene.run(lambda: bool(scene.ended))
    assert scene.reported == ["welcome", "it was silent"]


def test_agent_that_is_not_heard_again_is_lost_and_gives_up_too(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_connection, "_REFUSED_S", 0.2)
    relay = Relay(scene.loop, scene.acceptor.place)
    scene.train(relay)
    relay.close()
    scene.run(lambda: bool(scene.ended and scene.reported[1:]))
    assert scene.reported == ["welcome", "its agent is gone"]
