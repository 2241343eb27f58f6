"""What runs there are in a folder: of each its state, the time spent on it, and the best that came out."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.launchers.named_runs import (
    INTERRUPTED,
    ended_detached,
    failed_early,
    handle_of,
    runs_in,
    was_interrupted,
)
from manyhosts.records import run_lock
from manyhosts.records.numbers import to_words
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.run_record import RunRecord
from manyhosts.records.summary import Summary
from manyhosts.report.run import read_run, record_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRun:
    """A run in a few words."""

    directory: str
    handle: str
    """What `run --detach` printed; empty where a terminal keeps it."""
    script: str
    state: str
    """`running`, `completed`, `stopped early`, `failed`, `interrupted`, `broke off`, `not begun`, or `no record`."""
    reason: str
    started: float | None
    """When it was begun, or begun again, in seconds since the Unix epoch."""
    workers: int | None
    steps: int
    seconds: float
    """Of training, without the time between an orderly end and continuing later."""
    worker_seconds: float
    """What it has cost: the time of training of every worker."""
    best: Mapping[str, Any]
    """`metric`, `value` and `step` of the best validation; empty where there was none."""

    def to_json(self) -> dict[str, Any]:
        """For `--json`; numbers that are none become words."""
        found: dict[str, Any] = to_words(asdict(self))
        return found


def listed(folder: Path) -> list[ListedRun]:
    """The runs directly below `folder`, the one begun last first, also those that no training is on record of."""
    return [_read(path) for path in runs_in(folder)]


def _read(path: Path) -> ListedRun:
    try:
        return _of(path)
    except ConfigError as error:
        state, reason = "no record", error.what
        if run_lock.goes_on(path):
            state = "running"
        elif was_interrupted(path):
            state, reason = "interrupted", INTERRUPTED
        elif failed := failed_early(path):
            state, reason = "failed", failed
        elif (ended := ended_detached(path))[0]:
            state, reason = ended
        return ListedRun(
            directory=str(path), handle=handle_of(path), script="", state=state, reason=reason, started=None,
            workers=None, steps=0, seconds=0.0, worker_seconds=0.0, best={},
        )  # fmt: skip


def _of(path: Path) -> ListedRun:
    directory = RunDirectory(path)
    record, summary, state, reason = record_of(directory), _ended(directory), "", ""
    if summary is None:
        run = read_run(path)
        summary, state, reason = run.summary, run.status, run.reason
    return ListedRun(
        directory=str(path),
        handle=handle_of(path),
        script=record.script if record else "",
        state=state or (summary.status if summary else ""),
        reason=reason or (summary.reason if summary and not state else ""),
        started=record.started if record else None,
        workers=record.workers if record else None,
        steps=summary.steps if summary else 0,
        seconds=summary.seconds if summary else 0.0,
        worker_seconds=_worker_seconds(summary, record),
        best=summary.best if summary else {},
    )


def _ended(directory: RunDirectory) -> Summary | None:
    """What came out of a run that is over: read at once, where its lines, which may be millions, need not be."""
    with contextlib.suppress(ConfigError, OSError):
        if not run_lock.goes_on(directory.path):
            return Summary.of_last_start(directory.path)
    return None


def _worker_seconds(summary: Summary | None, record: RunRecord | None) -> float:
    if summary is None:
        return 0.0
    of_last = record.workers if record else 0  # an older record does not say how many there were before
    return summary.seconds * of_last if summary.worker_seconds is None else summary.worker_seconds
