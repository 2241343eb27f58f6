"""What workers tell each other before they are connected, as the head keeps it: what each question is answered."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

import pytest

from manyhosts.control.head.store import Asker, KeyValueStore

FIRST, SECOND = Asker(node=0, line=0, id=1), Asker(node=1, line=0, id=1)
LOST = "a worker of this group is lost"


def text(word: str) -> str:
    return b64encode(word.encode()).decode()


class Scene:
    def __init__(self) -> None:
        self.answers: list[tuple[Asker, Any]] = []
        self.board = KeyValueStore(self.note)

    def note(self, asker: Asker, value: Any = None, error: str = "") -> None:
        self.answers.append((asker, error or value))

    def ask(self, do: str, asker: Asker = FIRST, *, group: tuple[int, int] = (0, 0), **fields: Any) -> Any:
        """The answer; None while there is none."""
        before = len(self.answers)
        self.board.ask(asker, do, {"group": list(group), **fields})
        return self.answers[-1][1] if len(self.answers) > before else None


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_who_waits_is_answered_when_all_of_it_is_there(scene: Scene) -> None:
    scene.ask("get", SECOND, names=["a", "b"])
    scene.ask("set", values={"a": text("1")})
    assert scene.answers == [(FIRST, None)]
    scene.ask("set", values={"b": text("2")})
    assert scene.answers[1:] == [(FIRST, None), (SECOND, [text("1"), text("2")])]
    assert scene.ask("get", names=["b"]) == [text("2")], "at once"


def test_numbers_comparisons_and_removals_are_those_of_a_tcpstore(scene: Scene) -> None:
    assert [scene.ask("add", name="n", amount=amount) for amount in (2, -5)] == [2, -3]
    assert b64decode(scene.ask("get", names=["n"])[0]) == b"-3"
    assert scene.ask("compare_set", name="c", expected=text("x"), desired=text("y")) == text("x"), "nothing is there"
    assert scene.ask("compare_set", name="c", expected="", desired=text("1")) == text("1")
    assert scene.ask("compare_set", name="c", expected=text("x"), desired=text("y")) == text("1")
    assert scene.ask("compare_set", name="c", expected=text("1"), desired=text("2")) == text("2")
    scene.ask("append", name="c", value=text("3"))
    assert scene.ask("get", names=["c"]) == [text("23")]
    assert scene.ask("names") == ["n", "c"]
    assert scene.ask("check", names=["n", "c"])
    assert scene.ask("delete", name="n")
    assert scene.ask("delete", name="n") is False
    assert scene.ask("check", names=["n", "c"]) is False


def test_group_that_has_lost_a_worker_waits_no_more_and_the_next_one_begins_with_nothing(scene: Scene) -> None:
    scene.ask("set", values={"a": text("1")})
    scene.ask("wait", SECOND, names=["b"])
    scene.board.close(0, 0)
    assert scene.answers[-1] == (SECOND, LOST)
    assert scene.ask("get", names=["a"]) == LOST, "also for those that ask later"
    assert scene.ask("check", group=(0, 1), names=["a"]) is False
    scene.ask("wait", SECOND, group=(0, 1), names=["b"])
    assert scene.ask("names", group=(1, 0)) == [], "the job was started again"
    assert (SECOND, LOST) in scene.answers[-2:]
    assert scene.ask("names", group=(0, 1)) == LOST


def test_group_that_is_lost_before_anybody_has_asked_does_not_meet(scene: Scene) -> None:
    scene.ask("set", values={"a": text("1")})
    scene.board.close(0, 3)
    assert scene.ask("wait", group=(0, 3), names=["a"]) == LOST
    assert scene.ask("set", group=(0, 4), values={"a": text("1")}) is None


def test_head_that_takes_over_has_the_values_and_those_who_wait(scene: Scene) -> None:
    scene.ask("set", values={"a": text("1")})
    scene.ask("get", SECOND, names=["a", "b"])
    scene.board.close(-1, 7)
    written = json.loads(json.dumps(scene.board.to_dict()))
    scene.board = KeyValueStore(scene.note)
    scene.board.restore(written)
    scene.ask("set", values={"b": text("2")})
    assert scene.answers[-1] == (SECOND, [text("1"), text("2")])
    assert scene.ask("names", group=(-1, 7)) == LOST


@pytest.mark.parametrize(
    ("do", "fields"),
    [
        ("dance", {"name": "a"}),
        ("set", {}),
        ("set", {"values": 3}),
        ("get", {"names": 7}),
        ("add", {"name": "a", "amount": "x"}),
        ("add", {"name": "text", "amount": 1}),
        ("append", {"name": "a", "value": "abc"}),
        ("delete", {}),
        ("set", {"values": {"a": "x" * (17 << 20)}}),
    ],
    ids=str,
)
def test_question_that_makes_no_sense_is_refused_and_harms_nobody(
    scene: Scene, do: str, fields: dict[str, Any]
) -> None:
    scene.ask("set", values={"text": text("word")})
    assert str(scene.ask(do, **fields)).startswith(f"the store could not do {do!r}: ")
    assert scene.ask("names") == ["text"]


def test_group_that_is_no_pair_of_numbers_is_refused(scene: Scene) -> None:
    scene.board.ask(FIRST, "names", {"group": "ab"})
    assert scene.answers[-1][1].startswith("the store could not do 'names'")
