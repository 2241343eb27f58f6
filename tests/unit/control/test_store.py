"""Where workers meet: which host keeps the store, and what becomes of those that wait for it when that host is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hosts_at_head import Clock, Display, Hosts

from manyhosts.control.head.state import HeadState
from manyhosts.control.head.store import Asker, Store
from manyhosts.control.job import Job


class Scene:
    def __init__(self) -> None:
        self.clock = Clock()
        self.hosts = Hosts(self.clock, 4)
        self.reported: list[tuple[str, int]] = []
        self.answers: list[tuple[Asker, Any]] = []
        self.store = self.another()

    def another(self) -> Store:
        def answer(asker: Asker, value: Any = None, error: str = "") -> None:
            self.answers.append((asker, value or error))

        job = Job(program="t.py", folder=Path("/w"), run_dir=Path("/w/run"), nodes=4)
        return Store(HeadState(job, Display(), self.clock), self.hosts, answer)

    @property
    def asked(self) -> list[tuple[int, str]]:
        """What hosts were asked to do."""
        return [
            (number, message.NAME if getattr(message, "listens", True) else "take_port")
            for number, message in self.hosts.reported
        ]

    def wish(self, *best: int, listens: bool = True) -> None:
        self.store.open(lambda address, port: self.reported.append((address, port)), best=best, listens=listens)

    def answer(self, number: int, port: int, *, listens: bool = True) -> None:
        self.store.take(self.hosts.nodes[number], port, shared=True, listens=listens)

    def lose(self, number: int) -> None:
        self.store.lose(self.hosts.lose(number))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_store_that_is_open_is_told_at_once_until_it_is_closed(scene: Scene) -> None:
    scene.wish()
    scene.answer(0, 7)
    scene.wish()
    assert scene.reported == [("10.0.0.0", 7)] * 2
    scene.store.close()
    scene.wish()
    assert len(scene.reported) == 2
    assert scene.asked == [(0, "open_store"), (0, "close_store"), (0, "open_store")]


def test_host_whose_workers_train_keeps_it(scene: Scene) -> None:
    scene.hosts.lose(2)
    scene.wish(2, 3)
    assert scene.asked == [(3, "open_store")], "the first of them is away"


def test_host_that_is_lost_before_it_has_answered_leaves_nobody_waiting(scene: Scene) -> None:
    scene.wish(2, 3)
    scene.lose(2)
    scene.answer(3, 8)
    assert scene.reported == [("10.0.0.3", 8)]


def test_host_that_comes_back_with_an_old_answer_is_not_believed(scene: Scene) -> None:
    scene.wish(2, 3)
    scene.lose(2)
    scene.hosts.come_back(2)
    scene.answer(2, 7)
    assert scene.reported == []
    scene.answer(3, 8)
    assert scene.reported == [("10.0.0.3", 8)]


def test_store_goes_with_its_host_and_no_other(scene: Scene) -> None:
    scene.wish()
    scene.answer(0, 7)
    scene.lose(1)
    assert scene.store.place == ("10.0.0.0", 7)
    scene.lose(0)
    assert scene.store.place is None
    scene.wish(3)
    scene.answer(3, 9)
    assert scene.reported[-1] == ("10.0.0.3", 9)


WORKER, OTHER = Asker(node=1, line=0, id=1), Asker(node=2, line=3, id=1)


def test_store_is_served_when_the_first_worker_asks_for_it_and_once(scene: Scene) -> None:
    scene.wish(listens=False)
    scene.store.serve(WORKER)
    assert scene.asked == [(0, "take_port")], "one thing after the other"
    scene.answer(0, 7, listens=False)
    assert scene.reported == [("10.0.0.0", 7)], "workers may start"
    scene.store.serve(OTHER)
    assert scene.answers == []
    scene.answer(0, 7)
    scene.store.serve(WORKER)
    assert scene.asked == [(0, "take_port"), (0, "open_store")]
    assert scene.answers == [(asker, ["10.0.0.0", 7]) for asker in (WORKER, OTHER, WORKER)]


def test_worker_that_asks_is_told_of_another_host_where_that_of_the_store_is_lost(scene: Scene) -> None:
    scene.wish(listens=False)
    scene.answer(0, 7, listens=False)
    scene.store.serve(WORKER)
    scene.lose(0)
    scene.answer(1, 8)
    assert scene.answers == [(WORKER, ["10.0.0.1", 8])]


def test_worker_that_asks_hears_it_where_its_group_is_lost_and_a_port_that_is_only_taken_stays(scene: Scene) -> None:
    scene.wish(listens=False)
    scene.answer(0, 7, listens=False)
    scene.store.close()
    assert scene.store.place == ("10.0.0.0", 7)
    scene.store.serve(WORKER)
    scene.store.close()
    assert scene.answers == [(WORKER, "a worker of this group is lost")]
    assert scene.asked[-1] == (0, "close_store")
    assert scene.store.place is None


def test_head_that_takes_over_answers_those_that_have_asked_the_last_one(scene: Scene) -> None:
    scene.wish(listens=False)
    scene.answer(0, 7, listens=False)
    scene.store.serve(WORKER)
    written = json.loads(json.dumps(scene.store.to_dict()))
    scene.store = scene.another()
    scene.store.restore(written)
    scene.answer(0, 7)
    assert scene.answers == [(WORKER, ["10.0.0.0", 7])]
