"""The interval that nine of ten measured steps are expected in, and how far off plans have been.

What was uncertain in a plan's own figures (passes, workers at once, messages, the arithmetic of a compression) says how
uncertain a prediction is. How many times that an interval has to be wide is not assumed: it is what nine of ten
trainings of a recorded benchmark needed, which ships as `past.json`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from manyhosts.planner.compute import passes
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Measured
from manyhosts.records.atomic_file import read_json

INSIDE = 0.9
"""Of measured steps."""
_ALWAYS = 0.1
"""That the logarithm of a step is uncertain by, also where every figure of a plan is sure: no model is the thing. How
much it is decides only which intervals are the wider ones; with this the record's are narrowest in the middle."""

_MOST = 0.25
"""What the deviation of one figure counts for at most: a median of many is not as unsure as each of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What the recorded benchmark found."""

    record: str
    kinds: int
    """Of models."""
    steps: int
    """Trainings that were predicted, and then run."""
    median: float
    """Of `|predicted - measured| / measured`."""
    worst: float
    width: float
    """How many times what is uncertain an interval has to reach to either side."""

    def __str__(self) -> str:
        return (
            f"Plans have been off by {100 * self.median:.1f} % (median), at worst {100 * self.worst:.1f} %: "
            f"{self.steps} steps of {self.kinds} kinds of models that compute for real."
        )


@cache
def past() -> Past:
    """What ships."""
    return Past(**read_json(Path(__file__).with_name("past.json")))


def uncertain(measured: Measured, group: Group, compression: str, seconds: Callable[[Measured, Group], float]) -> float:
    """The standard deviation of the logarithm of a step, of which `seconds` gives the seconds.

    Each uncertain figure is made worse by its own deviation, and the step is predicted again; all are taken to be
    independent.
    """
    own = passes(measured, group)
    shared = measured.contention_spread if group.per_machine > 1 else 0.0
    of_passes = math.hypot(own.spread / own.total if own.total else 0.0, shared)
    way = measured.compression.get(compression)
    networks = ([group.between] if group.nodes > 1 else []) + ([group.within] if group.workers_per_node > 1 else [])
    of_messages = max((network.spread for network in networks), default=0.0)
    base = seconds(measured, group)
    worse = (
        seconds(measured.slower(compute=1 + min(of_passes, _MOST)), group),
        seconds(measured, group.slower(1 + min(of_messages, _MOST))),
        seconds(measured.slower(communication=1 + (0.0 if way is None else min(way.spread, _MOST))), group),
    )
    return math.hypot(_ALWAYS, *(math.log(each / base) for each in worse))


def interval(seconds: float, deviation: float) -> tuple[float, float]:
    """The lowest and the highest that is expected of a step that is predicted to take `seconds`."""
    reach = math.exp(past().width * deviation)
    return seconds / reach, seconds * reach


def score(measured_s: float, predicted_s: float, deviation: float) -> float:
    """How far off a prediction was, in multiples of what was uncertain."""
    return abs(math.log(measured_s / predicted_s)) / deviation


def width_of(scores: Sequence[float]) -> float:
    """Within how many multiples nine of ten further ones are expected, whatever they are distributed like.

    The quantile of split conformal prediction (Lei et al. 2018, JASA 113): the `ceil(0.9 (n + 1))`-th of n; of fewer
    than nine the largest.
    """
    ordered = sorted(scores)
    return ordered[min(len(ordered), math.ceil(INSIDE * (len(ordered) + 1))) - 1]
