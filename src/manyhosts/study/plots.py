"""The plots of a study, as SVG and PNG, by matplotlib.

Each shows one thing: the time of an epoch and the efficiency against the ideal, the causes of what was lost, the loss
against steps and against time, and each test metric against the size. What there are no figures for is not drawn.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from manyhosts.study.columns import COLOURS, SHORT
from manyhosts.study.fits import best
from manyhosts.study.points import WEAK
from manyhosts.study.rows import Size
from manyhosts.study.study import Study, title_of
from manyhosts.study.times import CAUSES

FOLDER = "plots"
MISSING = "the plots need matplotlib, which is not installed: pip install matplotlib"
_LINES = ("#1f6fb4", "#d1631f", "#2a8a57", "#8e4bb0", "#b3273a", "#5b6470", "#a07c00", "#0f8b8d")
"""Of variants and sizes; distinguished by their markers, too."""
_MARKERS = "osD^vPX*"
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e6ea",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}
_INCHES = (4.6, 3.0)
"""So narrow that the smallest words have ten pixels on a telephone, where a plot is as wide as the page."""
_INCHES_PER_BAR = 0.36
_INCHES_PER_ROW = 0.19
"""Of a legend."""
_LETTERS, _KEY_LETTERS = 72, 7
"""Marks next to each other below a plot; those that the mark in front of a name takes the place of."""
_FEW, _SHORT = 3, 16
"""Names, and letters of one, that leave room for curves."""
_MOST_CURVES = 8
_SEEN = 0.05
"""Percent: shares below are not drawn."""
_DOTS_PER_INCH = 160


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture on the disk."""

    name: str
    title: str
    svg: Path
    png: Path


