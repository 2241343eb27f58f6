"""Gives `lr=auto` its range: by a learning-rate range test, once for each search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from manyhosts.control import variables
from manyhosts.errors import ScriptError
from manyhosts.records import metrics
from manyhosts.trials.runs import Place, Trial
from manyhosts.tune import range_test
from manyhosts.tune.kept_trials import KeptTrials
from manyhosts.tune.search import Parameter

INSIDE = "manyhosts.tune.in_worker"
_FALLBACK = (1e-5, 1.0)


def with_rates(
    kept: KeptTrials, run: Callable[[Place, Sequence[str]], Trial], say: Callable[[str], None]
) -> tuple[Parameter, ...]:
    """The parameters of the search, `lr` with a range, and its first guess as the first trial.

    `run`: runs words to their end, or to that of the budget.

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
    kept: KeptTrials, run: Callable[[Place, Sequence[str]], Trial], say: Callable[[str], None]
) -> tuple[list[float], float]:
    """The lowest and the highest rate, and a first guess where there is one; and the seconds it took."""
    place = Place(kept.folder, "range-test")
    asked = replace(kept.asked, settings={**kept.asked.settings, **range_test.SETTINGS})
    more = ["--env", f"{variables.FIRST}={INSIDE}", "--run-dir", str(place.run.path)]
    done = run(place, asked.command(asked.slots[0], {}, more))
    lines = metrics.read(place.run.metrics) if place.run.metrics.exists() else []
    if not any(line["event"] == "step" for line in lines):
        raise ScriptError(
            f"the learning-rate range test has made no step: {done.reason()}",
            where=str(place.log),
            fix="give the range yourself: --search lr=log:1e-5:1, or search other settings",
        )
    found = range_test.of_steps(lines)
    if found is None:
        low, high = _FALLBACK
        say(f"its losses do not say which rates are good: {low:g} to {high:g} are tried")
        return [low, high], done.seconds
    low, guess, high = found
    say(f"rates from {low:.2g} to {high:.2g} are tried, {guess:.2g} first")
    return [low, high, guess], done.seconds
