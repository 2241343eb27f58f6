"""The parts of a page about one run that change while it runs: the finished page and the live one share them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from manyhosts.listeners.figures import amount, clock, figures, number, rate
from manyhosts.records.summary import PARTS
from manyhosts.report.curves import Curve, grid
from manyhosts.report.curves import figure as plot
from manyhosts.report.history import History
from manyhosts.report.page import folded, paragraphs, table
from manyhosts.report.run import Run
from manyhosts.report.strips import Piece, Strip, legend, shade, strips
from manyhosts.report.windows import Spent, Who, Window
from manyhosts.study.columns import COLOURS
from manyhosts.units import seconds_in_words

PART_NAMES = {
    "compute": "computing",
    "communication_exposed": "waiting for workers",
    "data_wait": "waiting for data",
    "snapshot_stall": "snapshots",
    "other": "other",
}
PART_COLOURS = {part: COLOURS[{"snapshot_stall": "snapshot"}.get(part, part)] for part in PARTS}
STATUS_COLOURS = {"completed": "#2a8a57", "stopped early": "#2a8a57", "interrupted": "#a07c00", "": "#1f6fb4"}
RED = "#b3273a"
_MOST_TOLD = 200
_AT_ONCE = 30
"""Rows of what happened that are seen without a click: a page of 200 would be longer than anybody scrolls."""
_LEAST_SEEN = 1e-4
"""Of the longest step: a part below that is no pixel wide, and may be what rounding leaves of no time at all."""
_LEAST_SLOW = 1.0
ONLY_RANK_0 = (
    "This record holds the times of rank 0 alone. Where several workers train for some seconds, it has those of all."
)


def current_facts(run: Run) -> list[tuple[str, str]]:
    """Its state, in words: for the head of a page."""
    history, last = run.history, run.history.last
    found = [("status", run.status + (f": {run.reason}" if run.reason else ""))]
    total = history.start.get("total_steps")
    if last:
        done = f"{last['step']:,}" + (f" of {total:,}" if total else "")
        epochs = f", epoch {last['epoch'] + 1}" + (f" of {history.epochs}" if history.epochs else "")
        found.append(("step", done + epochs))
        found.append(("training loss", number(last["loss"])))
    if history.validation:
        found.append(("validation", figures(history.validation["values"], ", ")))
    if history.test:
        found.append(("test", figures(history.test["values"], ", ")))
    if history.periods:
        found.append(("time of training", seconds_in_words(history.seconds)))
    left = history.seconds_left(run.longest_s)
    if run.status == "running" and left is not None:
        found.append(("time left", clock(left)))
    if history.samples_per_second and run.status == "running":
        found.append(("speed", rate(history.samples_per_second)))
    if history.restarts:
        found.append(("restarts", str(history.restarts)))
    return found


def curves(run: Run) -> str:
    """Loss, every metric, learning rate and speed, against steps."""
    history = run.history
    trained = Curve("training", [(step, loss) for _, step, loss in history.loss.points()])
    names = sorted({name for _, _, values in history.validations for name in values} - {"loss"})
    validated = {name: Curve("validation", validation_curve(history, name)) for name in ("loss", *names)}
    found = [plot("Loss", [trained, validated["loss"]], x="step", integral_x=True)]
    found += [plot(f"Validation {name}", [validated[name]], x="step", integral_x=True) for name in names]
    rates = Curve("learning rate", [(step, value) for _, step, value in history.rate.points()])
    speeds = Curve("speed", [(step, value) for _, step, value in history.speed.points()])
    found.append(plot("Learning rate", [rates], x="step", integral_x=True))
    found.append(plot("Speed of steps, in samples per second", [speeds], x="step", integral_x=True))
    return grid(found) or paragraphs(["No step is on record, so there is nothing to draw yet."])


def validation_curve(history: History, name: str) -> list[tuple[float, float]]:
    """One value of all validations, against steps."""
    return [(step, values[name]) for _, step, values in history.validations if name in values]


def where_time_went(run: Run) -> str:
    """Of each worker, what its steps were spent on."""
    totals = run.history.times.total()
    if not totals:
        return paragraphs(["No step is on record yet."])
    longest = max(spent.step_s for spent in totals.values())
    rows = [
        Strip(str(who), _bar(spent, longest), f"{_milliseconds(spent.step_s)} a step") for who, spent in totals.items()
    ]
    keys = legend([(PART_NAMES[part], PART_COLOURS[part]) for part in PARTS])
    drawn = strips(rows, label="What the time of a step was spent on, by worker")
    return keys + drawn + table(_times_table(totals), kind="named") + _only_rank_0(run)


def workers_by_steps(run: Run) -> str:
    """A map: darker where a worker took longer in a step for what it does itself, in comparison with all others."""
    windows = run.history.times.blocks()
    if len(windows) < 2:
        return ""
    everybody = sorted({who for window in windows for who in window.times})
    own = [spent.own_s for window in windows for spent in window.times.values()]
    low, high = min(own), sorted(own)[int(0.98 * (len(own) - 1))]
    first, last = windows[0].first, windows[-1].last
    rows = [Strip(str(who), _cells(who, windows, low, high)) for who in everybody]
    drawn = strips(rows, label="Seconds of a step by worker and step", ends=_between(first, last), thin=True)
    words = (
        f"light {_milliseconds(low)}, dark {_milliseconds(high)} of a step that the worker has not waited for others"
    )
    return drawn + paragraphs([f"Across: steps. Each cell: {words}."]) + _only_rank_0(run)


def time_line(run: Run) -> str:
    """When it trained, was saved, continued after a failure, and was held up."""
    history = run.history
    if not history.periods:
        return ""
    begin, end = history.periods[0].begin, max(period.end for period in history.periods)
    total = max(end - begin, 1e-9)

    def moments(kind: str, colour: str) -> list[Piece]:
        return [
            Piece((each.time - begin) / total, (each.time - begin) / total, colour, each.text)
            for each in history.happenings
            if each.kind == kind
        ]

    trained = [
        Piece(
            (each.begin - begin) / total,
            (each.end - begin) / total,
            STATUS_COLOURS.get(each.status, RED),
            each.status or "training",
        )
        for each in history.periods
    ]
    saved = [Piece((when - begin) / total, (when - begin) / total, COLOURS["snapshot"]) for when in history.snapshots]
    rows = [
        Strip("training", trained, amount(len(history.periods), "start")),
        Strip("validations", moments("validation", COLOURS["evaluation"]), str(len(history.validations))),
        Strip("snapshots", saved, str(len(saved))),
        Strip("continued after a failure", moments("restart", RED), str(history.restarts)),
        *(Strip(f"slow: {who}", _slow_pieces(changes, begin, end, total)) for who, changes in history.slow.items()),
    ]
    shown = [row for row in rows if row.pieces]
    ends = tuple(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) for when in (begin, end))
    return strips(shown, label="What happened when", ends=ends)


def happenings(run: Run, *, most: int = _MOST_TOLD) -> str:
    """The last things that happened, the newest first; epochs and snapshots are reported elsewhere."""
    reported = [each for each in run.history.happenings if each.kind not in ("epoch", "snapshot", "copied")]
    rows = [["when", "step", "what"]]
    for each in reversed(reported[-most:]):
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(each.time))
        rows.append([when, f"{each.step:,}", ("▲ " if each.is_trouble else "") + each.text])
    if len(rows) == 1:
        return paragraphs(["Nothing has happened yet."])
    older = len(reported) - most
    note = paragraphs([f"{older:,} older ones are in metrics.jsonl."]) if older > 0 else ""
    head, seen, rest = rows[0], rows[1 : 1 + _AT_ONCE], rows[1 + _AT_ONCE :]
    hidden = folded(f"{amount(len(rest), 'earlier one')}", table([head, *rest], kind="told")) if rest else ""
    return table([head, *seen], kind="told") + hidden + note


def _bar(spent: Spent, longest: float) -> list[Piece]:
    pieces, at = [], 0.0
    for part in PARTS:
        share = spent.seconds.get(part, 0.0) / spent.steps / longest if longest else 0.0
        if share > _LEAST_SEEN:
            words = f"{PART_NAMES[part]}: {_milliseconds(share * longest)}"
            pieces.append(Piece(at, at + share, PART_COLOURS[part], words))
        at += share
    return pieces


def _times_table(totals: dict[Who, Spent]) -> list[list[str]]:
    rows = [["worker", "steps", "a step", *(PART_NAMES[part] for part in PARTS)]]
    for who, spent in totals.items():
        total = sum(spent.seconds.values()) or 1.0
        shares = [f"{100 * spent.seconds.get(part, 0.0) / total:.1f} %" for part in PARTS]
        rows.append([str(who), f"{spent.steps:,}", _milliseconds(spent.step_s), *shares])
    return rows


def _cells(who: Who, windows: Sequence[Window], low: float, high: float) -> list[Piece]:
    pieces, begin = [], windows[0].first
    steps = windows[-1].last - begin + 1
    for window in windows:
        spent = window.times.get(who)
        if spent is not None:
            share = (spent.own_s - low) / (high - low) if high > low else 0.0
            words = f"steps {window.first:,} to {window.last:,}: {_milliseconds(spent.own_s)}"
            at, until = (window.first - begin) / steps, (window.last + 1 - begin) / steps
            pieces.append(Piece(at, until, shade(share), words))
    return pieces


def _between(first: int, last: int) -> tuple[str, ...]:
    return (f"{first:,}", f"{(first + last) // 2:,}", f"{last:,}")


def _slow_pieces(changes: Sequence[tuple[float, float]], begin: float, end: float, total: float) -> list[Piece]:
    pieces = []
    for place, (when, factor) in enumerate(changes):
        until = changes[place + 1][0] if place + 1 < len(changes) else end
        if factor > _LEAST_SLOW:
            words = f"{factor:.1f} times as slow"
            pieces.append(Piece((when - begin) / total, (until - begin) / total, RED, words))
    return pieces


def _only_rank_0(run: Run) -> str:
    several = run.record is not None and run.record.workers > 1
    return paragraphs([ONLY_RANK_0]) if several and run.history.times is run.history.rank_0 else ""


def _milliseconds(seconds: float) -> str:
    return seconds_in_words(seconds) if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"
