"""Where workers meet: which host keeps the store, and what becomes of those that wait for it when that host is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from manyhosts.control.head.store import Store
from manyhosts.control.protocol import FromHead


class Agents:
    """Four hosts, and what their agents were told."""

    def __init__(self) -> None:
        self.nodes = [SimpleNamespace(number=number, facts={"address": f"10.0.0.{number}"}) for number in range(4)]
        self.away: set[int] = set()
        self.address = "10.0.0.99"
        self.told: list[tuple[int, str]] = []

    def present(self) -> list[int]:
        return [node.number for node in self.nodes if node.number not in self.away]

    def tell(self, nodes: list[Any], message: FromHead) -> None:
        self.told += [(node.number, message.NAME) for node in nodes]


class Scene:
    def __init__(self) -> None:
        self.agents, self.told = Agents(), list[tuple[str, int]]()
        self.store = Store(cast(Any, SimpleNamespace(generation=0)), cast(Any, self.agents))

    def wish(self, *best: int) -> None:
        self.store.open(lambda address, port: self.told.append((address, port)), best=best)

    def answer(self, number: int, port: int) -> None:
        self.store.take(cast(Any, self.agents.nodes[number]), port, shared=True)

    def lose(self, number: int) -> None:
        self.agents.away.add(number)
        self.store.lose(cast(Any, self.agents.nodes[number]))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_store_that_is_open_is_told_at_once_until_it_is_closed(scene: Scene) -> None:
    scene.wish()
    scene.answer(0, 7)
    scene.wish()
    assert scene.told == [("10.0.0.0", 7)] * 2
    scene.store.close()
    scene.wish()
    assert len(scene.told) == 2
    assert scene.agents.told == [(0, "open_store"), (0, "close_store"), (0, "open_store")]


def test_host_whose_workers_train_keeps_it(scene: Scene) -> None:
    scene.agents.away.add(2)
    scene.wish(2, 3)
    assert scene.agents.told == [(3, "open_store")], "the first of them is away"


def test_host_that_is_lost_before_it_has_answered_leaves_nobody_waiting(scene: Scene) -> None:
    scene.wish(2, 3)
    scene.lose(2)
    scene.answer(3, 8)
    assert scene.told == [("10.0.0.3", 8)]


def test_host_that_comes_back_with_an_old_answer_is_not_believed(scene: Scene) -> None:
    scene.wish(2, 3)
    scene.lose(2)
    scene.agents.away.clear()
    scene.answer(2, 7)
    assert scene.told == []
    scene.answer(3, 8)
    assert scene.told == [("10.0.0.3", 8)]


def test_store_goes_with_its_host_and_no_other(scene: Scene) -> None:
    scene.wish()
    scene.answer(0, 7)
    scene.lose(1)
    assert scene.store.place == ("10.0.0.0", 7)
    scene.lose(0)
    assert scene.store.place is None
    scene.wish(3)
    scene.answer(3, 9)
    assert scene.told[-1] == ("10.0.0.3", 9)
