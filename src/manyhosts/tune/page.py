"""The page of a search: the best and how to have it again, the history, what mattered, every trial as a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from manyhosts.records.atomic_file import read_json
from manyhosts.report import curves
from manyhosts.report.page import Section, as_typed, page, pairs, paragraphs, table
from manyhosts.tune.budget import Spent, in_words
from manyhosts.tune.search import Parameter
from manyhosts.tune.tuner import ASKED, NAME, SCHEMA_VERSION

_WIDTH, _HEIGHT, _TOP, _SIDE = 900, 320, 40, 70


def search_page(folder: Path) -> str:
    """The page of the search in `folder`, from the files there alone.

    Raises:
        ConfigError: a file is missing or damaged, or another version wrote it.
    """
    found = read_json(folder / NAME, version=SCHEMA_VERSION)
    asked = read_json(folder / ASKED, version=SCHEMA_VERSION)
    parameters = tuple(
        Parameter(name=name, kind=kind, low=low, high=high, step=step, choices=tuple(choices))
        for name, kind, low, high, step, choices in asked["parameters"]
    )
    trials, best, metric, maximise = found["trials"], found["best"], asked["metric"], asked["maximise"]
    valued = [trial for trial in trials if trial["value"] is not None]
    spent = in_words(Spent(**found["spent"]))
    words = [f"Ended: {asked['reason']}." if asked["reason"] else "Under way, or interrupted.", f"Spent: {spent}."]
    if best is not None:
        words.insert(0, f"The best {metric} is {best['value']:.5g}, of trial {best['number']}.")
    again = "" if best is None else as_typed(best["command"])
    sections = [Section("", f'<div class="verdict">{paragraphs([" ".join(words)])}</div>{again}')]
    if valued:
        sections += [
            Section("History", curves.grid([_history(valued, metric, maximise=maximise)])),
            Section("What mattered", _importance(asked.get("importance", {}))),
            Section("Parallel coordinates", _parallel(valued, parameters, metric, maximise=maximise)),
        ]
    sections += [
        Section("Trials", table(_rows(trials, parameters, metric), kind="told")),
        Section("What was asked", pairs(_facts(asked, found))),
    ]
    return page(f"A search of {asked['script']}", f"{len(trials)} trials", sections)


def _history(trials: Sequence[Mapping[str, Any]], metric: str, *, maximise: bool) -> str:
    points = [(float(trial["number"]), float(trial["value"])) for trial in trials]
    best, so_far = [], -math.inf if maximise else math.inf
    for number, value in points:
        so_far = max(so_far, value) if maximise else min(so_far, value)
        best.append((number, so_far))
    drawn = [curves.Curve("each trial", points), curves.Curve("the best so far", best)]
    return curves.figure(f"{metric} by trial", drawn, x="trial", y=metric, integral_x=True)


def _importance(found: Mapping[str, float]) -> str:
    """Which parameters the value depends on."""
    if not found:
        return paragraphs(["It is said when a search has ended, of enough completed trials."])
    return table([["parameter", "share"], *([name, f"{share:.0%}"] for name, share in found.items())], kind="named")


def _parallel(
    trials: Sequence[Mapping[str, Any]], parameters: Sequence[Parameter], metric: str, *, maximise: bool
) -> str:
    """A line for each trial over an axis for each parameter, the last axis its value; the better the darker."""
    values = sorted(float(trial["value"]) for trial in trials)
    axes = [*parameters, Parameter(name=metric, kind="float", low=values[0], high=values[-1])]
    gap = (_WIDTH - 2 * _SIDE) / (len(axes) - 1)
    bottom = _HEIGHT - _TOP
    drawn = []
    for number, axis in enumerate(axes):
        x = _SIDE + number * gap
        ends = (axis.choices[0], axis.choices[-1]) if axis.choices else (f"{axis.low:.3g}", f"{axis.high:.3g}")
        drawn.append(f'<line class="rule" x1="{x:.0f}" y1="{_TOP}" x2="{x:.0f}" y2="{bottom}"/>')
        for y, text in ((_TOP - 22, axis.name), (_TOP - 5, ends[1]), (bottom + 18, ends[0])):
            drawn.append(f'<text text-anchor="middle" x="{x:.0f}" y="{y}">{escape(text)}</text>')
    for trial in trials:
        settings = {**trial["settings"], metric: trial["value"]}
        points = [
            f"{_SIDE + number * gap:.0f},{bottom - _place(axis, settings[axis.name]) * (bottom - _TOP):.1f}"
            for number, axis in enumerate(axes)
            if axis.name in settings
        ]
        rank = values.index(float(trial["value"])) / max(1, len(values) - 1)
        shade = 0.15 + 0.75 * (rank if maximise else 1 - rank)
        drawn.append(
            f'<polyline fill="none" stroke="{curves.COLOURS[0]}" stroke-width="2" opacity="{shade:.2f}" '
            f'points="{" ".join(points)}"><title>trial {trial["number"]}</title></polyline>'
        )
    return f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(drawn)}</svg>'


def _place(axis: Parameter, value: Any) -> float:
    """Where on its axis a value is: 0 below, 1 above."""
    if axis.choices:
        return axis.choices.index(value) / max(1, len(axis.choices) - 1) if value in axis.choices else 0.0
    if "log" in axis.kind:
        return math.log(float(value) / axis.low) / math.log(axis.high / axis.low)
    return (float(value) - axis.low) / ((axis.high - axis.low) or 1.0)


def _rows(trials: Sequence[Mapping[str, Any]], parameters: Sequence[Parameter], metric: str) -> list[list[str]]:
    names = [each.name for each in parameters]

    def shown(value: Any) -> str:
        return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)

    return [["trial", *names, metric, "seconds", "status"]] + [
        [
            str(trial["number"]), *(shown(trial["settings"].get(name)) for name in names), shown(trial["value"]),
            f"{trial['seconds']:.1f}", trial["status"],
        ]
        for trial in trials
    ]  # fmt: skip


def _facts(asked: Mapping[str, Any], found: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings = " ".join(f"{key}={value}" for key, value in asked["settings"].items())
    facts = [("budget", found["budget"]["text"]), ("sampler", asked["sampler"]), ("pruner", asked["pruner"])]
    return [*facts, ("settings of all trials", settings), ("arguments", " ".join(asked["arguments"]))]
