"""A learning-rate range test: a hundred steps with a rate that rises from 1e-6 to 10, and what their losses say.

After Smith, "Cyclical Learning Rates for Training Neural Networks" (2017). Losses are smoothed; where the smoothed one
is least the rate is already too high to begin with: a tenth of that is the first guess.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from manyhosts.control import variables
from manyhosts.errors import ScriptError
from manyhosts.records import metrics
from manyhosts.trials.runs import Place, Trial
from manyhosts.tune.kept_trials import KeptTrials
from manyhosts.tune.search import Parameter

STEPS = 100
LOWEST, HIGHEST = 1e-6, 10.0
FEWEST = 20
"""Losses without which nothing is said."""
SETTINGS = {
    "duration": f"{STEPS} steps", "validate_every": "1000000000 steps", "snapshots.every": "1000000000 steps",
    "snapshots.to": "none",
}  # fmt: skip
INSIDE = "manyhosts.tune.in_worker"
_FALLBACK = (1e-5, 1.0)
_SMOOTH = 0.9
_DIVERGED = 3.0
"""Falls that the loss has risen again: what it fell by, and not its level, which may be below zero."""
_FELL, _NOISE = 0.01, 0.5
"""A fall is one of more than this share of the first losses, and of their spread."""
_BELOW, _GUESS = 300.0, 10.0


def rate_of(step: int) -> float:
    """The learning rate of step number `step` + 1."""
    return float(LOWEST * (HIGHEST / LOWEST) ** (min(step, STEPS - 1) / (STEPS - 1)))


def ranges(losses: Sequence[float]) -> tuple[float, float, float] | None:
    """The lowest rate worth trying, a first guess and the highest; None where the losses do not say it.

    `losses`: of the steps, in order; what is no number ends them.
    """
    smooth, best, place, diverged = 0.0, math.inf, 0, False
    begin = [loss for loss in losses[:FEWEST] if math.isfinite(loss)]  # at rates that change nothing yet
    first = statistics.fmean(begin) if begin else math.nan
    least = max(_FELL * abs(first), _NOISE * statistics.pstdev(begin)) if begin else math.nan
    for step, loss in enumerate(losses):
        smooth = _SMOOTH * smooth + (1 - _SMOOTH) * loss
        value = smooth / (1 - _SMOOTH ** (step + 1))
        fall = first - best
        if not math.isfinite(loss) or (step > FEWEST and fall > least and value - best > _DIVERGED * fall):
            diverged = True
            break
        if value < best:
            best, place = value, step
    if (len(losses) < FEWEST and not diverged) or place < FEWEST or not first - best > least:
        return None  # too short, or no rate made the loss fall
    high = rate_of(place)
    return high / _BELOW, high / _GUESS, high


def with_rates(
    kept: KeptTrials, run: Callable[[Place, Sequence[str]], tuple[Trial, float]], say: Callable[[str], None]
) -> tuple[Parameter, ...]:
    """The parameters of the search, `lr` with a range, and its first guess as the first trial.

    `run`: runs words to their end, or to that of the budget, and says what seconds it cost.

    Raises:
        ScriptError: the test has made no step.
    """
    parameters = kept.asked.parameters
    if not any(each.kind == "auto" for each in parameters):
        return parameters
    found = kept.attribute("rates", None)
    if found is None:
        say("learning-rate range test: 100 steps with rates from 1e-6 to 10")
        found, seconds = _tested(kept, run, say)
        kept.study.set_user_attr("rates", found)
        kept.study.set_user_attr("range test seconds", seconds)
        if len(found) > len(_FALLBACK):
            kept.study.enqueue_trial({"lr": found[2]})
    low, high = found[:2]
    return tuple(replace(each, kind="log", low=low, high=high) if each.kind == "auto" else each for each in parameters)


def _tested(
    kept: KeptTrials, run: Callable[[Place, Sequence[str]], tuple[Trial, float]], say: Callable[[str], None]
) -> tuple[list[float], float]:
    """The lowest and the highest rate, and a first guess where there is one; and the seconds it took."""
    place = Place(kept.folder, "range-test")
    asked = replace(kept.asked, settings={**kept.asked.settings, **SETTINGS})
    more = ["--env", f"{variables.FIRST}={INSIDE}", "--run-dir", str(place.run.path)]
    done, seconds = run(place, asked.command(asked.slots[0], {}, more))
    lines = metrics.read(place.run.metrics) if place.run.metrics.exists() else []
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    if not losses:
        raise ScriptError(
            f"the learning-rate range test has made no step: {done.reason()}",
            where=str(place.log),
            fix="give the range yourself: --search lr=log:1e-5:1, or search other settings",
        )
    found = ranges([loss if isinstance(loss, int | float) else math.nan for loss in losses])
    if found is None:
        low, high = _FALLBACK
        say(f"its losses do not say which rates are good: {low:g} to {high:g} are tried")
        return [low, high], seconds
    low, guess, high = found
    say(f"rates from {low:.2g} to {high:.2g} are tried, {guess:.2g} first")
    return [low, high, guess], seconds
