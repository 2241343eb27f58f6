"""What `watch` draws on a terminal: progress, the curve of the loss, each worker's time, what happened last."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from manyhosts.listeners.figures import clock, rate
from manyhosts.records.summary import PARTS
from manyhosts.report.run import Run
from manyhosts.report.run_page import under
from manyhosts.report.run_sections import PART_NAMES, current_facts
from manyhosts.report.windows import Spent, Who
from manyhosts.units import seconds_in_words
from manyhosts.watch.live_run import LiveRun
from manyhosts.watch.live_study import LiveStudy

_COLOURS = {
    "compute": "blue", "communication_exposed": "dark_orange", "data_wait": "green", "snapshot_stall": "yellow",
    "other": "bright_black",
}  # fmt: skip
_STATUS = {"running": "blue", "starting": "blue", "completed": "green", "stopped early": "green", "failed": "red"}
_MOST_WORKERS = 8
_BAR, _LEAST_BAR, _BESIDE_BAR = 24, 10, 58
"""Columns of a worker's bar, as far as the names of the others leave room for it."""
_SPARKS = "▁▂▃▄▅▆▇█"
_LEAST_TOLD = 4


def drawn(live: LiveRun | LiveStudy, console: Console) -> RenderableType:
    """Everything, for as many lines as the terminal has."""
    return _study(live, console) if isinstance(live, LiveStudy) else _run(live, console)


def _run(live: LiveRun, console: Console) -> RenderableType:
    run = live.run
    head = Text.assemble((run.script, "bold"), "  ", (under(run), "dim"), overflow="ellipsis", no_wrap=True)
    parts: list[RenderableType] = [head, _progress(run.history.fraction(run.longest_s), run.status, console)]
    facts = Table.grid(padding=(0, 2))
    for name, value in current_facts(run):
        facts.add_row(Text(name, "dim"), Text(value, _STATUS.get(run.status, "yellow") if name == "status" else ""))
    parts.append(facts)
    if sparks := _sparks(run, console):
        parts.append(Text.assemble(("loss  ", "dim"), sparks))
    workers = run.history.times.total()
    if workers:
        parts += [Text(), _workers(workers, console)]
    room = console.height - len(current_facts(run)) - min(len(workers), _MOST_WORKERS) - 9
    reported = list(run.history.happenings)[-max(_LEAST_TOLD, room) :]
    if reported:
        parts.append(Text())
    for each in reported:
        when = time.strftime("%H:%M:%S", time.localtime(each.time))
        line = Text.assemble((f"{when} ", "dim"), (each.text, "yellow" if each.is_trouble else ""))
        line.no_wrap, line.overflow = True, "ellipsis"
        parts.append(line)
    return Group(*parts)


