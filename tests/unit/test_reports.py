"""A worker's reports: one line each, never waiting, never raising."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhosts.cluster.reports import Reporter, on_report


class Agent:
    """Listens as an agent does, and reads when it is asked to."""

    def __init__(self, address: str) -> None:
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(address)
        self.listening.listen()
        self.listening.settimeout(120)

    def read_all(self) -> list[dict[str, Any]]:
        connection, _ = self.listening.accept()
        with connection, connection.makefile() as lines:
            return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half a one


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders have names too long for a Unix socket
        yield str(Path(folder, "agent"))


@pytest.fixture
def agent(address: str) -> Iterator[Agent]:
    made = Agent(address)
    yield made
    made.listening.close()


def test_process_that_no_agent_started_has_no_reporter() -> None:
    assert Reporter.from_environment({}) is None


def test_reports_arrive_with_kind_fields_and_sender(agent: Agent, address: str) -> None:
    reporter = Reporter.from_environment({"MANYHOSTS_AGENT": address, "LOCAL_RANK": "3"})
    assert reporter is not None
    reporter.send("say", text="hello\nthere")
    reporter.send("progress", kind_of_day="good", loss=0.5)
    reporter.close()
    assert agent.read_all() == [
        {"worker": 3, "kind": "say", "fields": {"text": "hello\nthere"}},
        {"worker": 3, "kind": "progress", "fields": {"kind_of_day": "good", "loss": 0.5}},
    ]


def test_steps_are_thinned_out_and_words_are_not(agent: Agent, address: str) -> None:
    reporter = Reporter(address, 0)
    for step in range(200):
        reporter.send("step", step=step)
        reporter.send("say", text=step)
    reporter.close()
    heard = agent.read_all()
    assert len([each for each in heard if each["kind"] == "say"]) == 200
    assert len([each for each in heard if each["kind"] == "step"]) < 20


def test_agent_that_does_not_read_keeps_nobody_waiting(agent: Agent, address: str) -> None:
    reporter = Reporter(address, 0)
    for _ in range(5000):  # 5 MB: far more than the system and the reporter hold
        reporter.send("say", text="x" * 1000)
    reporter.close(timeout_s=0)
    assert 0 < len(agent.read_all()) < 5000


def test_agent_that_is_gone_or_was_never_there_harms_nobody(agent: Agent, address: str) -> None:
    Reporter(address + "-not", 0).send("say", text="nobody hears")
    reporter = Reporter(address, 0)
    agent.listening.close()
    for _ in range(5):
        reporter.send("say", text="nobody hears")
    reporter.close()
    reporter.close()


def test_value_that_is_no_json_is_told_as_text(agent: Agent, address: str) -> None:
    reporter = Reporter(address, 0)
    reporter.send("say", text=Path("a/b"))
    reporter.close()
    assert agent.read_all()[0]["fields"] == {"text": "a/b"}


def test_process_forked_from_a_worker_says_nothing(agent: Agent, address: str) -> None:
    reporter = Reporter(address, 0)
    child = os.fork()
    if child == 0:
        reporter.send("say", text="from the loader")
        os._exit(0)
    os.waitpid(child, 0)
    reporter.close()
    assert agent.read_all() == []


def test_whoever_waits_for_a_kind_of_report_is_called_once(address: str, agent: Agent) -> None:
    called: list[str] = []
    on_report("trainer of this test", lambda: called.append("reported"))
    reporter = Reporter(address, 0)
    reporter.send("say", text="something else")
    assert called == []
    reporter.send("trainer of this test")
    reporter.send("trainer of this test")
    assert called == ["reported"]
    reporter.close()
