"""Three laws of scaling, fitted to measured speed-ups by least squares, with 95 % confidence intervals.

    amdahl      S(n) = n / (1 + s (n - 1))              s: the share of the work that is not shared out
    gustafson   S(n) = n - s (n - 1)                    s: the share of the time that is not, as the work grows
    universal   S(n) = n / (1 + a (n - 1) + b n (n - 1))    a: contention; b: what each pair of workers costs

`n` is the size over that of the smallest size. Each law is linear in its coefficients, once turned round, so they are
found by solving equations; they are 0 or more. What is made small is the relative error of the time. Where there are no
more sizes than coefficients the law goes through all points and there is no interval; with fewer there is no fit.

Sources: Amdahl 1967; Gustafson 1988, "Reevaluating Amdahl's law"; Gunther 1993, "A simple capacity model of massively
parallel transaction systems".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

Numbers = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

# Student's t for 95 %, two-sided, by degrees of freedom from 1; beyond, the normal distribution is near enough
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_MOST_WORKERS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A law with its coefficients."""

    law: str
    coefficients: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]] | None
    """95 %; None where there are as many coefficients as sizes, so that nothing is left over to judge by."""
    error: float
    """Root of the mean square of the relative error of the time, over the points."""

    @property
    def title(self) -> str:
        """For a reader: `Amdahl's law`."""
        return LAWS[self.law].title

    def speed_up(self, times: float) -> float:
        """At `times` the smallest size."""
        return LAWS[self.law].speed_up(times, *self.coefficients.values())

    def fastest(self) -> float | None:
        """The size at which the speed-up is highest; None where it grows for ever."""
        if self.law != "universal" or self.coefficients["pairs"] <= 0:
            return None
        return math.sqrt(max(0.0, 1 - self.coefficients["contention"]) / self.coefficients["pairs"])

    def pays_up_to(self, least: float) -> int:
        """The largest size up to which each further one adds at least `least` times the smallest one's speed."""
        size = 1
        while size < _MOST_WORKERS and self.speed_up(size + 1) - self.speed_up(size) >= least:
            size += 1
        return size

    def to_json(self) -> dict[str, Any]:
        """For `study.json`."""
        intervals = None if self.intervals is None else {key: list(ends) for key, ends in self.intervals.items()}
        return {"coefficients": dict(self.coefficients), "intervals_95": intervals, "error": self.error}


@dataclass(frozen=True, slots=True)
class _Law:
    """The speed-up is `speed_up(n, …)`; turned round, `left(n, S) = sum of coefficient x right(n)[…]`."""

    title: str
    names: tuple[str, ...]
    speed_up: Callable[..., float]
    left: Callable[[Numbers, Numbers], Numbers]
    right: Callable[[Numbers], Sequence[Numbers]]
    size_of_error: Callable[[Numbers, Numbers], Numbers]
    """By what a residual is divided to be a relative error of the time."""


LAWS = {
    "amdahl": _Law(
        "Amdahl's law",
        ("serial",),
        lambda n, s: n / (1 + s * (n - 1)),
        lambda n, speed: n / speed - 1,
        lambda n: [n - 1],
        lambda n, speed: n / speed,
    ),
    "gustafson": _Law(
        "Gustafson's law",
        ("serial",),
        lambda n, s: n - s * (n - 1),
        lambda n, speed: n - speed,
        lambda n: [n - 1],
        lambda n, speed: speed,
    ),
    "universal": _Law(
        "universal scalability law",
        ("contention", "pairs"),
        lambda n, a, b: n / (1 + a * (n - 1) + b * n * (n - 1)),
        lambda n, speed: n / speed - 1,
        lambda n: [n - 1, n * (n - 1)],
        lambda n, speed: n / speed,
    ),
}


def fit(law: str, sizes: Sequence[float], speed_ups: Sequence[float]) -> Fit | None:
    """Fit one law to points (size over the smallest, speed-up); None where there are too few sizes above the first."""
    rule = LAWS[law]
    n, speed = numpy.asarray(sizes, float), numpy.asarray(speed_ups, float)
    if len(set(sizes) - {1.0}) < len(rule.names):
        return None
    scale = rule.size_of_error(n, speed)
    rows = numpy.stack(rule.right(n), axis=1) / scale[:, None]
    wanted = rule.left(n, speed) / scale
    found = _not_negative(rows, wanted)
    error = rows @ found - wanted
    spare = len(n) - 1 - len(rule.names)  # 1: speed-ups are over the mean of the smallest size
    intervals = _intervals(rows, found, error, spare) if spare > 0 else None
    return Fit(
        law=law,
        coefficients=dict(zip(rule.names, map(float, found), strict=True)),
        intervals=None if intervals is None else dict(zip(rule.names, intervals, strict=True)),
        error=float(numpy.sqrt(numpy.mean(error**2))),
    )


def _not_negative(rows: Numbers, wanted: Numbers) -> Numbers:
    """Least squares with coefficients of 0 or more: each set of columns is tried, for there are two at most."""
    least, best = math.inf, numpy.zeros(rows.shape[1])
    columns = range(rows.shape[1])
    for count in range(rows.shape[1], -1, -1):
        for used in itertools.combinations(columns, count):
            found = numpy.zeros(rows.shape[1])
            if used:
                found[list(used)] = numpy.linalg.lstsq(rows[:, list(used)], wanted, rcond=None)[0]
            loss = float(numpy.sum((rows @ found - wanted) ** 2))
            if (found >= 0).all() and loss < least:
                least, best = loss, found
    return best


def _intervals(rows: Numbers, found: Numbers, error: Numbers, spare: int) -> list[tuple[float, float]]:
    """95 % of each coefficient, from what the law leaves over."""
    variance = float(error @ error) / spare
    t = _T_95[spare - 1] if spare <= len(_T_95) else 1.96
    width = t * numpy.sqrt(variance * numpy.diagonal(numpy.linalg.pinv(rows.T @ rows)))
    return [(max(0.0, float(value - half)), float(value + half)) for value, half in zip(found, width, strict=True)]


def fits(sizes: Sequence[float], speed_ups: Sequence[float]) -> dict[str, Fit]:
    """Every law that the points are enough for."""
    found = {law: fit(law, sizes, speed_ups) for law in LAWS}
    return {law: each for law, each in found.items() if each is not None}


def best(found: Mapping[str, Fit]) -> Fit | None:
    """The law to predict by: the universal one where there is one, for it contains Amdahl's; else Amdahl's."""
    return found.get("universal") or found.get("amdahl")