def _study(live: LiveStudy, console: Console) -> RenderableType:
    head = Text.assemble((f"study of {live.script}", "bold"), (f"  {live.done} of {len(live.rows)} runs done", "dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("run", "status", "done", "step", "speed", "loss"):
        table.add_column(title, no_wrap=title != "run")
    for row in live.rows:
        done = "" if row.fraction is None else f"{100 * row.fraction:.0f} %"
        speed = "" if row.speed is None else rate(row.speed)
        painted = Text(row.status, _STATUS.get(row.status, "yellow" if row.status != "waiting" else "dim"))
        table.add_row(Text(row.name), painted, done, row.step, speed, row.loss)
    status = "running" if live.is_running else "over"
    return Group(head, _progress(live.share, status, console), Text(), table)


def _progress(fraction: float | None, status: str, console: Console) -> RenderableType:
    if fraction is None:
        return Text(status, "dim")
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=1.0, completed=fraction, width=max(10, min(60, console.width - 12)))
    grid.add_row(bar, Text(f"{100 * fraction:.0f} %", "bold"))
    return grid


def _workers(totals: dict[Who, Spent], console: Console) -> RenderableType:
    """The slowest workers first, where there are more than a screen holds."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("worker", no_wrap=True, max_width=max(14, console.width - 74))
    table.add_column("a step", justify="right", no_wrap=True)
    if console.width >= 70:
        table.add_column("of that", no_wrap=True)
    for part in PARTS[:3]:
        words = PART_NAMES[part]
        table.add_column(words, justify="right", min_width=max(map(len, words.split())))
    several = len(totals) > _MOST_WORKERS
    shown = sorted(totals.items(), key=lambda each: -each[1].own_s)[:_MOST_WORKERS] if several else totals.items()
    for who, spent in shown:
        total = sum(spent.seconds.values()) or 1.0
        shares = [spent.seconds.get(part, 0.0) / total for part in PARTS]
        bar = [_bar(shares, max(_LEAST_BAR, min(_BAR, console.width - _BESIDE_BAR)))] if len(table.columns) == 6 else []
        table.add_row(
            Text(str(who)), seconds_in_words(spent.step_s), *bar, *(f"{100 * each:.0f} %" for each in shares[:3])
        )
    if several:
        table.caption = f"the slowest {_MOST_WORKERS} of {len(totals)}"
    return table


def _bar(shares: Sequence[float], width: int) -> Text:
    bar, at, until = Text(), 0.0, 0
    for part, share in zip(PARTS, shares, strict=True):
        at += share
        bar.append("█" * (round(at * width) - until), _COLOURS[part])
        until = round(at * width)
    return bar


def _sparks(run: Run, console: Console) -> str:
    """The training loss from the start on, as wide as there is room."""
    losses = [loss for _, _, loss in run.history.loss.points() if loss - loss == 0]
    if len(losses) < 2:
        return ""
    width = max(10, min(60, console.width - 12))
    each = max(1, -(-len(losses) // width))
    means = [sum(losses[at : at + each]) / len(losses[at : at + each]) for at in range(0, len(losses), each)]
    low, high = min(means), max(means)
    return "".join(_SPARKS[round(7 * (mean - low) / ((high - low) or 1.0))] for mean in means)


class Lines:
    """The same for readers of lines: what happens as it happens, and every few seconds the progress."""

    EVERY_S = 10.0

    def __init__(self) -> None:
        self._reported = 0
        self._begun_again = 0
        self._last = 0.0
        """When what was printed last has happened."""
        self._statuses: dict[str, str] = {}
        self._next = 0.0

    def new(self, live: LiveRun | LiveStudy) -> list[str]:
        """What is to be printed now."""
        return self._of_study(live) if isinstance(live, LiveStudy) else self._of_run(live)

    def end(self, live: LiveRun | LiveStudy) -> str:
        """How it has ended."""
        if isinstance(live, LiveStudy):
            return f"{live.done} of {len(live.rows)} runs ended well"
        run = live.run
        return f"{run.status}: {run.reason}" if run.reason else run.status

    def _of_run(self, live: LiveRun) -> list[str]:
        history = live.history
        reported, lines = list(history.happenings), []
        if live.begun_again != self._begun_again:  # the record was cut and read again: most of it was printed before
            self._begun_again = live.begun_again
            new = [each for each in reported if each.time > self._last]
        else:
            count = min(history.reported - self._reported, len(reported))
            new = reported[len(reported) - count :]
        for each in new:
            when = time.strftime("%H:%M:%S", time.localtime(each.time))
            lines.append(f"{when}  step {each.step:<8,} {each.text}")
            self._last = each.time
        self._reported = history.reported
        if not lines and time.monotonic() >= self._next and live.run.status == "running":
            lines.append(self._progress(live))
        if lines:
            self._next = time.monotonic() + self.EVERY_S
        return lines

    def _progress(self, live: LiveRun) -> str:
        run = live.run
        fraction, left = run.history.fraction(run.longest_s), run.history.seconds_left(run.longest_s)
        words = [] if fraction is None else [f"{100 * fraction:.0f} % done"]
        words += [f"{name} {value}" for name, value in current_facts(run) if name in ("step", "training loss", "speed")]
        words += [] if left is None else [f"{clock(left)} left"]
        return f"{time.strftime('%H:%M:%S')}  " + ", ".join(words or ["no step yet"])

    def _of_study(self, live: LiveStudy) -> list[str]:
        lines = []
        for row in live.rows:
            if self._statuses.get(row.name, "waiting") != row.status:
                lines.append(f"{time.strftime('%H:%M:%S')}  {row.name}: {row.status}")
            self._statuses[row.name] = row.status
        return lines
