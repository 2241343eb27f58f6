"""Writes TensorBoard's event files: `train/*`, `time/*` (shares of a step), `validation/*`, `test/*`.

Steps that take longer than 30 ms have a point each. Of faster ones some are drawn together to one point (the mean loss,
the last learning rate): a thousand points a second would cost training more than they show; `metrics.jsonl` has all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manyhosts.events import Event, Recovered, RunEnded, RunStarted, StepDone, TestDone, ValidationDone
from manyhosts.records.background_writer import BackgroundWriter
from manyhosts.records.event_file import EventFile

_EVERY_S = 0.5
_PARTS = ("compute", "communication_exposed", "data_wait", "snapshot_stall", "other")
_MOST_POINTS = 16
"""Of training steps, in each `_EVERY_S`."""


class WriteTensorBoard:
    """Draws the events in `folder`, from a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: EventFile | None = None
        self._background_writer: BackgroundWriter[Event] = BackgroundWriter(
            self._draw, every_s=_EVERY_S, name="writes TensorBoard files"
        )

    def __call__(self, event: Event) -> None:
        """Take note of `event`."""
        self._background_writer.put(event)
        if isinstance(event, RunEnded | TestDone):
            self._background_writer.flush()

    def close(self) -> None:
        """Write what is left. Safe to call twice."""
        self._background_writer.close()
        if self._file is not None:
            self._file.close()

    def _draw(self, events: Sequence[Event]) -> None:
        if not events:
            return
        self._file = self._file or EventFile(self.folder)
        self._draw_all(events, self._file)
        self._file.flush()

    def _draw_all(self, events: Sequence[Event], file: EventFile) -> None:
        steps: list[StepDone] = []
        size = -(-len(events) // _MOST_POINTS)
        for event in events:
            if isinstance(event, StepDone):
                steps.append(event)
                if len(steps) < size:
                    continue
            _draw_steps(steps, file)
            steps = []
            if not isinstance(event, StepDone):
                _draw_other(event, file)
        _draw_steps(steps, file)


def _draw_steps(steps: Sequence[StepDone], file: EventFile) -> None:
    if not steps:
        return
    last, samples = steps[-1], sum(step.samples for step in steps)
    values = {"train/loss": sum(step.loss * step.samples for step in steps) / max(samples, 1), "train/lr": last.lr}
    seconds = sum(step.timing.total for step in steps)
    if seconds > 0:
        values["train/samples_per_second"] = samples / seconds
        for part in _PARTS:
            values[f"time/{part}"] = sum(getattr(step.timing, part) for step in steps) / seconds
    norms = [step.gradient_norm for step in steps if step.gradient_norm is not None]
    if norms:
        values["train/gradient_norm"] = norms[-1]
    values |= {f"train/{name}": value for name, value in last.values.items()}
    file.add(last.step, last.time, values)


def _draw_other(event: Event, file: EventFile) -> None:
    match event:
        case ValidationDone():
            file.add(event.step, event.time, {f"validation/{name}": value for name, value in event.values.items()})
        case TestDone():
            file.add(event.step, event.time, {f"test/{name}": value for name, value in event.values.items()})
        case RunStarted() | Recovered(rewound=True):
            file.forget_after(event.step, event.time)
