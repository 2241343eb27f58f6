"""How sure a study is that its largest size is worth it, by how much runs of one size differ from each other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manyhosts.study.rows import Row, Size, samples_per_second

_SURE = 0.95
_MOST_REPEATS = 30
_SLICES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Certainty:
    """Of the sentence that the largest size reaches `limit` times the speed of the smallest."""

    limit: float
    probability: float | None
    """None where a size has one run alone, so that it is not known how much runs differ."""
    range: tuple[float, float] | None
    """The lowest and the highest ratio of a run of the largest size to one of the smallest."""
    repeat: int | None
    """Runs of each size that would tell, if they differ as those so far; None where they tell already, or never."""

    def in_words(self, workers: int) -> str:
        """A sentence."""
        limit = f"{self.limit:.3g} times, from where {workers} workers are worth it"
        if self.probability is None or self.range is None:
            unknown = "How sure that is cannot be said from one run of each size"
            return f"{unknown} (the limit is {limit}): --repeat 3 tells."
        low, high = (f"{each:.2f}" for each in self.range)
        if self.probability >= _SURE or self.probability <= 1 - _SURE:
            side = "above" if self.probability >= _SURE else "below"
            chance = max(self.probability, 1 - self.probability)
            return f"That is {side} {limit}, with a probability of {_percent(chance)} (runs: {low} to {high} times)."
        what = (
            f"--repeat {self.repeat} should tell"
            if self.repeat is not None
            else "it is so near that more runs would hardly tell: neither choice is much better"
        )
        return (
            f"Whether that is above {limit}, CANNOT BE TOLD: runs lie between {low} and {high} times, and the "
            f"probability is {_percent(self.probability)}; {what}."
        )

    def to_json(self) -> dict[str, Any]:
        """For `study.json`."""
        return {
            "limit": self.limit,
            "probability": self.probability,
            "range": None if self.range is None else list(self.range),
            "repeat": self.repeat,
        }


def certainty(small: Size, large: Size, pays: float) -> Certainty:
    """Whether each worker beyond the smallest size adds `pays` of its speed, by Welch's test of logarithms."""
    times = large.row.workers / small.row.workers
    limit = 1 + pays * (times - 1)
    before, now = _logarithms(small.rows), _logarithms(large.rows)
    if len(before) < 2 or len(now) < 2:
        return Certainty(limit=limit, probability=None, range=None, repeat=3)
    ratios = [math.exp(one - other) for one in now for other in before]
    variances = [statistics.variance(each) / len(each) for each in (before, now)]
    above = statistics.fmean(now) - statistics.fmean(before) - math.log(limit)
    error = math.sqrt(sum(variances))
    if error == 0:
        probability = 1.0 if above >= 0 else 0.0
    else:
        parts = [variance**2 / (len(each) - 1) for variance, each in zip(variances, (before, now), strict=True)]
        probability = _student(above / error, sum(variances) ** 2 / sum(parts))
    repeat = None
    if 1 - _SURE < probability < _SURE:
        spread = math.sqrt(sum(statistics.variance(each) for each in (before, now)))
        needed = math.ceil((2 * spread / abs(above)) ** 2) + 1 if above else _MOST_REPEATS + 1
        repeat = max(needed, len(now) + 1) if needed <= _MOST_REPEATS else None
    return Certainty(limit=limit, probability=probability, range=(min(ratios), max(ratios)), repeat=repeat)


def _logarithms(rows: Sequence[Row]) -> list[float]:
    rates = [samples_per_second(row.measured.spent) for row in rows if row.measured]
    return [math.log(rate) for rate in rates if rate]


def _student(t: float, freedom: float) -> float:
    """The probability that Student's t is below `t`: Simpson's rule over its density from 0 on."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    end = math.atan(abs(t) / math.sqrt(freedom))  # x = sqrt(freedom) tan u has a bounded range
    step = end / _SLICES

    def density(u: float) -> float:
        return float(scale * math.sqrt(freedom) * math.cos(u) ** (freedom - 1))

    inner = sum((4 if number % 2 else 2) * density(number * step) for number in range(1, _SLICES))
    area = step / 3 * (density(0) + inner + density(end))
    return 0.5 + math.copysign(min(area, 0.5), t)


def _percent(share: float) -> str:
    return f"{min(99.9, 100 * share):.3g} %"
