"""A host that is silent is waited for where its workers may be well: others get on with them, or nobody is heard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from manyhosts.control.head import hang_monitor
from manyhosts.control.head.agents import Agents
from manyhosts.control.head.hang_monitor import HangMonitor
from manyhosts.control.head.placement import Node
from manyhosts.control.head.state import Course
from manyhosts.control.head.workers import WorkerGroup
from manyhosts.control.job import Job
from manyhosts.control.loop import Loop


class Scene:
    """Three hosts with a worker each; the last is not heard any more. Time goes on when a test says so."""

    def __init__(self, head_timeout_s: float, hang_timeout_s: float | None) -> None:
        self.now = 1000.0
        self.warned: list[str] = []
        job = Job(
            program="t.py",
            folder=Path("/w"),
            run_dir=Path("/w/run"),
            nodes=3,
            head_timeout_s=head_timeout_s,
            hang_timeout_s=hang_timeout_s,
        )
        loop = SimpleNamespace(after=lambda *_: None)
        display = SimpleNamespace(warn=self.warned.append)
        course = Course(job, cast(Any, display), loop=cast(Loop, loop), running={0, 1, 2})
        self.nodes = [Node(number, f"n{number}", cast(Any, None), cast(Any, object())) for number in range(3)]
        for node in self.nodes:
            node.heard = self.now
        members = {number: SimpleNamespace(node=number) for number in range(3)}
        worker_group = SimpleNamespace(regroup=SimpleNamespace(group_state=SimpleNamespace(members=members)))
        agents = SimpleNamespace(nodes=self.nodes)
        self.hang_monitor = HangMonitor(
            course,
            cast(Agents, agents),
            cast(WorkerGroup, worker_group),
            on_silence=lambda *_: None,
            on_verdict=lambda _: None,
            gone=list,
        )

    def pass_by(self, seconds: float, *, alive: tuple[int, ...], steps: tuple[int, ...] = ()) -> bool:
        """Time goes by; returns whether the last host is waited for then."""
        for number in alive:
            self.nodes[number].heard = self.now + seconds
        self.now += seconds
        for number in steps:
            self.hang_monitor.take_report(number, "step", {"step": int(self.now)})
        return self.hang_monitor.waits_for(self.nodes[2], self.now - self.nodes[2].heard)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    def make(head_timeout_s: float = 300.0, hang_timeout_s: float | None = None) -> Scene:
        made = Scene(head_timeout_s, hang_timeout_s)
        monkeypatch.setattr(hang_monitor, "time", SimpleNamespace(monotonic=lambda: made.now))
        return made

    return make


def test_host_is_waited_for_while_the_others_get_on_and_not_when_they_stand_still(scene: Callable[..., Scene]) -> None:
    here = scene()
    assert here.pass_by(12, alive=(0, 1), steps=(0, 1))
    assert here.pass_by(60, alive=(0, 1), steps=(0, 1))
    assert not here.pass_by(8, alive=(0, 1)), "they wait for it"
    assert len(here.warned) == 1
    assert "host n2 is silent, and the workers of others get on; it is waited for until 300 s" in here.warned[0]


def test_steps_from_before_and_steps_of_its_own_are_no_sign(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.hang_monitor.take_report(0, "step", {"step": 1})
    assert not here.pass_by(12, alive=(0, 1), steps=(2,))


def test_host_is_waited_for_where_nobody_is_heard_but_not_for_ever(scene: Callable[..., Scene]) -> None:
    here = scene()
    assert here.pass_by(12, alive=())
    assert here.pass_by(280, alive=())
    assert not here.pass_by(10, alive=())
    assert "no host is heard from" in here.warned[0]


@pytest.mark.parametrize(("head_timeout_s", "hang_timeout_s"), [(20.0, None), (300.0, 20.0), (20.0, 0.0)])
def test_user_says_how_long(head_timeout_s: float, hang_timeout_s: float | None, scene: Callable[..., Scene]) -> None:
    here = scene(head_timeout_s, hang_timeout_s)
    assert here.pass_by(15, alive=())
    assert not here.pass_by(10, alive=())
