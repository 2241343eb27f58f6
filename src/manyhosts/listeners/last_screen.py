"""What a run says at its end: what came of it, where its time went, and where everything is. 80 columns, 15 lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from manyhosts.listeners.figures import amount, figure, figures, rate
from manyhosts.listeners.paint import Colour, bar, paint
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.summary import Summary
from manyhosts.units import bytes_in_words, seconds_in_words

_COLUMNS = 80
_BAR = 28
_LABEL = 12
_STATUS: Mapping[str, Colour] = {
    "completed": "green", "stopped early": "green", "interrupted": "yellow", "failed": "red",
}  # fmt: skip
_PARTS: Mapping[str, tuple[str, Colour]] = {
    "compute": ("computing", "green"),
    "communication_exposed": ("waiting for workers", "yellow"),
    "data_wait": ("waiting for data", "magenta"),
    "snapshot_stall": ("snapshots", "blue"),
    "other": ("other", "dim"),
}


def last_screen(summary: Summary, folder: Path) -> str:
    """The screen at the end of `fit`, painted."""
    rows = ["", _head(summary)]
    if summary.validation:
        rows.append(_row("validation", _shown(summary.validation)))
    if summary.best:
        best = figure(summary.best["metric"], summary.best["value"])
        rows.append(_row("best", f"{paint(best, 'bold')}   at step {summary.best['step']}"))
    if not summary.validation and summary.train_loss is not None:
        rows.append(_row("training", figure("loss", summary.train_loss)))
    rows.append(_row("time", _time(summary)))
    rows += _where_it_went(summary.step_seconds)
    if summary.bytes_sent_per_step:
        rows.append(_row("sent", f"{bytes_in_words(summary.bytes_sent_per_step)} per step, by rank 0"))
    if summary.restarts:
        cost = f"{amount(summary.steps_redone, 'step')} redone, {seconds_in_words(summary.seconds_lost)} lost"
        cost += f", {amount(summary.samples_lost, 'sample')} computed again" if summary.samples_lost else ""
        rows.append(_row("restarts", f"{summary.restarts}   {cost}"))
    if (profile := RunDirectory(folder).profile).is_dir():
        rows.append(_row("profile", str(_from_here(profile))))
    rows.append(_row("run", str(_from_here(folder))))
    return "\n".join(rows)


def row_of_test(values: Mapping[str, float]) -> str:
    """The row that `test` adds to the screen above it."""
    return _row("test", _shown(values))


def _head(summary: Summary) -> str:
    """Status and reason, a rule, and who it was: that goes first where the reason needs the room."""
    room = _COLUMNS - len(summary.status) - 5
    reason = summary.reason if len(summary.reason) <= room else summary.reason[: room - 1] + "…"
    who = f" {amount(summary.workers, 'worker')} · {summary.strategy}"
    who = who if len(reason) + len(who) <= room else ""
    rule = "─" * (room + 1 - len(reason) - len(who))
    status = paint(summary.status, "bold", _STATUS.get(summary.status, "yellow"))
    return f"{status} {paint('─', 'dim')} {reason} {paint(rule, 'dim')}{who}"


def _from_here(folder: Path) -> Path:
    """`folder` as it is typed in the working directory, where it is below it."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _shown(values: Mapping[str, float]) -> str:
    """Values in a row, the first of them bold."""
    first, between, rest = figures(values, "   ").partition("   ")
    return paint(first, "bold") + between + rest


def _time(summary: Summary) -> str:
    words = [seconds_in_words(summary.seconds)]
    words.append(f"{amount(summary.epochs, 'epoch')}, {amount(summary.steps, 'step')}")
    if summary.samples_per_second:
        words.append(rate(summary.samples_per_second))
    return "   ".join(words)


def _where_it_went(step_seconds: Mapping[str, float]) -> list[str]:
    """A bar for each part of the steps' time that is a part worth seeing."""
    total = sum(step_seconds.get(part, 0.0) for part in _PARTS)
    if total <= 0:
        return []
    shares = {part: step_seconds[part] / total for part in _PARTS}
    seen = [part for part in _PARTS if shares[part] >= 0.005 or part == "compute"]
    rows: list[str] = []
    for part in seen:
        name, colour = _PARTS[part]
        drawn = paint(bar(shares[part], _BAR).rstrip(), colour)
        rows.append(_row("" if rows else "spent on", f"{name:<20}{100 * shares[part]:3.0f} %  {drawn}"))
    return rows


def _row(label: str, text: str) -> str:
    return f"  {paint(label.ljust(_LABEL), 'dim')}{text}"
