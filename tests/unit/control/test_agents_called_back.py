"""A host that is away is called until its time is up, and not only once."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts_at_head import Display

from manyhosts.control.head.agents import Agents
from manyhosts.control.head.state import HeadEndpoint, HeadState, Node
from manyhosts.control.job import Job
from manyhosts.control.protocol import FromAgent

REFUSED = 255


class Loop:
    """Does nothing by itself."""

    def __init__(self) -> None:
        self.later: list[Callable[[], None]] = []
        self.listening: socket.socket | None = None

    def after(self, _: float, act: Callable[[], None]) -> None:
        self.later.append(act)

    def watch(self, listening: socket.socket, _: Callable[[], None]) -> None:
        self.listening = listening

    def pass_time(self) -> None:
        due, self.later = self.later, []
        for act in due:
            act()


class Call:
    """An agent that was started: `code` is how it has ended already."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        pass

    def wait(self) -> None:
        pass


class Idle:
    """A head that does nothing when agents come and go."""

    def welcome(self, node: Node) -> None:
        pass

    def receive(self, node: Node, message: FromAgent) -> None:
        pass

    def lose(self, node: Node, why: str) -> None:
        pass


class Scene:
    def __init__(self, patience_s: float, ends: list[int | None]) -> None:
        self.loop, self.calls, self.ends = Loop(), 0, ends
        job = Job(program="t.py", folder=Path("/w"), run_dir=Path("/w/run"))
        state = HeadState(job, Display(), self.loop)
        endpoint = HeadEndpoint(patience_s=patience_s)
        self.agents = Agents(state, ["far"], self.start, "127.0.0.1", Idle(), endpoint)
        self.failed = 0

    def start(self, node: int, head: str, token: str) -> Call:
        self.calls += 1
        return Call(self.ends.pop(0))

    def call_back(self) -> None:
        def fail() -> None:
            self.failed += 1

        self.agents.call_back(self.agents.nodes[0], fail)


@pytest.fixture
def scenes() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(patience_s: float, ends: list[int | None]) -> Scene:
        made.append(Scene(patience_s, ends))
        return made[-1]

    yield make
    for scene in made:
        assert scene.loop.listening is not None
        scene.loop.listening.close()


def test_host_that_does_not_answer_at_first_is_called_again(scenes: Callable[..., Scene]) -> None:
    scene = scenes(60, [None, REFUSED, REFUSED, None])
    scene.call_back()
    for _ in range(4):
        scene.loop.pass_time()
    assert (scene.calls, scene.failed) == (4, 0), "begun, and called back three times"


def test_host_that_a_run_goes_on_without_is_called_at_once_and_again(scenes: Callable[..., Scene]) -> None:
    scene = scenes(60, [None, REFUSED, REFUSED, None])
    scene.agents.bring_back(scene.agents.nodes[0])
    assert scene.calls == 2, "begun, and called back before any time has passed: the host may be well"
    for _ in range(4):
        scene.loop.pass_time()
    assert scene.calls == 4


def test_host_that_does_not_come_in_time_is_given_up_once(scenes: Callable[..., Scene]) -> None:
    scene = scenes(0, [None, *[REFUSED] * 9])
    scene.call_back()
    for _ in range(4):
        scene.loop.pass_time()
    assert scene.failed == 1
