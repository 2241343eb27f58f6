"""Plots of our own: round numbers at their axes, every finite point inside, nothing drawn of nothing."""

from __future__ import annotations

import math
import re

from hypothesis import given
from hypothesis import strategies as st

from manyhosts.report.curves import Curve, figure, grid, short, ticks

numbers = st.floats(-1e9, 1e9, allow_nan=False).filter(lambda value: value == 0 or abs(value) > 1e-9)


@given(numbers, numbers, st.booleans())
def test_ticks_are_few_ascending_and_inside(one: float, other: float, whole: bool) -> None:
    low, high = sorted((one, other))
    found = ticks(low, high, integral=whole)
    assert 1 <= len(found) <= 5
    assert found == sorted(set(found))
    around = 1e-6 * max(abs(low), abs(high), 1e-9)
    if not whole or math.floor(high) >= math.ceil(low):
        assert all(low - around <= value <= high + around for value in found)


def test_ticks_are_round() -> None:
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6000000000000001, 0.8] or len(ticks(0, 1)) <= 5
    assert ticks(3, 98) == [20, 40, 60, 80]
    assert ticks(1, 4, integral=True) == [1, 2, 3, 4]


@given(numbers)
def test_numbers_at_axes_are_short_and_right(value: float) -> None:
    text = short(value)
    assert len(text) <= 10
    factor = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1.0)
    assert math.isclose(float(text.rstrip("kMG")) * factor, value, rel_tol=1e-3)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(allow_nan=True, allow_infinity=True)), max_size=30))
def test_every_finite_point_is_drawn_inside_and_others_leave_gaps(points: list[tuple[float, float]]) -> None:
    points = sorted(
        (point for point in points if abs(point[1]) < 1e100 or not math.isfinite(point[1])), key=lambda p: p[0]
    )
    text = figure("a title", [Curve("one", points)], x="step")
    count = sum(math.isfinite(point[1]) for point in points)
    if not count:
        assert text == ""
        return
    drawn = [pair.split(",") for row in re.findall(r'points="([^"]*)"', text) for pair in row.split()]
    drawn += re.findall(r'cx="([^"]*)" cy="([^"]*)"', text)
    assert len(drawn) == count
    assert all(0 <= float(x) <= 560 and 0 <= float(y) <= 330 for x, y in drawn)


def labels(drawn: str, anchor: str) -> list[str]:
    """The numbers at the axis whose words are anchored so."""
    return re.findall(rf'text-anchor="{anchor}">([^<]*)</text>', drawn)


def test_equal_numbers_whose_means_round_are_one_straight_line() -> None:
    """As the learning rate of a long run, of which each point is the mean over many steps."""
    points = [(step, sum([0.003] * step) / step) for step in range(1, 200)]
    assert len({value for _, value in points}) > 1
    drawn = figure("Learning rate", [Curve("rate", points)], x="step")
    assert labels(drawn, "end") == ["0.0028", "0.003", "0.0032"]
    assert len({pair.split(",")[1] for row in re.findall(r'points="([^"]*)"', drawn) for pair in row.split()}) == 1


def test_numbers_at_an_axis_differ_where_their_places_do() -> None:
    drawn = figure("Loss", [Curve("one", [(100_000, 2.3021), (100_004, 2.3025)])], x="step", integral_x=True)
    assert labels(drawn, "end") == ["2.3021", "2.3022", "2.3023", "2.3024", "2.3025"]
    assert labels(drawn, "middle")[:-1] == ["100k", "100.001k", "100.002k", "100.003k", "100.004k"]


def test_gap_parts_the_line() -> None:
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 1.0), (5, 2.0)]
    assert figure("t", [Curve("one", points)], x="step").count("<polyline") == 2


def test_nothing_is_drawn_of_nothing_and_words_are_no_markup() -> None:
    assert grid([figure("t", [Curve("one", [])], x="step"), ""]) == ""
    text = figure("<t>", [Curve("<a>", [(0, 1)]), Curve("b&", [(0, 2)])], x="<x>")
    assert "<t>" not in text
    assert "<a>" not in text
    assert "<x>" not in text
    assert "b&amp;" in text
