"""The listeners that every run has on its leader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

from manyhosts.cluster.place import Place
from manyhosts.config import metrics_port
from manyhosts.events import Event, Listener, RunEnded, RunStarted, TestDone
from manyhosts.listeners.figures import amount, figure, figures, rate
from manyhosts.listeners.metrics_file import WriteMetrics
from manyhosts.listeners.paint import Colour, bar, paint
from manyhosts.listeners.progress import ShowProgress
from manyhosts.listeners.prometheus import ServeMetrics
from manyhosts.listeners.tensorboard import WriteTensorBoard
from manyhosts.listeners.voice import Voice, voice
from manyhosts.records import metrics
from manyhosts.records.metrics import MetricsFile
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.run_record import RunRecord
from manyhosts.records.summary import Summary, summarise
from manyhosts.units import bytes_in_words, seconds_in_words


def standard(
    run: RunDirectory,
    record: RunRecord,
    to: Voice | None = None,
    *,
    metrics: MetricsFile | None = None,
    started: RunStarted | None = None,
) -> list[Listener]:
    """Metrics file, TensorBoard, progress and summary, for a `Broadcast`.

    `to` is where they speak: where it is left out, the head of `manyhosts run`, or this process's output. The progress
    comes before the summary, so that its last line is above the last screen. One that takes over from another leader
    gives its `metrics`, and with what the run `started`.

    Raises:
        ConfigError: metrics are to be served, and cannot be.
    """
    to = to or voice()
    metrics = metrics or MetricsFile(run.metrics)

    def show(summary: Summary, event: Event) -> None:
        to.say(last_screen(summary, run.path) if isinstance(event, RunEnded) else row_of_test(summary.test))

    restarts, place = Place.from_environment().restart, metrics_port.asked()
    if started is not None:
        restarts = max(restarts, metrics.restarts())  # another worker has seen them
    return [
        *([] if place is None else [ServeMetrics(place, record, restarts=restarts)]),
        WriteMetrics(metrics),
        WriteTensorBoard(run.tensorboard),
        ShowProgress(to, record, run.path, restarts=restarts, started=started),
        WriteSummary(run.summary, metrics, record, show),
    ]


class WriteSummary:
    """Reckons the summary from the metrics' lines, so that it is right across restarts."""

    def __init__(
        self, path: Path, file: metrics.MetricsFile, record: RunRecord, show: Callable[[Summary, Event], None]
    ) -> None:
        """`show` is called with each summary and the event that led to it."""
        self.path, self.file, self.record, self.show = path, file, record, show

    def __call__(self, event: Event) -> None:
        """Take note of `event`."""
        if isinstance(event, RunEnded | TestDone):
            trouble: OSError | None = None
            try:
                self.file.flush()
            except OSError as refused:
                trouble = refused  # the lines wait in memory, and what the disk has is reported all the same
            # the metrics file may have the event or not: a line that is there twice changes nothing
            lines = chain(metrics.stream(self.file.path), [metrics.line_of(event)])
            summary = summarise(lines, self.record)
            try:
                summary.write(self.path)
            except OSError as refused:
                trouble = refused
            self.show(summary, event)
            if trouble is not None:
                raise trouble


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
        rows.append(_row("sent", f"{bytes_in_words(summary.bytes_sent_per_step)} per step and worker"))
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
