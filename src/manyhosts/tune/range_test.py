"""A learning-rate range test: a hundred steps with a rate that rises from 1e-6 to 10, and what their losses say.

After Smith, "Cyclical Learning Rates for Training Neural Networks" (2017). Losses are smoothed; where the smoothed one
is least the rate is already too high to begin with: a tenth of that is the first guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

STEPS = 100
LOWEST, HIGHEST = 1e-6, 10.0
FEWEST = 20
"""Losses without which nothing is said."""
SETTINGS = {
    "duration": f"{STEPS} steps", "validate_every": "1000000000 steps", "snapshots.every": "1000000000 steps",
    "snapshots.to": "none",
}  # fmt: skip
_SMOOTH = 0.9
_DIVERGED = 4.0
_BELOW, _GUESS = 300.0, 10.0


def rate_of(step: int) -> float:
    """The learning rate of step number `step` + 1."""
    return float(LOWEST * (HIGHEST / LOWEST) ** (min(step, STEPS - 1) / (STEPS - 1)))


def ranges(losses: Sequence[float]) -> tuple[float, float, float] | None:
    """The lowest rate worth trying, a first guess and the highest; None where the losses do not say it.

    `losses`: of the steps, in order; what is no number ends them.
    """
    smooth, best, place, diverged = 0.0, math.inf, 0, False
    for step, loss in enumerate(losses):
        smooth = _SMOOTH * smooth + (1 - _SMOOTH) * loss
        value = smooth / (1 - _SMOOTH ** (step + 1))
        if not math.isfinite(loss) or (step > FEWEST and value > _DIVERGED * best):
            diverged = True
            break
        if value < best:
            best, place = value, step
    first = next((loss for loss in losses), math.nan)
    if (len(losses) < FEWEST and not diverged) or place < FEWEST or not best < 0.99 * first:
        return None  # too short, or no rate made the loss fall
    high = rate_of(place)
    return high / _BELOW, high / _GUESS, high


def of_steps(lines: Sequence[Mapping[str, object]]) -> tuple[float, float, float] | None:
    """The same of the lines of `metrics.jsonl`."""
    losses = [line["loss"] for line in lines if line.get("event") == "step"]
    return ranges([loss if isinstance(loss, int | float) else math.nan for loss in losses])
