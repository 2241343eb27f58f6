"""Curves as SVG that is in the text of a page: scaled with it, and its words can be searched and printed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1f6fb4", "#d1631f", "#2a8a57", "#8e4bb0", "#b3273a", "#5b6470", "#a07c00", "#0f8b8d")
"""Of curves, in order; distinguished by their dashes, too."""
_DASHES = ("", "7 4", "2 4", "10 3 2 3")
_WIDTH, _HEIGHT = 560, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 88, 18, 12, 50
_MOST_TICKS = 5
_LOGARITHMIC = 20.0
"""Positive values that span this factor are drawn on a logarithmic axis."""
_FLAT = 1e-5
"""Values that differ by less than this share of them are drawn as one: a mean of equal numbers rounds."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """A named row of points, in order of x. What is no finite number leaves a gap."""

    name: str
    points: Points


def figure(title: str, curves: Sequence[Curve], *, x: str, y: str = "", integral_x: bool = False) -> str:
    """A plot with its title and, of several curves, a legend; empty where no curve has a point that can be drawn.

    `x`, `y`: what is on the axes; `whole_x`: the numbers below are complete.
    """
    shown = [(number, curve) for number, curve in enumerate(curves) if _finite(curve.points)]
    if not shown:
        return ""
    legend = "".join(_key(number, curve.name) for number, curve in shown) if len(curves) > 1 else ""
    caption = f'<figcaption><b>{escape(title)}</b><span class="legend">{legend}</span></figcaption>'
    return f"<figure>{caption}{_drawn(title, shown, x, y, integral_x)}</figure>"


def grid(figures: Sequence[str]) -> str:
    """Plots next to and below each other; empty where none has anything to show."""
    found = "".join(figures)
    return f'<div class="plots">{found}</div>' if found else ""


def ticks(low: float, high: float, most: int = _MOST_TICKS, *, integral: bool = False) -> list[float]:
    """At most `most` round numbers from `low` to `high`, at least one."""
    span = (high - low) or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / most))
    for factor in (1, 2, 5, 10, 20):
        every = step * factor
        if integral:
            every = max(1.0, round(every))
        first, last = math.ceil(low / every - 1e-9), math.floor(high / every + 1e-9)
        if last - first < most:
            return [place * every for place in range(first, last + 1)] or [low]
    return [low, high]


def short(value: float, digits: int = 4) -> str:
    """A number for an axis, in at most seven signs or so: `0.05`, `1200`, `30k`, `2.5M`, `1e-05`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e12:
            return f"{value / (1e3 if letter == 'k' else size):.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def words_for(values: Sequence[float]) -> list[str]:
    """The numbers at one axis, with as many digits as it takes to tell them apart."""
    for digits in range(4, 12):
        words = [short(value, digits) for value in values]
        if len(set(words)) == len(values):
            break
    return words


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to places."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high, at = (math.log10(each) if self.is_log else each for each in (self.low, self.high, value))
        return self.begin + (at - low) / ((high - low) or 1.0) * (self.end - self.begin)

    def labels(self, *, integral: bool = False) -> list[float]:
        if not self.is_log:
            return ticks(self.low, self.high, integral=integral)
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        every = max(1, -(-(last - first + 1) // _MOST_TICKS))
        powers = [10.0**power for power in range(first, last + 1, every)]
        if len(powers) >= 2:
            return powers
        halves = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
        return [value for value in halves if self.low <= value <= self.high] or [self.low, self.high]


def _drawn(title: str, shown: Sequence[tuple[int, Curve]], x: str, y: str, integral_x: bool) -> str:
    points = [point for _, curve in shown for point in _finite(curve.points)]
    across = _axis([point[0] for point in points], _LEFT, _WIDTH - _RIGHT)
    up = _axis([point[1] for point in points], _HEIGHT - _BOTTOM, _TOP, may_be_log=True)
    parts = [*_rules(across, up, x, y, integral_x), *(_line(number, curve, across, up) for number, curve in shown)]
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )


def _axis(values: Sequence[float], begin: float, end: float, *, may_be_log: bool = False) -> _Axis:
    low, high = min(values), max(values)
    if may_be_log and low > 0 and high > _LOGARITHMIC * low:
        return _Axis(low, high, begin, end, is_log=True)
    if high == low or (may_be_log and high - low <= _FLAT * max(abs(low), abs(high))):
        around = abs(high) / 10 or 1.0
        return _Axis(low - (around if may_be_log else 0.0), high + around, begin, end)
    return _Axis(low, high, begin, end)


def _rules(across: _Axis, up: _Axis, x: str, y: str, integral_x: bool) -> list[str]:
    """The grid, the numbers at it, and what they count."""
    parts = []
    for value, word in zip(heights := up.labels(), words_for(heights), strict=True):
        at = up.place(value)
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 5:.1f}" text-anchor="end">{word}</text>')
    for value, word in zip(places := across.labels(integral=integral_x), words_for(places), strict=True):
        at = across.place(value)
        parts.append(f'<line class="rule" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{word}</text>')
    label = f"{x} (up: {y})" if y else x
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [*parts, f'<text class="axis" x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(label)}</text>']


def _line(number: int, curve: Curve, across: _Axis, up: _Axis) -> str:
    paint = f'stroke="{COLOURS[number % len(COLOURS)]}" stroke-dasharray="{_DASHES[number % len(_DASHES)]}"'
    runs: list[list[str]] = [[]]
    for point in curve.points:
        if all(map(math.isfinite, point)) and not (up.is_log and point[1] <= 0):
            runs[-1].append(f"{across.place(point[0]):.1f},{up.place(point[1]):.1f}")
        elif runs[-1]:
            runs.append([])
    parts = [f'<polyline class="curve" {paint} points="{" ".join(run)}"/>' for run in runs if len(run) > 1]
    alone = [run[0].split(",") for run in runs if len(run) == 1]
    fill = COLOURS[number % len(COLOURS)]
    return "".join([*parts, *(f'<circle cx="{at}" cy="{height}" r="4" fill="{fill}"/>' for at, height in alone)])


def _key(number: int, name: str) -> str:
    paint = f'stroke="{COLOURS[number % len(COLOURS)]}" stroke-dasharray="{_DASHES[number % len(_DASHES)]}"'
    sample = (
        f'<svg class="key" viewBox="0 0 26 8" aria-hidden="true"><line x1="0" x2="26" y1="4" y2="4" {paint}/></svg>'
    )
    return f"<span>{sample}{escape(name)}</span>"


def _finite(points: Points) -> list[tuple[float, float]]:
    return [point for point in points if all(map(math.isfinite, point))]
