"""Runs the points of a study one after another, each an ordinary `manyhosts run` in a folder of its own.

A point is done when its run has ended well, whoever has seen it end: that is read from the run's own record. What has
not ended well is run again by the next study in the same folder, and a run that broke off goes on where it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from manyhosts.control.agent import warm
from manyhosts.errors import ConfigError
from manyhosts.records import run_lock
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.summary import Summary
from manyhosts.records.whole_file import read_json, write_json_whole
from manyhosts.study.points import Asked, Point, command

DONE = ("completed", "stopped early")
"""How a run ends that need not be run again."""
_LOOK_S = 0.2
_SHOWN_LINES = 12
_BETWEEN_RUNS_S = 60.0
_NO_OTHER_S = 0.1
_ABOVE = "see the traceback above"
"""What a run says of its own screen, which is a file here."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """By a signal. The run under way has ended, in order."""


class Progress(Protocol):
    """Hears how the study goes on."""

    def begins(self, point: Point, place: Place) -> None:
        """A run is about to be started, or one that another study has left running is waited for."""

    def goes_on(self, seconds: float) -> None:
        """The run under way has taken so long."""

    def ends(self, point: Point, outcome: Outcome, *, before: bool) -> None:
        """A run has ended; `before`: it was done already."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one point keeps what it has."""

    folder: Path
    name: str

    @property
    def run(self) -> RunDirectory:
        """Its run directory."""
        return RunDirectory(self.folder / self.name)

    @property
    def log(self) -> Path:
        """What `manyhosts run` printed."""
        return self.folder / f"{self.name}.log"

    @property
    def outcome(self) -> Path:
        """How it ended, in JSON."""
        return self.folder / f"{self.name}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a point stands."""

    status: str
    """`completed`, `stopped early`, `failed`, `interrupted`, or `waiting`: it has not been run yet."""
    reason: str = ""
    """Why it failed."""
    launched: float | None = None
    """When `manyhosts run` was started first, in seconds since the Unix epoch."""

    @property
    def done(self) -> bool:
        """Whether it need not be run again."""
        return self.status in DONE


def outcome_of(place: Place) -> Outcome:
    """How a point stands, as far as the disk tells."""
    known: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):
        known = read_json(place.outcome)
    launched = known.get("launched")
    with contextlib.suppress(ConfigError):
        summary = Summary.read(place.run.summary)
        if summary.status in DONE and known.get("status") != "failed":  # what comes behind the training may fail, too
            return Outcome(status=summary.status, launched=launched)
    status, reason = known.get("status", "waiting"), known.get("reason", "")
    return Outcome(status="interrupted" if status in DONE else status, reason=reason, launched=launched)


def run_all(asked: Asked, folder: Path, program: Sequence[str], progress: Progress) -> Iterator[None]:
    """Run every point that is not done, in order, with `program run …`. Gives control back after each.

    Raises:
        Interrupted: by Ctrl-C, SIGTERM or SIGHUP, when the run under way has ended.
    """
    with _Signals() as signals:
        points = asked.points()
        for point in points:
            place = Place(folder, point.name)
            signals.check()
            _let_end(point, place, progress, signals)
            outcome = outcome_of(place)
            if before := outcome.done:
                progress.ends(point, outcome, before=before)
                continue
            progress.begins(point, place)
            outcome = _run(program, asked, point, place, outcome, progress, signals, _stays_s(asked, point, points))
            progress.ends(point, outcome, before=False)
            yield


def _stays_s(asked: Asked, point: Point, points: Sequence[Point]) -> float:
    """How long what a run's workers are forked from waits for the next run of its size; 0: there is no other one."""
    same = [other for other in points if other.size == point.size]
    if len(same) == 1 or not asked.is_here or not warm.IS_POSSIBLE:
        return 0.0
    return _BETWEEN_RUNS_S if point != same[-1] else _NO_OTHER_S


def _let_end(point: Point, place: Place, progress: Progress, signals: _Signals) -> None:
    """Where a study was killed its run may still be under way: it is waited for, and nothing is done twice."""
    began = time.monotonic()
    while True:
        try:
            run_lock.see_that_free(place.run.path)
        except ConfigError:
            if time.monotonic() - began < _LOOK_S:
                progress.begins(point, place)
            signals.check()
            progress.goes_on(time.monotonic() - began)
            time.sleep(_LOOK_S)
        else:
            return


def _run(
    program: Sequence[str],
    asked: Asked,
    point: Point,
    place: Place,
    before: Outcome,
    progress: Progress,
    signals: _Signals,
    stays_s: float,
) -> Outcome:
    place.folder.mkdir(parents=True, exist_ok=True)
    words = [*program, *command(asked, point, str(place.run.path), warm=stays_s > 0)]
    environment = {**os.environ, **({warm.VARIABLE: str(stays_s)} if stays_s else {})}
    launched = before.launched if place.run.metrics.exists() else time.time()
    _write(place, Outcome(status="interrupted", launched=launched))  # for whoever finds it after a power cut
    with place.log.open("ab") as log:
        size = log.tell()
        began = time.monotonic()
        # a session of its own: of a Ctrl-C it gets what is passed on to it, once
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with signals.passed_on_to(process):
            while process.poll() is None:
                progress.goes_on(time.monotonic() - began)
                time.sleep(_LOOK_S)
    outcome = _outcome(place, process.returncode, size, launched, interrupted=signals.came)
    _write(place, outcome)
    return outcome


def _outcome(place: Place, code: int, size: int, launched: float | None, *, interrupted: bool) -> Outcome:
    try:
        status = Summary.read(place.run.summary).status
    except ConfigError:
        status = ""
    if interrupted and not (code == 0 and status in DONE):
        return Outcome(status="interrupted", launched=launched)
    if code == 0 and status in DONE:
        return Outcome(status=status, launched=launched)
    if code == 0 and not status:
        reason = "the run has left no record of training: a study reads what mh.Trainer or mh.Run writes"
    elif code == 0:
        reason = f"the training did not end well: {status}"
    else:
        with place.log.open("rb") as log:
            log.seek(size)
            reason = _reason(log.read().decode(errors="replace"), code).replace(
                _ABOVE, f"see the traceback in {place.log}"
            )
    return Outcome(status="failed", reason=reason, launched=launched)


def _reason(said: str, code: int) -> str:
    """What `manyhosts run` said last about its failure: the sentence, where and fix; else how it ended."""
    lines = said.splitlines()
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith("manyhosts: "):
            more = [line for line in lines[number + 1 : number + 3] if line.startswith(("  where:", "  fix:"))]
            return "\n".join([lines[number].removeprefix("manyhosts: "), *more])
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return "\n".join([f"manyhosts run {how}", *(f"  {line}" for line in lines[-_SHOWN_LINES:])])


def _write(place: Place, outcome: Outcome) -> None:
    words = {"status": outcome.status, "reason": outcome.reason, "launched": outcome.launched}
    write_json_whole(place.outcome, words)


class _Signals:
    """Takes the signals that ask to end, passes them on to the run under way, and remembers that one came."""

    def __init__(self) -> None:
        self.came = False
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._take) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Go no further where a signal has come.

        Raises:
            Interrupted: one has.
        """
        if self.came:
            raise Interrupted

    @contextlib.contextmanager
    def passed_on_to(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Within, what comes is passed on, also what has come before."""
        self._process = process
        if self.came:
            process.send_signal(signal.SIGINT)
        try:
            yield
        finally:
            self._process = None

    def _take(self, number: int, _: FrameType | None) -> None:
        self.came = True
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.kill(self._process.pid, signal.SIGINT if number == signal.SIGHUP else number)
