"""When a run counts as hung: by reports, signs of life and looks, on a clock that the tests turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts_at_head import Clock, Hosts, begun

from manyhosts.control.head import hang_monitor
from manyhosts.control.head.diagnosis import Diagnosis
from manyhosts.control.head.group_state import Member
from manyhosts.control.head.hang_monitor import PATIENCE_S, HangMonitor
from manyhosts.control.head.missing_hosts import GIVEN_UP_S, LEAST_GIVEN_UP_S, MOST_GIVEN_UP_S
from manyhosts.control.head.state import Node
from manyhosts.control.job import Job
from manyhosts.control.protocol import FromHead, InspectWorkers, SeenWorker, WorkerStates

SPIN = 'Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 12 in spin\n'
REDUCE = (
    'Current thread 0x1 (most recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 9 in '
    'all_reduce\n  File "/home/me/train.py", line 38 in main\n'
)


class Scene:
    """Two workers on two hosts, whose agents give signs of life and answer looks, unless a test says otherwise.

    A third host of the run is away.
    """

    def __init__(self, clock: Clock, hang_timeout_s: float | None) -> None:
        self.clock, self.hosts = clock, Hosts(clock, 3)
        self.hosts.lose(2)
        job = Job(
            program="t.py",
            folder=Path("/w"),
            run_dir=Path("/w/run"),
            nodes=3,
            least_nodes=1,
            hang_timeout_s=hang_timeout_s,
        )
        self.state, self.group = begun(job, clock, self.hosts)
        self.hosts.answer = self.answer
        self.looks = 0
        self.gone: list[str] = []
        self.stacks = {0: REDUCE, 1: REDUCE}
        self.cpu_s = 0.0
        self.silent: list[tuple[str, float]] = []
        self.verdicts: list[tuple[float, Diagnosis]] = []
        self.hang_monitor = HangMonitor(
            self.state,
            self.hosts,
            self.group,
            on_silence=lambda node, seconds: self.silent.append((node.name, seconds)),
            on_diagnosis=lambda diagnosis: self.verdicts.append((clock.now, diagnosis)),
            gone=lambda: self.gone,
        )

    @property
    def reported(self) -> list[str]:
        return self.state.display.said

    def answer(self, node: Node, message: FromHead) -> None:
        if not isinstance(message, InspectWorkers):
            return
        self.looks += node.number == 0
        number = node.number
        seen = SeenWorker(
            member=number,
            rank=number,
            generation=0,
            step=None,
            state="S",
            cpu_s=self.cpu_s,
            busy=0.0,
            stack=self.stacks[number],
            loader="",
        )
        self.hang_monitor.take_sights(node, WorkerStates(round=message.round, workers=[seen]))

    def report(self, number: int, kind: str, **fields: Any) -> None:
        self.hang_monitor.take_report(number, kind, fields)

    def both_step(self, step: int) -> None:
        for number in (0, 1):
            self.report(number, "step", step=step)

    def pass_by(self, seconds: float, *, alive: tuple[int, ...] = (0, 1)) -> None:
        for _ in range(round(seconds / 0.25)):
            for number in alive:
                self.hosts.nodes[number].heard = self.clock.now + 0.25
            self.clock.jump(0.25)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    clock = Clock()
    monkeypatch.setattr(hang_monitor, "time", clock)
    return lambda hang_timeout_s=10.0: Scene(clock, hang_timeout_s)


def test_worker_that_reports_no_more_steps_is_judged_when_the_time_is_over(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.both_step(7)
    here.stacks[1] = SPIN
    begin = here.clock.now
    here.pass_by(9)
    assert here.verdicts == []
    here.pass_by(2)
    [(when, diagnosis)] = here.verdicts
    assert (diagnosis.guilty, when - begin) == ((1,), pytest.approx(10, abs=0.5))
    assert "for 10 s (after step 7)" in diagnosis.what


def test_steps_and_signs_of_other_work_are_progress(scene: Callable[..., Scene]) -> None:
    here = scene()
    for step in range(5):
        here.both_step(step)
        here.pass_by(8)
        here.report(0, "busy")
        here.report(1, "busy")
        here.pass_by(8)
    assert here.verdicts == []


def test_start_is_no_hang_however_long_one_computes(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.stacks[1] = SPIN
    here.pass_by(100)
    assert here.verdicts == []


def test_worker_that_has_ended_is_not_waited_for_as_one_that_may_come(scene: Callable[..., Scene]) -> None:
    here = scene(None)
    here.pass_by(100)
    assert here.verdicts == []
    here.gone = ["rank 2 on host c"]
    here.pass_by(50)
    [(_, diagnosis)] = here.verdicts
    assert diagnosis.what.startswith(
        "rank 2 on host c has come to its end, but all 2 workers wait for it in all_reduce"
    )
    assert "if rank == 0" in diagnosis.fix


def test_worker_that_computes_after_another_has_ended_is_left_alone(scene: Callable[..., Scene]) -> None:
    here = scene(None)
    here.gone, here.stacks[1] = ["rank 2 on host c"], SPIN
    here.pass_by(500)
    assert here.verdicts == []


def test_dead_lock_before_the_first_step_is_found_where_the_user_wants_to_know(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.pass_by(15)
    [(_, diagnosis)] = here.verdicts
    assert diagnosis.what.startswith("all 2 workers wait in all_reduce")


def test_workers_that_compute_between_two_looks_are_in_no_dead_lock(scene: Callable[..., Scene]) -> None:
    here = scene()
    for _ in range(20):
        here.cpu_s += 2
        here.pass_by(4)
    assert here.verdicts == []


def test_end_of_training_ends_the_watch(scene: Callable[..., Scene]) -> None:
    here = scene(None)
    for number in (0, 1):
        here.report(number, "trainer")
        here.report(number, "step", step=3)
        here.report(number, "rest")
        here.report(number, "busy")
    here.pass_by(2 * PATIENCE_S)
    assert (here.verdicts, here.looks) == ([], 0)


@pytest.mark.parametrize(("tells", "verdicts"), [(True, 1), (False, 0)])
def test_without_a_word_of_the_user_only_a_trainer_is_watched(
    scene: Callable[..., Scene], tells: bool, verdicts: int
) -> None:
    here = scene(None)
    for number in (0, 1):
        if tells:
            here.report(number, "trainer")
        here.report(number, "step", step=3)
    here.pass_by(PATIENCE_S - 2)
    assert here.verdicts == []
    here.pass_by(5)
    assert len(here.verdicts) == verdicts


def test_zero_means_that_nobody_minds(scene: Callable[..., Scene]) -> None:
    here = scene(0.0)
    here.both_step(1)
    here.pass_by(2 * PATIENCE_S)
    assert (here.verdicts, here.looks) == ([], 0)


def test_workers_that_wait_for_a_new_group_do_not_hang(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.both_step(1)
    regroup = here.group.regroup
    regroup.add_late(Member(number=7, node=2, local_rank=0, rank=2, late=True))
    regroup.receive(7, "join", {"call": 1, "most": 0})
    here.pass_by(100)
    for number in (0, 1):
        regroup.receive(number, "regroup", {"call": 1, "group": 0, "step": 1})
    here.pass_by(20)
    assert here.verdicts == [], "they have met a moment ago"
    here.pass_by(30)
    assert len(here.verdicts) == 1


@pytest.mark.parametrize(("hang_timeout_s", "limit_s"), [(None, GIVEN_UP_S), (0.0, GIVEN_UP_S), (8.0, 8.0), (2.0, 3.0)])
def test_silent_host_is_named_with_the_seconds(
    scene: Callable[..., Scene], hang_timeout_s: float | None, limit_s: float
) -> None:
    assert limit_s >= LEAST_GIVEN_UP_S
    here = scene(hang_timeout_s)
    here.pass_by(limit_s, alive=(0,))
    assert here.silent == []
    here.pass_by(0.5, alive=(0,))
    name, seconds = here.silent[0]
    assert (name, seconds) == ("n1", pytest.approx(limit_s, abs=0.5))
    assert here.reported == ["manyhosts: host n1 has not been heard from for 2.5 s"]


def test_silent_host_whose_workers_go_on_is_given_more_time(scene: Callable[..., Scene]) -> None:
    """Else the others would wait for them: it is the agent that waits, for its disk, say."""
    here = scene(None)
    for step in range(int(MOST_GIVEN_UP_S)):
        here.report(0, "step", step=step)
        here.pass_by(1, alive=(0,))
        assert here.silent == []
    here.pass_by(2, alive=(0,))
    assert here.silent[0] == ("n1", pytest.approx(MOST_GIVEN_UP_S, abs=0.5))


@pytest.mark.parametrize(("hang_timeout_s", "limit_s"), [(None, 600.0), (0.0, None), (8.0, 8.0)])
def test_agent_that_waits_for_its_disk_is_named_and_given_up_as_a_worker_that_hangs(
    scene: Callable[..., Scene], hang_timeout_s: float | None, limit_s: float | None
) -> None:
    here = scene(hang_timeout_s)
    for tenths in range(0, 70, 5):
        here.hosts.nodes[1].held_s = tenths / 10
        here.pass_by(0.5)
    words = "manyhosts: host n1 is there, but its agent has waited for a disk or the like for 6 s; its workers continue"
    assert here.reported == [f"{words} if they can"]
    for step in range(20):
        here.hosts.nodes[1].held_s = 1000.0
        here.report(0, "step", step=step)
        here.pass_by(1)
    assert here.silent == [], "the workers of others get on, and so do its own"
    here.pass_by((limit_s or 700) - 2)
    assert here.silent == []
    here.pass_by(4)
    assert [name for name, _ in here.silent[:1]] == ([] if limit_s is None else ["n1"])
    here.hosts.nodes[1].held_s = 0.0
    here.pass_by(1)
    assert here.reported[-1] == "manyhosts: the agent of host n1 continues after 1000 s"


def test_host_that_is_back_after_a_while_is_named_and_forgiven(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.pass_by(20)
    here.pass_by(5, alive=(0,))
    here.pass_by(20)
    assert here.reported == [
        "manyhosts: host n1 has not been heard from for 2.5 s",
        "manyhosts: host n1 is back after 5.2 s",
    ]
    assert here.silent == []
    here.pass_by(9, alive=(0,))
    here.pass_by(1)
    assert len(here.reported) == 2, "such silences are known of it by now"


def test_time_that_the_head_itself_was_asleep_is_nobodys_fault(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.both_step(1)
    here.clock.jump(60)
    assert (here.silent, here.verdicts) == ([], [])
    here.pass_by(8)
    assert (here.silent, here.verdicts) == ([], [])
    here.pass_by(4)
    assert len(here.verdicts) == 1
