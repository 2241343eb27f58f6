"""The tables of a study as text: rows of cells, the first row the titles. Both the terminal and the page show them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from manyhosts.study.fits import Fit
from manyhosts.study.rows import Row, Size, loss_that_all_reached, samples_per_second
from manyhosts.study.study import Study
from manyhosts.study.times import CAUSES
from manyhosts.units import bytes_in_words, seconds_in_words

NOTHING = "-"
SHORT = {
    "compute": "computing",
    "communication_exposed": "exchanges",
    "data_wait": "data",
    "straggler": "slowest",
    "evaluation": "evaluation",
    "snapshot": "snapshots",
    "start_up": "start",
    "other": "other",
}
"""A word for each cause, for the head of a column and a legend."""
COLOURS = {
    "compute": "#1f6fb4",
    "communication_exposed": "#d1631f",
    "data_wait": "#2a8a57",
    "straggler": "#b3273a",
    "evaluation": "#8e4bb0",
    "snapshot": "#a07c00",
    "start_up": "#5fa8d3",
    "other": "#9aa1a9",
}
"""Of each cause, in every picture."""
Table = list[list[str]]


def speed(study: Study) -> Table:
    """How fast each size is."""
    head = [*_head(study), "samples/s", "epoch", "epochs", "speed-up", "efficiency", "sent/step", "restarts"]
    table = [head]
    for size in _sizes(study):
        done = [row.measured for row in size.rows if row.measured]
        table.append(
            [
                *_named(size.row, study),
                _mean([samples_per_second(each.spent) for each in done], "{:,.0f}"),
                NOTHING if size.epoch_seconds is None else seconds_in_words(size.epoch_seconds),
                _mean([each.summary.epochs for each in done], "{:.3g}"),
                _spread([row.speed_up for row in size.rows], "{:.2f}"),
                _spread(
                    [None if row.efficiency is None else 100 * row.efficiency for row in size.rows], "{:.0f}", " %"
                ),
                _mean([each.summary.bytes_sent_per_step for each in done], bytes_in_words),
                str(sum(each.summary.restarts for each in done)),
            ]
        )
    return table


def results(study: Study) -> Table:
    """What each size has learned. `time to` is the training time to a loss that every point of the study reached."""
    goal = loss_that_all_reached(study.rows)
    tests = sorted({name for row in study.rows if row.measured for name in row.measured.summary.test if name != "loss"})
    head = [*_head(study), "rate", "batch", "steps/epoch", "best loss", "test loss", *(f"test {n}" for n in tests)]
    table = [[*head, *([] if goal is None else [f"time to loss {goal:.4g}"])]]
    for size in _sizes(study):
        done = [row.measured for row in size.rows if row.measured]
        summary = done[0].summary
        table.append(
            [
                *_named(size.row, study),
                NOTHING if summary.lr is None else f"{summary.lr:.4g}",
                str(summary.global_batch or NOTHING),
                str(summary.steps_per_epoch or NOTHING),
                _spread([each.spent.lowest_loss() for each in done], "{:.4f}"),
                _spread([each.summary.test.get("loss") for each in done], "{:.4f}"),
                *(_spread([each.summary.test.get(name) for each in done], "{:.4f}") for name in tests),
                *([] if goal is None else [_mean([each.spent.seconds_to(goal) for each in done], seconds_in_words)]),
            ]
        )
    return table


def lost(study: Study) -> Table:
    """The share of the ideal speed that each size lost to each cause, in percent."""
    table = [[*_head(study), *(SHORT[cause] for cause in CAUSES), "together"]]
    for size in _sizes(study):
        shares = [size.causes[cause] for cause in CAUSES]
        cells = [f"{100 * share:.1f}".replace("-0.0", "0.0") for share in (*shares, 1 - size.efficiency)]
        table.append([*_named(size.row, study), *cells])
    return table


def note_on_lost(study: Study) -> str:
    """What negative shares are, where there are some that can be seen; else empty."""
    if all(share > -0.0005 for size in _sizes(study) for share in size.causes.values()):
        return ""
    return (
        "Negative: less than an even share of what the smallest size spent on it, so a gain; the others add up to more."
    )


def laws(study: Study) -> Table:
    """The laws that were fitted, with their coefficients."""
    table = [["law", *study.asked.varied, "coefficient", "value", "95 % between", "error"]]
    for values, found in study.fits().items():
        for fit in found.values():
            own = [fit.title, *_values(study, values)]
            for name, value in fit.coefficients.items():
                ends = None if fit.intervals is None else fit.intervals[name]
                between = "too few sizes" if ends is None else f"{ends[0]:.4f} … {ends[1]:.4f}"
                table.append([*own, name, f"{value:.4f}", between, error_of(fit)])
    return table


def error_of(fit: Fit) -> str:
    """How far the law is from what was measured: nothing where it goes through every point, whatever they are."""
    return "too few sizes" if fit.intervals is None else f"{100 * fit.error:.1f} %"


def failures(study: Study) -> list[tuple[str, str]]:
    """Which points did not end well, and why."""
    return [(str(row.point), row.outcome.reason or row.outcome.status) for row in study.rows if row.measured is None]


def _sizes(study: Study) -> list[Size]:
    return [size for group in study.sizes.values() for size in group]


def _head(study: Study) -> list[str]:
    return ["workers", *(["nodes"] if study.asked.nodes else []), *study.asked.varied]


def _named(row: Row, study: Study) -> list[str]:
    nodes = [str(row.point.nodes)] if study.asked.nodes else []
    return [str(row.workers), *nodes, *_values(study, row.point.varied)]


def _values(study: Study, varied: Sequence[tuple[str, str]]) -> list[str]:
    """Of each setting that is varied; a variant may be without one that its strategy lacks."""
    return [dict(varied).get(key, NOTHING) for key in study.asked.varied]


def _mean(values: Sequence[float | None], form: str | Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    return _formed(statistics.fmean(known), form) if known else NOTHING


def _spread(values: Sequence[Any], form: str, unit: str = "") -> str:
    """Mean, and the standard deviation where there are several."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return NOTHING
    mean = _formed(statistics.fmean(known), form)
    return f"{mean} ± {_formed(statistics.stdev(known), form)}{unit}" if len(known) > 1 else f"{mean}{unit}"


def _formed(value: float, form: str | Callable[[float], str]) -> str:
    return form(value) if callable(form) else form.format(value)
