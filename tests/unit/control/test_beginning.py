"""What a terminal says before the first word of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from manyhosts.control.head.output import Beginning


class Shown:
    """A display that keeps what it is told, and a clock that goes when it is told."""

    def __init__(self) -> None:
        self.fields: list[Mapping[str, Any]] = []
        self.due: list[Callable[[], None]] = []

    def progress(self, fields: Mapping[str, Any]) -> None:
        self.fields.append(fields)

    def after(self, _seconds: float, callback: Callable[[], None]) -> None:
        self.due.append(callback)

    def tick(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()

    def line(self, text: str, prefix: str, is_error: bool) -> None:
        raise AssertionError(text)

    def say(self, text: str) -> None:
        raise AssertionError(text)

    def warn(self, text: str) -> None:
        raise AssertionError(text)

    def close(self) -> None:
        """Nothing to undo."""


@pytest.mark.parametrize(
    ("missing", "count", "expected"),
    [
        (["here"], 1, "starting"),
        (["b", "c"], 4, "waiting for b, c"),
        (["a", "b", "c", "d"], 16, "waiting for 4 of 16 hosts"),
    ],
)
def test_hosts_that_are_awaited_are_named_as_long_as_they_are_few(
    missing: list[str], count: int, expected: str
) -> None:
    shown = Shown()
    Beginning(shown, shown.after).await_hosts(missing, count)
    assert shown.fields[-1]["awaited"] == expected


def test_line_follows_what_is_awaited_and_ends_with_the_first_word() -> None:
    shown = Shown()
    beginning = Beginning(shown, shown.after)
    beginning.await_hosts(["b"], 2)
    beginning.await_workers(4)
    shown.tick()
    assert shown.fields[-1]["awaited"] == "starting 4 workers"
    assert len(shown.due) == 1, "one clock, whatever is awaited"
    beginning.end()
    assert shown.fields[-1] == {"ended": True}
    reported = len(shown.fields)
    shown.tick()
    beginning.end()
    beginning.await_workers(4)
    assert len(shown.fields) == reported, "a host that comes later does not bring it back"
    assert shown.due == []


def test_workers_that_were_asked_to_end_are_not_said_to_start() -> None:
    shown = Shown()
    beginning = Beginning(shown, shown.after)
    beginning.await_end()
    assert shown.due == [], "nothing was awaited, so there is no line"
    beginning.await_workers(2)
    beginning.await_end()
    shown.tick()
    assert shown.fields[-1]["awaited"] == "ending the workers"
