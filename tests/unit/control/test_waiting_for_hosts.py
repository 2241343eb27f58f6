"""A host that is silent is waited for where its workers may be well: others get on with them, or nobody is heard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hosts_at_head import Clock, Hosts, begun

from manyhosts.control.head import hang_monitor
from manyhosts.control.head.hang_monitor import HangMonitor
from manyhosts.control.job import Job


class Scene:
    """Three hosts with a worker each; the last is not heard any more. Time continues when a test says so."""

    def __init__(self, clock: Clock, head_timeout_s: float, hang_timeout_s: float | None) -> None:
        self.clock, self.hosts = clock, Hosts(clock, 3)
        job = Job(
            program="t.py",
            folder=Path("/w"),
            run_dir=Path("/w/run"),
            nodes=3,
            head_timeout_s=head_timeout_s,
            hang_timeout_s=hang_timeout_s,
        )
        self.state, group = begun(job, clock, self.hosts)
        self.hang_monitor = HangMonitor(
            self.state,
            self.hosts,
            group,
            on_silence=lambda *_: None,
            on_diagnosis=lambda _: None,
            gone=list,
        )

    @property
    def warned(self) -> list[str]:
        return self.state.display.said

    def pass_by(self, seconds: float, *, alive: tuple[int, ...], steps: tuple[int, ...] = ()) -> bool:
        """Time goes by; returns whether the last host is waited for then."""
        for number in alive:
            self.hosts.nodes[number].heard = self.clock.now + seconds
        self.clock.now += seconds  # and nobody looks by himself
        for number in steps:
            self.hang_monitor.take_report(number, "step", {"step": int(self.clock.now)})
        silent = self.hosts.nodes[2]
        return self.hang_monitor.waits_for(silent, self.clock.now - silent.heard)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    def make(head_timeout_s: float = 300.0, hang_timeout_s: float | None = None) -> Scene:
        clock = Clock()
        monkeypatch.setattr(hang_monitor, "time", clock)
        return Scene(clock, head_timeout_s, hang_timeout_s)

    return make


def test_host_is_waited_for_while_the_others_get_on_and_not_when_they_stand_still(scene: Callable[..., Scene]) -> None:
    here = scene()
    assert here.pass_by(12, alive=(0, 1), steps=(0, 1))
    assert here.pass_by(60, alive=(0, 1), steps=(0, 1))
    assert not here.pass_by(8, alive=(0, 1)), "they wait for it"
    assert len(here.warned) == 1
    assert "host n2 is silent, and workers of other hosts make steps; it is waited for until 300 s" in here.warned[0]


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


def test_hosts_that_were_cut_off_together_need_not_be_back_at_once(scene: Callable[..., Scene]) -> None:
    here = scene()
    assert here.pass_by(21, alive=())
    assert here.pass_by(1, alive=(0,)), "the first of them is only just back"
    assert here.pass_by(8, alive=(0, 1))
    assert not here.pass_by(2, alive=(0, 1)), "this one is gone by itself"


@pytest.mark.parametrize(("head_timeout_s", "hang_timeout_s"), [(20.0, None), (300.0, 20.0), (20.0, 0.0)])
def test_user_says_how_long(head_timeout_s: float, hang_timeout_s: float | None, scene: Callable[..., Scene]) -> None:
    here = scene(head_timeout_s, hang_timeout_s)
    assert here.pass_by(15, alive=())
    assert not here.pass_by(10, alive=())
