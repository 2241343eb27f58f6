"""What a head writes down, and what another one makes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from manyhosts.control.head import takeover
from manyhosts.control.head.group_state import GroupState, Member
from manyhosts.control.head.takeover import HeadCheckpoint, Record, fingerprint, left_for
from manyhosts.control.job import Job
from manyhosts.control.loop import Channel
from manyhosts.control.protocol import ModulesPreloaded, Start, StopRequested, ToWorker, Trouble
from manyhosts.control.session import Session
from manyhosts.errors import ConfigError
from manyhosts.records import run_directory


class Wire:
    """The connection of two sessions, which may be cut; what is on the way is then lost."""

    def __init__(self, other: Callable[[dict[str, Any]], None]) -> None:
        self.other, self.on_message = other, lambda message: None
        self.way: list[dict[str, Any]] = []

    def send(self, kind: str, /, **fields: Any) -> None:
        self.way.append({"message": kind, **fields})

    def send_words(self, words: bytes) -> None:
        self.way.append(json.loads(words))

    def arrive(self) -> None:
        way, self.way = self.way, []
        for message in way:
            self.other(message)

    def close(self) -> None:
        pass


def join(one: Session, other: Session) -> tuple[Wire, Wire]:
    """Connect two sessions. Returns what each of them writes to."""
    wires = Wire(lambda message: wires[1].on_message(message)), Wire(lambda message: wires[0].on_message(message))
    one.attach(cast(Channel, wires[0]), other.heard)
    other.attach(cast(Channel, wires[1]), one.heard)
    return wires


def test_another_session_goes_on_from_what_was_written_and_every_message_counts_once() -> None:
    timers: list[Callable[[], None]] = []
    at_agent, at_head = list[str](), list[str]()

    def head() -> Session:
        return Session(
            lambda _, then: timers.append(then), lambda message: at_head.append(message["message"]), holds_back=True
        )

    first = head()
    agent = Session(lambda _, then: timers.append(then), lambda message: at_agent.append(message["message"]))
    wires = join(first, agent)
    first.say(Start(generation=0, workers=[]))
    assert (wires[0].way, first.holds_some_back) == ([], True), "nothing leaves before it is written down"
    first.release()
    wires[0].arrive()
    for said in (StopRequested(signal=15), ModulesPreloaded(modules=["lost on the way"])):
        agent.say(said)
    wires[1].way.pop()
    wires[1].arrive()
    first.say(ToWorker(member=0, content={}))
    written = json.loads(json.dumps(first.to_dict()))
    agent.say(Trouble(text="never heard by the first", where="", early=False))

    second = head()
    second.restore(written)
    assert [second.has_sent(number) for number in (2, 3)] == [True, False], "agents that have heard more know better"
    wires = join(second, agent)
    for wire in wires:
        wire.arrive()
    assert at_agent == ["start", "tell"]
    assert at_head == ["asked", "modules_preloaded", "trouble"]
    for then in timers:
        then()
    for wire in wires:
        wire.arrive()
    assert (second.backlog_bytes, agent.backlog_bytes) == (0, 0)


def test_roster_is_the_same_after_it_was_written_down() -> None:
    group_state = GroupState()
    for number in range(3):
        group_state.add(Member(number=number, node=number, local_rank=0, rank=number, enrolled=True))
    group_state.lose(1, "its host is gone")
    group_state.add(Member(number=3, node=1, local_rank=0, rank=1, late=True))
    for number, step in ((0, 7), (2, 7), (3, -1)):
        group_state.ask(number, step, group=0)
    again = GroupState.of(json.loads(json.dumps(group_state.to_dict())))
    assert again == group_state
    assert [member.number for member in again.form()] == [member.number for member in group_state.form()]
    assert again == group_state


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(program="train.py", folder=tmp_path, run_dir=tmp_path / "run", hosts=("a", "b"), nodes=2)


def left(job: Job, **changes: Any) -> HeadCheckpoint:
    """What the head of `job` writes."""
    reported = HeadCheckpoint(
        token="5e" * 16,
        start="start",
        address="127.0.0.1",
        port=1,
        asked=fingerprint(job, "5e" * 16),
        unasked=True,
        launcher={},
        state={},
    )
    found = replace(reported, **changes)
    job.run_dir.mkdir(exist_ok=True)
    Record(job.run_dir, lambda: found).write()
    return found


def test_the_same_command_finds_what_was_left_and_another_one_is_refused(job: Job) -> None:
    assert left_for(job) is None
    written = left(job)
    shown_otherwise = replace(
        job, show=(0,), run_dir_is_chosen=False, environment={run_directory.UNASKED: "1"}, words=("run", "train.py")
    )
    assert left_for(job) == left_for(shown_otherwise) == written
    for other in (
        replace(job, arguments=("--lr", "1")),
        replace(job, hosts=("a", "c")),
        replace(job, restarts=1),
        replace(job, environment={"PASSWORD": "other"}),
    ):
        with pytest.raises(ConfigError, match="started by another command"):
            left_for(other)
    assert takeover.start_of(job.run_dir) == "start"


def test_what_is_not_to_be_trusted_is_refused_and_what_is_too_old_is_gone(job: Job) -> None:
    path = job.run_dir / run_directory.HEAD
    for changes, words in (
        ({"manyhosts": "0.0.0"}, "was written by manyhosts 0.0.0"),
        ({"format": 99}, "was written by manyhosts"),
    ):
        left(job, **changes)
        with pytest.raises(ConfigError, match=words):
            left_for(job)
    left(job)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        left_for(job)
    path.write_text("{")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="cannot be read"):
        left_for(job)
    left(job)
    long_ago = path.stat().st_mtime - job.head_timeout_s - 3600
    os.utime(path, (long_ago, long_ago))
    assert left_for(job) is None
    assert list(job.run_dir.iterdir()) == []


def test_record_that_cannot_be_written_leaves_none_that_is_older(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    left(job)
    record = Record(job.run_dir, lambda: left(job))
    record.write()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        record.write()
    assert list(job.run_dir.iterdir()) == []
