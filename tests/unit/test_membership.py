"""A worker's line to its agent: what it hears while it is about to enter a group counts for that group."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhosts.cluster.membership import Membership
from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.errors import CommunicationError

GROUP: dict[str, Any] = {
    "key": "0.2",
    "rank": 0,
    "size": 2,
    "local_rank": 0,
    "local_size": 2,
    "node_rank": 0,
    "nodes": 1,
}
GROUP |= {"address": "127.0.0.1", "port": 1, "newcomers": [1], "reason": "", "how": "with 2 workers, 1 of them new"}


class Agent:
    """The other end of a worker's line."""

    def __init__(self, path: Path) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self.worker = Membership(str(path), member=0, local_rank=0, joins=False)
        self.worker.begin(1, most=0)
        self._line, _ = self._listening.accept()

    def say(self, *messages: dict[str, Any]) -> None:
        """All at once."""
        self._line.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    def hang_up(self) -> None:
        """The line ends, and with it the thread that listens; all that was said before has been heard then."""
        self._line.close()
        for thread in threading.enumerate():
            if thread.name == "membership":
                thread.join()
        self._listening.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path / "agent")
    yield made
    made.hang_up()


def group(number: int) -> dict[str, Any]:
    return {"message": "group", "number": number, **GROUP}


def change(number: int) -> dict[str, Any]:
    return {"message": "change", "group": number}


def test_whoever_wants_to_join_a_group_that_is_just_being_entered_is_heard(agent: Agent) -> None:
    """Two workers of a host that is back come one after the other, the second while the first is taken in."""
    agent.say(group(2), change(2))
    agent.hang_up()
    assert agent.worker.regroup(1, 5).number == 2
    assert agent.worker.change_asked


def test_whoever_was_taken_in_waits_no_more(agent: Agent) -> None:
    agent.say(group(1), change(1), group(2))
    agent.hang_up()
    assert agent.worker.regroup(1, 5).number == 1
    assert agent.worker.change_asked
    assert agent.worker.regroup(1, 6).number == 2
    assert not agent.worker.change_asked


def test_group_that_breaks_before_it_is_entered_is_not_waited_for(agent: Agent) -> None:
    """Its store may be there still, and nobody at it."""
    world = World(Place(), membership=agent.worker, timeout_s=5)
    agent.say(group(1), {"message": "broken", "group": 1}, group(2))
    agent.hang_up()
    with pytest.raises(CommunicationError, match="gone again"):
        world.enter(agent.worker.regroup(1, 5))
    agent.worker.regroup(1, 5)
    assert not agent.worker.is_broken