def is_possible() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(study: Study, folder: Path) -> list[Plot]:
    """Draw what there are figures for into `folder`, and take away the plots that were there before."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.svg"), *folder.glob("*.png")):
        old.unlink()
    drawn = []
    for name, title, paint in _pictures(study):
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
            figure = Figure(figsize=_INCHES, layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            paint(axes)
            bars = len(axes.get_yticks()) if name == "causes" else 0
            height = max(_INCHES[1], 1.2 + _INCHES_PER_BAR * bars)
            figure.set_size_inches(_INCHES[0], height + _INCHES_PER_ROW * _legend(figure, axes))
            axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
            plot = Plot(name, title, folder / f"{name}.svg", folder / f"{name}.png")
            figure.savefig(plot.svg, metadata={"Date": None})
            figure.savefig(plot.png, dpi=_DOTS_PER_INCH)
            drawn.append(plot)
    return drawn


def _legend(figure: Any, axes: Any) -> int:
    """Say what is what: inside where that is little, else below, so that no word lies on a curve; its rows below."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max((len(label) for label in labels), default=0)
    if len(labels) <= _FEW and longest <= _SHORT:
        axes.legend()
        return 0
    columns = max(1, _LETTERS // (longest + _KEY_LETTERS))
    figure.legend(handles, labels, loc="outside lower left", ncols=columns)
    return -(-len(labels) // columns)


def _pictures(study: Study) -> list[tuple[str, str, Callable[[Any], None]]]:
    groups = {_name(varied, study): group for varied, group in study.sizes.items()}
    found: list[tuple[str, str, Callable[[Any], None]]] = []
    if any(size.epoch_seconds for group in groups.values() for size in group):
        found.append(("epoch-time", "Time of an epoch", lambda axes: _epoch_time(axes, groups)))
    found.append(("efficiency", "Efficiency", lambda axes: _efficiency(axes, study, groups)))
    if bars := _what_was_lost(groups):
        found.append(("causes", "Share of the ideal speed lost", lambda axes: _causes(axes, bars)))
    kind, curves = _losses(groups)
    if curves:
        found.append(("loss-steps", f"{kind} against steps", lambda axes: _curves(axes, curves, kind, 1)))
        found.append(("loss-time", f"{kind} against time", lambda axes: _curves(axes, curves, kind, 0)))
    tests = {name for group in groups.values() for size in group for name in _tests(size)}
    for metric in sorted(tests - {"loss"}):
        title = f"Test {metric} against workers"
        found.append(
            (re.sub(r"[^\w.=-]+", "_", f"test-{metric}"), title, partial(_metric, groups=groups, metric=metric))
        )
    return found


def _name(varied: Sequence[tuple[str, str]], study: Study) -> str:
    """Of a variant; where several settings are varied their values alone, for tables say of what."""
    if len(study.asked.varied) < 2:
        return title_of(varied)
    return ", ".join(f"{value} a worker" if key == WEAK else value for key, value in varied)


def _epoch_time(axes: Any, groups: Mapping[str, Sequence[Size]]) -> None:
    for number, (title, group) in enumerate(groups.items()):
        known = [(size.row.workers, size.epoch_seconds) for size in group if size.epoch_seconds]
        if not known:
            continue
        axes.plot(*zip(*known, strict=True), label=title or "measured", **_looks(number))
        first, seconds = known[0]
        ideal = [(workers, seconds * first / workers) for workers, _ in known]
        axes.plot(*zip(*ideal, strict=True), "--", color=_LINES[number % len(_LINES)], linewidth=1, alpha=0.7,
                  label="ideal" if number == 0 else None)  # fmt: skip
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    _workers(axes, groups)


def _efficiency(axes: Any, study: Study, groups: Mapping[str, Sequence[Size]]) -> None:
    axes.axhline(100, color="#5b6470", linestyle="--", linewidth=1, label="ideal")
    laws = {_name(varied, study): best(found) for varied, found in study.fits().items()}
    for number, (title, group) in enumerate(groups.items()):
        points = [(size.row.workers, 100 * size.efficiency) for size in group]
        axes.plot(*zip(*points, strict=True), label=title or "measured", **_looks(number), linestyle="none")
        for size in group:
            seeds = [100 * row.efficiency for row in size.rows if row.efficiency is not None]
            if len(seeds) > 1:
                axes.plot([size.row.workers] * 2, [min(seeds), max(seeds)], color=_LINES[number % len(_LINES)])
        law = laws[title]
        if law is not None:
            first, last = points[0][0], points[-1][0]
            xs = [first * (last / first) ** (place / 60) for place in range(61)]
            ys = [100 * law.speed_up(x / first) / (x / first) for x in xs]
            name = law.title if number == 0 else None
            axes.plot(xs, ys, color=_LINES[number % len(_LINES)], linewidth=1.2, alpha=0.8, label=name)
    axes.set_ylabel("% of the ideal speed")
    axes.set_ylim(bottom=0)
    _workers(axes, groups)


def _causes(axes: Any, bars: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    over, under = [0.0] * len(bars), [0.0] * len(bars)
    for cause in CAUSES:
        shares = [100 * causes[cause] for _, causes in bars]
        starts = [over[place] if share >= 0 else under[place] for place, share in enumerate(shares)]
        if any(abs(share) >= _SEEN for share in shares):
            axes.barh(range(len(bars)), shares, 0.6, left=starts, color=COLOURS[cause], label=SHORT[cause])
        over = [high + max(0.0, share) for high, share in zip(over, shares, strict=True)]
        under = [low + min(0.0, share) for low, share in zip(under, shares, strict=True)]
    axes.axvline(0, color="#5b6470", linewidth=0.8)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("% of the ideal speed")
    axes.grid(axis="y", visible=False)


def _what_was_lost(groups: Mapping[str, Sequence[Size]]) -> list[tuple[str, Mapping[str, float]]]:
    """A bar for each size above the smallest of its variant; none where next to nothing was lost anywhere."""
    bars: list[tuple[str, Mapping[str, float]]] = []
    for title, group in groups.items():
        values = title.partition("=")[2] or title
        for size in group[1:]:
            workers = f"{size.row.workers} worker{'s' * (size.row.workers != 1)}"
            bars.append((f"{workers}\n{values}" if values else workers, size.causes))
    seen = any(100 * abs(share) >= _SEEN for _, causes in bars for share in causes.values())
    return bars if seen else []


def _losses(groups: Mapping[str, Sequence[Size]]) -> tuple[str, dict[str, list[tuple[float, int, float]]]]:
    """Of the first seed of each size: the validation loss where there are curves of it, else the training loss."""
    runs = {}
    few = sum(len(group) for group in groups.values()) <= _MOST_CURVES
    for title, group in list(groups.items())[:_MOST_CURVES]:
        ends = {id(group[0]): group[0], id(group[-1]): group[-1]}.values()
        for size in group if few else ends:
            done = size.row.measured
            workers = f"{size.row.workers} worker{'s' * (size.row.workers != 1)}"
            if done is not None:
                runs[f"{workers}, {title}" if title else workers] = done.spent
    validated = {
        name: [(when, step, values["loss"]) for when, step, values in run.validations if "loss" in values]
        for name, run in runs.items()
    }
    if any(len(curve) > 1 for curve in validated.values()):
        return "Validation loss", {name: curve for name, curve in validated.items() if curve}
    trained = {name: list(run.losses) for name, run in runs.items()}
    return "Training loss", {name: curve for name, curve in trained.items() if len(curve) > 1}


def _curves(axes: Any, curves: Mapping[str, Sequence[tuple[float, int, float]]], kind: str, column: int) -> None:
    for number, (name, curve) in enumerate(curves.items()):
        looks = _looks(number) if len(curve) < 40 else {**_looks(number), "marker": ""}
        looks["markersize"] = 3.5
        axes.plot([point[column] for point in curve], [point[2] for point in curve], label=name, **looks)
    finite = [point[2] for curve in curves.values() for point in curve if math.isfinite(point[2]) and point[2] > 0]
    if finite and max(finite) > 20 * min(finite):
        axes.set_yscale("log")
    axes.set_xlabel("seconds of training" if column == 0 else "steps")
    axes.set_ylabel(kind.lower())


def _metric(axes: Any, groups: Mapping[str, Sequence[Size]], metric: str) -> None:
    for number, (title, group) in enumerate(groups.items()):
        seeds = [(size.row.workers, value) for size in group for value in _tests(size).get(metric, [])]
        means = [
            (size.row.workers, sum(values) / len(values)) for size in group if (values := _tests(size).get(metric))
        ]
        colour = _LINES[number % len(_LINES)]
        axes.plot(*zip(*seeds, strict=True), ".", color=colour, alpha=0.5)
        axes.plot(*zip(*means, strict=True), label=title or "mean", **_looks(number))
    axes.set_ylabel(metric)
    _workers(axes, groups)


def _tests(size: Size) -> dict[str, list[float]]:
    """The test's values, by metric, of all seeds."""
    found: dict[str, list[float]] = {}
    for row in size.rows:
        for name, value in (row.measured.summary.test if row.measured else {}).items():
            found.setdefault(name, []).append(value)
    return found


def _looks(number: int) -> dict[str, Any]:
    return {"color": _LINES[number % len(_LINES)], "marker": _MARKERS[number % len(_MARKERS)]}


def _workers(axes: Any, groups: Mapping[str, Sequence[Size]]) -> None:
    """An axis of workers, on which each doubling is as long as the others."""
    counts = sorted({size.row.workers for group in groups.values() for size in group})
    if counts[-1] > counts[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("workers")
