"""Writes TensorBoard's event files: `train/*`, `time/*` (shares of a step), `validation/*`, `test/*`.

Steps that take longer than 30 ms have a point each. Of faster ones some are drawn together to one point (the mean loss,
the last learning rate): a thousand points a second would cost training more than they show; `metrics.jsonl` has all.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhosts.events import Event, Recovered, RunEnded, RunStarted, StepDone, TestDone
from manyhosts.listeners.loggers import row_of
from manyhosts.records.background_writer import BackgroundWriter

_EVERY_S = 0.5
_PARTS = ("compute", "communication_exposed", "data_wait", "snapshot_stall", "other")
_ENDS = RunEnded, TestDone
_MOST_POINTS = 16
"""Of training steps, in each `_EVERY_S`."""


class WriteTensorBoard:
    """Draws the events in `folder`, from a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: _EventFile | None = None
        self._background_writer: BackgroundWriter[Event] = BackgroundWriter(
            self._draw, every_s=_EVERY_S, name="writes TensorBoard files"
        )

    def __call__(self, event: Event) -> None:
        """Take note of `event`."""
        self._background_writer.put(event)
        if isinstance(event, _ENDS):
            self._background_writer.flush()

    def close(self) -> None:
        """Write what is left. Safe to call twice."""
        self._background_writer.close()
        if self._file is not None:
            self._file.close()

    def _draw(self, events: Sequence[Event]) -> None:
        if not events:
            return
        self._file = self._file or _EventFile(self.folder)
        self._draw_all(events, self._file)
        self._file.flush()

    def _draw_all(self, events: Sequence[Event], file: _EventFile) -> None:
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


class _EventFile:
    """One file of TensorBoard's. Its name sorts after those of earlier runs, also of the same second.

    A record is an event, with its length before it and a checksum after each. They are put together here: the writer
    of records of TensorBoard itself imports 500 modules, clients of cloud storage among them, and takes half a second
    of the first steps; the messages alone take a tenth of that.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Point
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._point, self._session, self._summary = Point, SessionLog, Summary
        folder.mkdir(parents=True, exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{rest:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb")
        self._write(Point(wall_time=seconds, file_version="brain.Event:2"))

    def add(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """A point of every curve in `values`."""
        drawn = self._summary(value=[self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(self._point(wall_time=when, step=step, summary=drawn))

    def forget_after(self, step: int, when: float) -> None:
        """Have TensorBoard forget what an earlier file says about steps that are done again."""
        forget = self._session(status=self._session.START)
        self._write(self._point(wall_time=when, step=step + 1, session_log=forget))

    def _write(self, point: Any) -> None:
        event = point.SerializeToString()
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _checksum(data: bytes) -> bytes:
    """CRC-32C, turned and shifted as these files have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 255] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _of_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


_CRC = [_of_byte(byte) for byte in range(256)]
"""What each byte makes of a checksum."""


def _draw_steps(steps: Sequence[StepDone], file: _EventFile) -> None:
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


def _draw_other(event: Event, file: _EventFile) -> None:
    if isinstance(event, RunStarted) or (isinstance(event, Recovered) and event.rewound):
        file.forget_after(event.step, event.time)
    elif (row := row_of(event)) is not None:
        file.add(row.step, row.time, row.values)
