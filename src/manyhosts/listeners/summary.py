"""Writes `summary.json` when training ends and after each test, and shows what came out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

from manyhosts.events import Event, RunEnded, TestDone
from manyhosts.records import metrics
from manyhosts.records.run_record import RunRecord
from manyhosts.records.summary import Summary, summarise


class WriteSummary:
    """Reckons the summary from the metrics' lines, so that it is right across restarts."""

    HEARS = (RunEnded, TestDone)

    def __init__(
        self, path: Path, file: metrics.MetricsFile, record: RunRecord, show: Callable[[Summary, Event], None]
    ) -> None:
        """`show` is called with each summary and the event that led to it."""
        self.path, self.file, self.record, self.show = path, file, record, show

    def __call__(self, event: Event) -> None:
        """Take note of `event`."""
        if isinstance(event, self.HEARS):
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
