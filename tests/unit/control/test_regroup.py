"""What the head tells workers that wait in a call of the script, while others have finished it or rest behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from manyhosts.control.head.group_state import MOST_WITHOUT_PROGRESS, Member
from manyhosts.control.head.membership import BREAK_AFTER_S, KILL_AFTER_S, START_LIMIT_S, UNKNOWN_S, GroupCoordinator


class Clock:
    """A loop whose time passes when it is told to."""

    def __init__(self) -> None:
        self.now, self.due = 0.0, list[tuple[float, Callable[[], None]]]()

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        self.due.append((self.now + seconds, then))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.due and min(at for at, _ in self.due) <= end:
            at, then = min(self.due, key=lambda entry: entry[0])
            self.due.remove((at, then))
            self.now = at
            then()
        self.now = end


class Hosts:
    """Notes what workers are told. The store is always there."""

    def __init__(self) -> None:
        self.reported: list[tuple[int, str, dict[str, Any]]] = []
        self.killed: list[int] = []
        self.started: list[int] = []
        self.ended_in_vain = 0

    def send_member(self, member: Member, kind: str, /, **content: Any) -> None:
        self.reported.append((member.number, kind, content))

    def start_late(self, member: Member) -> None:
        self.started.append(member.number)

    def kill_member(self, member: Member, why: str = "") -> None:
        self.killed.append(member.number)

    def end_without_progress(self) -> None:
        self.ended_in_vain += 1

    def open_store(self, then: Callable[[str, int], None]) -> None:
        then("here", 1)

    def close_store(self) -> None:
        pass

    def heard_by(self, number: int) -> list[str]:
        return [kind for whom, kind, _ in self.reported if whom == number]


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def regroup(hosts: Hosts, clock: Clock) -> GroupCoordinator:
    """Two workers that have begun the first call of the script."""
    made = GroupCoordinator(clock, hosts, 0, clock=lambda: clock.now)  # type: ignore[arg-type]  # all of a loop that it uses
    for number in range(2):
        made.add(Member(number=number, node=0, local_rank=number, rank=number))
        made.receive(number, "begin", {"call": 1, "most": 0})
    return made


def lose(regroup: GroupCoordinator, number: int, successor: int) -> bool:
    def replace(lost: Member) -> Member:
        return Member(number=successor, node=0, local_rank=lost.local_rank, rank=lost.rank, late=True)

    return regroup.goes_on_without(number, "it was killed", replace=replace)


def finish_call(regroup: GroupCoordinator, call: int, outcome: Any = None) -> None:
    for member in regroup.group_state.trained():
        regroup.receive(member.number, "done", {"call": call, "outcome": outcome})


def test_new_worker_is_told_what_came_out_of_a_call_that_is_over(regroup: GroupCoordinator, hosts: Hosts) -> None:
    finish_call(regroup, 1, {"loss": 0.5})
    assert lose(regroup, 1, 2)
    regroup.receive(2, "join", {"call": 1, "most": 0})
    assert hosts.reported[-1] == (2, "passed", {"call": 1, "outcome": {"loss": 0.5}, "replaces": True})
    regroup.receive(2, "join", {"call": 2, "most": 0})
    regroup.receive(0, "regroup", {"call": 2, "step": 0, "group": 0})
    assert (hosts.heard_by(0)[-1], hosts.heard_by(2)[-1]) == ("group", "group")


def test_worker_that_broke_off_in_the_end_of_a_call_hears_that_another_has_left_it(
    regroup: GroupCoordinator, hosts: Hosts
) -> None:
    regroup.add(Member(number=5, node=0, local_rank=2, rank=2))
    regroup.receive(5, "begin", {"call": 1, "most": 0})
    assert lose(regroup, 1, 2)
    regroup.receive(0, "regroup", {"call": 1, "step": 7, "group": 0})
    assert hosts.heard_by(0) == []
    regroup.receive(5, "done", {"call": 1, "outcome": 3})
    assert hosts.reported[-1] == (0, "passed", {"call": 1, "outcome": 3, "replaces": True})
    assert regroup.group_state.members[0].asked is None, "it waits no more"


def test_worker_that_does_what_the_script_does_between_two_calls_takes_its_time(
    regroup: GroupCoordinator, hosts: Hosts, clock: Clock
) -> None:
    finish_call(regroup, 1)
    assert lose(regroup, 1, 2)
    regroup.receive(2, "join", {"call": 2, "most": 0})
    clock.pass_time(2 * KILL_AFTER_S)
    assert hosts.killed == []
    regroup.receive(0, "begin", {"call": 2, "most": 0})
    assert hosts.heard_by(0) == ["broken"], "so that it does not wait for the lost one there"


def make_steps(regroup: GroupCoordinator, clock: Clock, number: int, step_s: float) -> None:
    for _ in range(3):
        clock.pass_time(step_s)
        regroup.note_report(number, "step")


def test_worker_that_does_not_answer_in_a_call_counts_as_hung(
    regroup: GroupCoordinator, hosts: Hosts, clock: Clock
) -> None:
    make_steps(regroup, clock, 0, 1.0)
    assert lose(regroup, 1, 2)
    clock.pass_time(2 * KILL_AFTER_S)
    assert hosts.killed == [0]
    clock.pass_time(START_LIMIT_S)
    assert hosts.killed == [0, 2]


@pytest.mark.parametrize("before", [40.0, None])
def test_worker_whose_steps_are_long_or_unknown_does_not(
    regroup: GroupCoordinator, hosts: Hosts, clock: Clock, before: float | None
) -> None:
    if before:
        make_steps(regroup, clock, 0, before)
    patience_s = 3 * before if before else UNKNOWN_S
    assert lose(regroup, 1, 2)
    clock.pass_time(patience_s - 1)
    assert 0 not in hosts.killed
    clock.pass_time(2)
    assert 0 in hosts.killed


def test_worker_that_tells_that_it_is_busy_is_waited_for(regroup: GroupCoordinator, hosts: Hosts, clock: Clock) -> None:
    make_steps(regroup, clock, 0, 1.0)
    assert lose(regroup, 1, 2)
    for _ in range(5):
        clock.pass_time(KILL_AFTER_S - 5)
        regroup.note_report(0, "busy")
    assert hosts.killed == []


def test_new_worker_may_be_on_its_way_for_as_long_as_the_first_were(hosts: Hosts, clock: Clock) -> None:
    slow = GroupCoordinator(clock, hosts, 0, clock=lambda: clock.now)  # type: ignore[arg-type]  # all of a loop that it uses
    for number in range(2):
        slow.add(Member(number=number, node=0, local_rank=number, rank=number))
    clock.pass_time(2 * START_LIMIT_S)  # the script reads a large file, say
    for number in range(2):
        slow.receive(number, "begin", {"call": 1, "most": 0})
    assert lose(slow, 1, 2)
    slow.receive(0, "regroup", {"call": 1, "step": 7, "group": 0})
    clock.pass_time(3 * START_LIMIT_S)
    assert hosts.killed == []
    clock.pass_time(3 * START_LIMIT_S + 1)
    assert hosts.killed == [2]


def test_new_worker_does_the_rest_of_the_script_where_the_others_have_come_to_its_end(
    regroup: GroupCoordinator, hosts: Hosts
) -> None:
    finish_call(regroup, 1)
    assert lose(regroup, 1, 2)
    regroup.drop(0)
    assert regroup.goes_its_own_way(regroup.group_state.members[2])
    assert hosts.heard_by(2) == []
    regroup.receive(2, "join", {"call": 1, "most": 0})
    assert hosts.heard_by(2) == ["passed"]
    regroup.receive(2, "join", {"call": 2, "most": 0})
    assert hosts.heard_by(2) == ["passed", "refused"], "nobody will come to that call"


def test_new_worker_that_waits_for_those_that_have_ended_is_refused(regroup: GroupCoordinator, hosts: Hosts) -> None:
    finish_call(regroup, 1)
    assert lose(regroup, 1, 2)
    regroup.receive(2, "join", {"call": 2, "most": 0})
    regroup.drop(0)
    assert regroup.goes_its_own_way(regroup.group_state.members[2])
    assert hosts.heard_by(2) == ["refused"]


def test_worker_that_came_to_help_is_told_that_it_takes_nobodys_place(regroup: GroupCoordinator, hosts: Hosts) -> None:
    finish_call(regroup, 1)
    regroup.add_late(Member(number=2, node=1, local_rank=0, rank=2, late=True))
    regroup.receive(2, "join", {"call": 1, "most": 0})
    assert hosts.reported[-1] == (2, "passed", {"call": 1, "outcome": None, "replaces": False})


def test_worker_that_came_to_help_is_not_needed_when_the_others_have_ended(regroup: GroupCoordinator) -> None:
    finish_call(regroup, 1)
    regroup.add_late(Member(number=2, node=1, local_rank=0, rank=2, late=True))
    regroup.drop(0)
    regroup.drop(1)
    assert not regroup.goes_its_own_way(regroup.group_state.members[2])


def test_failures_in_calls_that_follow_each_other_are_no_failures_in_a_row(regroup: GroupCoordinator) -> None:
    lost = 1
    for call in range(1, 2 * MOST_WITHOUT_PROGRESS):
        assert lose(regroup, lost, lost + 1), f"in call {call}"
        lost += 1
        regroup.receive(lost, "join", {"call": call, "most": 0})
        regroup.receive(0, "regroup", {"call": call, "step": 0, "group": regroup.group_state.group})
        assert not regroup.group_state.broken
        finish_call(regroup, call)
        for member in regroup.group_state.trained():
            regroup.receive(member.number, "begin", {"call": call + 1, "most": 0})


@pytest.mark.parametrize("known", ["when it is lost", "after the other has asked", "never: nobody is lost"])
def test_workers_that_break_off_at_one_step_again_and_again_get_no_other_group(
    regroup: GroupCoordinator, hosts: Hosts, known: str
) -> None:
    lost = 1
    for failures in range(MOST_WITHOUT_PROGRESS + 2):
        last = failures == MOST_WITHOUT_PROGRESS + 1  # the first comes after steps that were finished
        asking = {"call": 1, "step": 3, "group": regroup.group_state.group}
        if known == "when it is lost":
            assert lose(regroup, lost, lost + 1)
        regroup.receive(0, "regroup", asking)
        if known == "after the other has asked":
            assert lose(regroup, lost, lost + 1) is not last
        if known == "never: nobody is lost":
            regroup.receive(1, "regroup", asking)
        elif not last:
            lost += 1
            regroup.receive(lost, "join", {"call": 1, "most": 0})
    formed = MOST_WITHOUT_PROGRESS + 1
    assert (hosts.heard_by(0).count("group"), regroup.group_state.group) == (formed, formed)
    # Where all have asked when the loss becomes known, the answer to that news is that nobody goes on.
    assert hosts.ended_in_vain == (0 if known == "after the other has asked" else 1)


def test_where_nobody_goes_on_those_that_wait_for_a_silent_host_are_told_to_wait_no_more(
    regroup: GroupCoordinator, hosts: Hosts, clock: Clock
) -> None:
    regroup.receive(1, "done", {"call": 1, "outcome": None})
    regroup.refuse()
    regroup.refuse()
    assert hosts.reported == [], "they may find out by themselves"
    clock.pass_time(BREAK_AFTER_S)
    assert [(number, kind) for number, kind, _ in hosts.reported] == [(0, "broken")], "the other waits for nobody"
