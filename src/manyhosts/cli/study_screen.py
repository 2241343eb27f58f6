"""What `manyhosts study` shows: a line for each run, then the tables and the verdict."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, TextIO

from manyhosts.listeners.paint import paint, writable
from manyhosts.units import seconds_in_words

if TYPE_CHECKING:
    from manyhosts.study.points import Point
    from manyhosts.study.study import Study
    from manyhosts.trials.runs import Outcome, Place

_WIDTH = 100
_ERASE = "\r\x1b[K"


class Lines:
    """Says which run is under way, on a terminal for as long as it is, and how each has ended."""

    def __init__(self, stream: TextIO, count: int, *, silent: bool) -> None:
        """`count`: how many runs there are."""
        self._stream, self._count, self._silent = stream, count, silent
        self._live = stream.isatty() and not silent
        self._number, self._now, self._seconds = 1, "", 0.0

    def begins(self, point: Point, place: Place) -> None:
        """A run is about to be started, or one that was left running is waited for."""
        self._now, self._seconds = str(point), 0.0
        self.goes_on(0.0)

    def goes_on(self, seconds: float) -> None:
        """The run under way has taken so long."""
        self._seconds = seconds
        if self._live:
            line = f"run {self._number} of {self._count}: {self._now}, {seconds_in_words(round(seconds))}"
            self._stream.write(_ERASE + paint(line[: _WIDTH - 1], "dim"))
            self._stream.flush()

    def ends(self, point: Point, outcome: Outcome, *, before: bool) -> None:
        """A run has ended, or was done already."""
        how = "done before" if before else f"{outcome.status}, {seconds_in_words(self._seconds)}"
        if not self._silent:
            erase = _ERASE if self._live else ""
            reason = "".join(f"\n  {line}" for line in outcome.reason.splitlines())
            text = f"{erase}run {self._number} of {self._count}: {point}: {how}{reason}\n"
            self._stream.write(writable(text, self._stream.encoding))
            self._stream.flush()
        self._number += 1


def print_study(study: Study, stream: TextIO) -> None:
    """Print everything, in colours on a terminal."""
    from manyhosts.study import columns

    def title(text: str) -> str:
        return paint(text, "bold") if stream.isatty() else text

    lines: list[str] = []
    if study.sizes:
        for name, table in (
            ("speed", columns.speed(study)),
            ("what was learned", columns.results(study)),
            ("lost of the ideal speed, in percent", columns.lost(study)),
        ):
            lines += [title(name), *in_columns(table), ""]
        if note := columns.note_on_lost(study):
            lines[-1:] = [f"  {note}", ""]
    for point, reason in columns.failures(study):
        lines += [title(f"failed, or not run: {point}"), *(f"  {line}" for line in reason.splitlines()), ""]
    for paragraph in study.verdict().split("\n\n"):
        lines += [*textwrap.wrap(paragraph, _WIDTH), ""]
    stream.write(writable("\n".join(lines), stream.encoding))


def in_columns(table: list[list[str]]) -> list[str]:
    """The rows of a table in columns, numbers to the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in table]
