"""What a run ends with whose workers break off at one step again and again, in whatever order that becomes known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hosts_at_head import Clock, Display, Hosts, begin

from manyhosts.control.head.failure_policy import FailurePolicy
from manyhosts.control.head.group_state import MOST_WITHOUT_PROGRESS
from manyhosts.control.head.output import WorkerOutput
from manyhosts.control.head.state import HeadState
from manyhosts.control.job import Job
from manyhosts.control.protocol import Ended
from manyhosts.errors import ManyhostsError

RESET = "RuntimeError: Connection closed by peer [127.0.0.1]:1"


class Scene:
    """Two hosts with a worker each, which train."""

    def __init__(self) -> None:
        clock = Clock()
        self.hosts = Hosts(clock, 2)
        job = Job(program="t.py", folder=Path("/w"), run_dir=Path("/w/run"), nodes=2)
        self.state = HeadState(job, Display(), clock)
        self.policy = FailurePolicy(self.state, self.hosts, WorkerOutput(self.state, 2))
        begin(self.state, self.policy.worker_group, self.hosts)
        self.regroup = self.policy.worker_group.regroup

    def ask(self, member: int, step: int) -> None:
        self.regroup.receive(member, "regroup", {"call": 1, "step": step, "group": self.regroup.group_state.group})

    def end(self, member: int, **how: Any) -> None:
        node = self.hosts.nodes[0 if member == 0 else 1]
        words = {"code": 0, "signal": 0, "finished": False, "error": None, "out_of_memory": False, **how}
        self.policy.note_end(node, Ended(rank=node.number, generation=0, member=member, **words))

    def break_off(self, step: int, known: str) -> None:
        """The step is not finished, and who is left goes on with another one, if that is what is decided."""
        lost = max(self.state.running)
        if known == "when it is lost":
            self.end(lost, signal=9)
        self.ask(0, step)
        if known == "after the other has asked":
            self.end(lost, signal=9)
        if known == "never":
            self.ask(lost, step)
        elif not self.regroup.ended:
            self.regroup.receive(lost + 1, "join", {"call": 1, "most": 0})

    def result(self) -> ManyhostsError:
        """The result once those that are left have ended as they do whose exchange was broken off."""
        for number in sorted(self.state.running):
            self.end(number, code=1, error={"summary": RESET, "text": RESET})
            self.state.loop.jump(10.0)
        assert self.policy.all_ended
        self.policy.conclude()
        assert isinstance(self.state.result, ManyhostsError)
        return self.state.result


@pytest.mark.parametrize(
    ("known", "what"),
    [
        ("when it is lost", "rank 1 on host n1 was killed by SIGKILL"),
        ("after the other has asked", "rank 1 on host n1 was killed by SIGKILL"),
        ("never", f"rank 0 on host n0 failed with {RESET}"),
    ],
)
def test_run_that_makes_no_progress_ends_with_the_last_failure(known: str, what: str) -> None:
    scene = Scene()
    for step in [*range(7), *[7] * (MOST_WITHOUT_PROGRESS + 1)]:
        scene.break_off(step, known)
        assert not scene.regroup.ended, f"at step {step}"
    scene.break_off(7, known)
    assert scene.regroup.ended
    assert scene.result().what == f"{what}, failure 4 in a row without one more step; 1 other worker was ended"


def test_workers_that_end_again_and_again_before_they_join_are_named_and_their_place_is_left_empty() -> None:
    scene = Scene()
    for member in scene.regroup.group_state.members.values():
        member.most = 4  # virtual workers: who is left trains on meanwhile
    scene.end(1, signal=9)
    scene.ask(0, 5)
    assert scene.regroup.group_state.order == [0]
    assert not scene.regroup.group_state.broken, "the others train"
    said: list[str] = scene.state.display.said
    assert not [text for text in said if "before it joined" in text]
    for number in range(2, 3 + MOST_WITHOUT_PROGRESS):
        assert max(scene.state.running) == number
        scene.end(number, signal=9)
        expected = "another is started" if number < 2 + MOST_WITHOUT_PROGRESS else "no other is started in its place"
        assert said[-1].startswith("manyhosts: rank 1 on host n1 was killed by SIGKILL, before it joined the others")
        assert said[-1].endswith(expected)
    assert scene.state.running == {0}
    assert not scene.regroup.ended
