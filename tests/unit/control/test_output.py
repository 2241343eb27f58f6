"""Bytes become lines, however they arrive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from manyhosts.control.agent.log import Lines


@given(st.text(alphabet="ab\n\N{EURO SIGN}"), st.lists(st.integers(1, 7)))
def test_lines_are_the_same_however_the_bytes_are_cut(text: str, cuts: list[int]) -> None:
    lines, data, reported = Lines(), text.encode(), []
    for cut in cuts:
        reported += lines.feed(data[:cut])
        data = data[cut:]
    reported += lines.feed(data) + lines.end()
    assert reported == text.removesuffix("\n").split("\n") if text else reported == []


def test_of_a_line_that_was_overwritten_the_last_state_counts() -> None:
    assert Lines().feed(b"1%\r50%\r100%\nplain\r\n") == ["100%", "plain"]


def test_bar_under_way_can_be_glimpsed_once_per_state() -> None:
    lines = Lines()
    lines.feed(b"1%\r2%\r")
    assert lines.partial_line() == ["2%"]
    assert lines.partial_line() == []
    lines.feed(b"3%\r4")
    assert lines.partial_line() == ["3%"]


def test_question_without_a_line_break_is_no_bar() -> None:
    lines = Lines()
    lines.feed(b"half a li")
    assert lines.partial_line() == []
    assert lines.feed(b"ne\n") == ["half a line"]


def test_endless_line_is_cut_before_it_fills_the_memory() -> None:
    lines = Lines()
    reported = [line for _ in range(40) for line in lines.feed(b"x" * (1 << 16))]
    assert sum(len(line) for line in reported + lines.end()) == 40 << 16
    assert len(reported) >= 2
