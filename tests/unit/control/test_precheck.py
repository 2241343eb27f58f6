"""The look before a run: what ends it, what is only told, and that it keeps nobody waiting."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hosts_at_head import Clock, Display, Hosts

from manyhosts.control.agent import host_state
from manyhosts.control.head import checks
from manyhosts.control.head.checks import Precheck
from manyhosts.control.head.state import HeadState
from manyhosts.control.job import Job
from manyhosts.control.protocol import Condition, ConnectionsTried, TryConnections
from manyhosts.errors import CommunicationError, LaunchError

GIB = 1 << 30


class Scene:
    """A look at `count` hosts that are asked one after the other."""

    def __init__(self, count: int = 2, *, ways: bool = True, check: bool = True) -> None:
        job = Job(program="t.py", folder=Path("/p"), run_dir=Path("/p/run"), nodes=count, check=check)
        self.display = Display()
        self.state = HeadState(job, self.display)
        self.agents = Hosts(Clock(), count)
        self.look = Precheck(self.state, self.agents, ways=ways)
        self.requests = [self.look.requests(node) for node in self.agents.nodes]

    @property
    def begun(self) -> bool:
        return self.look.is_over and self.state.result is None

    def begin(self) -> None:
        self.look.begin()

    def tell(self, number: int, *, ahead_s: float = 0, **changes: Any) -> None:
        reported = {**host_state.gather("/tmp", {}), **well(), **changes}
        reported["time_s"] = time.time() + ahead_s
        self.look.receive(self.agents.nodes[number], Condition(reported=reported, port=4000 + number))

    def answer(self, number: int, *answers: str) -> None:
        self.look.receive(self.agents.nodes[number], ConnectionsTried(answers=list(answers)))


def well() -> dict[str, Any]:
    disk = {"path": "/p/run", "free": 100 * GIB, "total": 100 * GIB, "files_left": None, "writable": True}
    return {
        "memory": {"total": 64 * GIB, "available": 60 * GIB},
        "disks": {"run directory": disk},
        "shared_memory": None,
        "descriptors": {"limit": 4096, "most": 4096},
    }


def full(free: int) -> dict[str, Any]:
    return {"run directory": {**well()["disks"]["run directory"], "free": free}}


def test_workers_start_when_all_have_told_and_reached_each_other() -> None:
    scene = Scene()
    assert scene.requests == [{"tell_condition": True, "listen": True}] * 2
    scene.tell(0)
    scene.begin()
    assert not scene.begun
    scene.tell(1)
    question = TryConnections(places=[["10.0.0.0", 4000], ["10.0.0.1", 4001]])
    assert scene.agents.reported == [(0, question), (1, question)]
    scene.answer(0, "", "")
    assert not scene.begun
    scene.answer(1, "", "")
    assert (scene.begun, scene.display.said, scene.state.result) == (True, [], None)


def test_where_the_ways_are_known_nobody_knocks() -> None:
    scene = Scene(ways=False)
    assert scene.requests[0] == {"tell_condition": True, "listen": False}
    scene.tell(0)
    scene.tell(1)
    scene.begin()
    assert (scene.begun, scene.agents.reported) == (True, [])


def test_error_ends_the_run_with_one_sentence_that_counts_the_others() -> None:
    scene = Scene(ways=False)
    scene.begin()
    scene.tell(0, disks=full(1 << 20))
    scene.tell(1, disks=full(1 << 20))
    error = scene.state.result
    assert isinstance(error, LaunchError)
    assert error.what == (
        "the disk of host n0 is nearly full: 1.0 MB are left for the run directory"
        " (and 1 more: `manyhosts doctor` lists all, with the same --hosts, --on or --cluster)"
    )
    assert (scene.begun, error.where, bool(error.fix)) == (False, "host n0, /p/run", True)


def test_warnings_are_one_line_each_and_the_run_begins() -> None:
    scene = Scene(ways=False)
    scene.tell(0, disks=full(GIB // 2))
    scene.tell(1, ahead_s=3600)
    scene.begin()
    assert scene.begun
    one, two = scene.display.said
    assert one.startswith("manyhosts: warning: the disk of host n0 is nearly full: 536.9 MB are left")
    assert two.startswith("manyhosts: warning: the clock of host n1 is 1 h 00 min ahead of this machine's")
    assert "\n" not in one + two


def test_notes_are_for_the_doctor() -> None:
    scene = Scene(1)
    scene.tell(0, environment={"RANK": "0"})
    scene.begin()
    assert (scene.begun, scene.display.said) == (True, [])


def test_hosts_that_do_not_reach_each_other_end_the_run() -> None:
    scene = Scene()
    scene.begin()
    scene.tell(0)
    scene.tell(1)
    scene.answer(0, "", "No route to host")
    scene.answer(1, "", "")
    error = scene.state.result
    assert isinstance(error, CommunicationError)
    assert error.what == "host n0 cannot open a connection to host n1 at 10.0.0.1 port 4001: No route to host"
    assert not scene.begun


def test_host_that_does_not_tell_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_LIMIT_S", 0.01)
    scene = Scene()
    scene.tell(0)
    scene.begin()
    scene.state.loop.run(until=lambda: scene.begun)
    scene.tell(1, disks=full(0))  # too late to matter
    assert (scene.begun, scene.state.result) == (True, None)


def test_nothing_is_asked_where_no_look_is_wanted() -> None:
    scene = Scene(check=False)
    assert scene.requests[0] == {"tell_condition": False, "listen": False}
    scene.begin()
    assert scene.begun
