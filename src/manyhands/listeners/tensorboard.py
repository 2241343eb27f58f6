"""Writes TensorBoard's event files: `train/*`, `validation/*` and `test/*` by optimizer step.

Steps that take longer than 30 ms have a point each. Of faster ones some are drawn together to one point (the mean loss,
the last learning rate): a thousand points a second would cost training more than they show; `metrics.jsonl` has all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhands.events import Event, RunEnded, RunStarted, StepDone, TestDone, ValidationDone
from manyhands.records.aside import Aside

_EVERY_S = 0.5
_MOST_POINTS = 16
"""Of training steps, in each `_EVERY_S`."""


class WriteTensorBoard:
    """Draws the events in `folder`, from a thread. TensorBoard is imported there too, beside the first steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None
        self._aside: Aside[Event] = Aside(self._draw, every_s=_EVERY_S, name="writes TensorBoard files")

    def __call__(self, event: Event) -> None:
        """Take note of `event`."""
        self._aside.put(event)

    def flush(self) -> None:
        """Have every point on its way to the disk."""
        self._aside.flush()
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left. Safe to call twice."""
        self._aside.close()
        if self._writer is not None:
            self._writer.close()

    def _draw(self, events: Sequence[Event]) -> None:
        if not events:
            return
        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self.folder))
        steps: list[StepDone] = []
        size = -(-len(events) // _MOST_POINTS)
        for event in events:
            if isinstance(event, StepDone):
                steps.append(event)
                if len(steps) < size:
                    continue
            self._draw_steps(steps)
            steps = []
            if not isinstance(event, StepDone):
                self._draw_other(event)
        self._draw_steps(steps)

    def _draw_steps(self, steps: Sequence[StepDone]) -> None:
        if not steps:
            return
        last, samples = steps[-1], sum(step.samples for step in steps)
        values = {"train/loss": sum(step.loss * step.samples for step in steps) / max(samples, 1), "train/lr": last.lr}
        seconds = sum(step.timing.total for step in steps)
        if seconds > 0:
            values["train/samples_per_second"] = samples / seconds
        if last.gradient_norm is not None:
            values["train/gradient_norm"] = last.gradient_norm
        values |= {f"train/{name}": value for name, value in last.values.items()}
        self._add(last.step, last.time, values)

    def _draw_other(self, event: Event) -> None:
        if isinstance(event, ValidationDone):
            self._add(event.step, event.time, {f"validation/{name}": value for name, value in event.values.items()})
        elif isinstance(event, TestDone):
            self._add(event.step, event.time, {f"test/{name}": value for name, value in event.values.items()})
        elif isinstance(event, RunStarted):
            self._take_back_after(event)
        if isinstance(event, RunEnded | TestDone):
            self._writer.flush()

    def _add(self, step: int, time: float, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Point
        from tensorboard.compat.proto.summary_pb2 import Summary

        drawn = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._writer.add_event(Point(wall_time=time, step=step, summary=drawn))

    def _take_back_after(self, event: RunStarted) -> None:
        """Have TensorBoard forget what an earlier file tells of steps that are done once more."""
        from tensorboard.compat.proto.event_pb2 import Event as Point
        from tensorboard.compat.proto.event_pb2 import SessionLog

        forget = SessionLog(status=SessionLog.START)
        self._writer.add_event(Point(wall_time=event.time, step=event.step + 1, session_log=forget))
