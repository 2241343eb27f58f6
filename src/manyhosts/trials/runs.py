"""Trials that are ordinary runs: each a `manyhosts run` with a run directory and a log of its own, several at once.

A trial is done when its run has ended well, seen by this process or not: the record says so. What has
not ended well is run again by the next series in the same folder, and a run that broke off resumes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from manyhosts.control.agent.processes import die_with_parent
from manyhosts.errors import ConfigError
from manyhosts.records.atomic_file import read_json, write_json
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.summary import Summary

DONE = ("completed", "stopped early")
"""How a run ends that need not be run again."""
LOOK_S = 0.2
_SHOWN_LINES = 12
_ABOVE = "see the traceback above"
"""What a run says of its own screen, which is a file here."""


def hash_of(script: str) -> str:
    """Of a script's text: trials of another cannot be compared."""
    path = Path(script)
    return hashlib.sha256((path / "__main__.py" if path.is_dir() else path).read_bytes()).hexdigest()


def hashes_of(environment: Sequence[str]) -> dict[str, str]:
    """By name, a hash of each value that `--env NAME=value` gives. That of `--env NAME` may be another each time, as of
    a token that ends.
    """
    words = [word.partition("=") for word in environment]
    return {name: hashlib.sha256(value.encode()).hexdigest()[:16] if sign else "" for name, sign, value in words}


@dataclass(frozen=True, slots=True)
class Place:
    """Where one trial keeps what it has."""

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
    """How a trial ended, or has not yet."""

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

    def write(self, place: Place) -> None:
        """Keep it for the next series."""
        write_json(place.outcome, asdict(self))


def outcome_of(place: Place) -> Outcome:
    """How a trial ended, as far as the disk shows."""
    known: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):
        known = read_json(place.outcome)
    launched = known.get("launched")
    status = status_of(place)
    if status in DONE and known.get("status") != "failed":  # what comes after the training may fail, too
        return Outcome(status=status, launched=launched)
    status, reason = known.get("status", "waiting"), known.get("reason", "")
    return Outcome(status="interrupted" if status in DONE else status, reason=reason, launched=launched)


def status_of(place: Place) -> str:
    """How the run itself says that it ended; empty where it has left no record."""
    with contextlib.suppress(ConfigError):
        return Summary.read(place.run.summary).status
    return ""


class Interrupted(BaseException):
    """By a signal. What was under way has ended, in order."""


class Signals:
    """While entered, takes SIGINT, SIGTERM and SIGHUP: they are remembered, and passed on to the runs under way."""

    def __init__(self) -> None:
        self.came = False
        self.trials: set[Trial] = set()
        """Those under way."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heard = [each for each in numbers if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]  # nohup
        self._before = {number: signal.signal(number, self._take) for number in heard}
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

    def _take(self, number: int, _: FrameType | None) -> None:
        self.came = True
        for trial in self.trials:
            trial.stop(signal.SIGINT if number == signal.SIGHUP else number)


class Trial:
    """A `manyhosts run` under way."""

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        hear: Callable[[str], None] | None = None,
        outlives: bool = True,
    ) -> None:
        """Start `words` in `folder`; what it prints goes to `log`, and `hear` gets each line, soon.

        `outlives`: whether it trains on where this process is killed; else it is asked to end then (Linux).
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self._hear, self._rest = log, hear, b""
        with log.open("ab") as file:
            self._begin = self._read = file.tell()
            self.began = time.monotonic()
            # a session of its own: of a Ctrl-C it gets what is passed on to it, once
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if outlives else partial(die_with_parent, signal.SIGTERM),
            )

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began

    def has_ended(self) -> bool:
        """Whether it has, after hearing what it has printed meanwhile."""
        over = self.process.poll() is not None
        if self._hear is not None:
            with self.log.open("rb") as file:
                file.seek(self._read)
                text = file.read()
            self._read += len(text)
            *lines, self._rest = (self._rest + text).split(b"\n")
            for line in [*lines, self._rest] if over else lines:
                self._hear(line.decode(errors="replace"))
        return over

    def wait(self, signals: Signals, look: Callable[[float], None] = lambda _: None) -> int:
        """Its exit code, when it has ended. Signals are passed on to it; `look` is called with the seconds so far."""
        signals.trials.add(self)
        if signals.came:
            self.stop()
        while not self.has_ended():
            look(self.seconds)
            time.sleep(LOOK_S)
        signals.trials.discard(self)
        return self.process.returncode

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask it to end in order: a step is finished, a snapshot written."""
        self.process.send_signal(number)

    def reason(self) -> str:
        """What `manyhosts run` said last about its failure: the sentence, where and fix; else how it ended."""
        with self.log.open("rb") as log:
            log.seek(self._begin)
            lines = log.read().decode(errors="replace").splitlines()
        for number in range(len(lines) - 1, -1, -1):
            if lines[number].startswith("manyhosts: "):
                more = [line for line in lines[number + 1 : number + 3] if line.startswith(("  where:", "  fix:"))]
                return "\n".join([lines[number].removeprefix("manyhosts: "), *more])
        code = self.process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return "\n".join([f"manyhosts run {how}", *(f"  {line}" for line in lines[-_SHOWN_LINES:])])

    def outcome(self, place: Place, launched: float | None, *, interrupted: bool) -> Outcome:
        """How it has ended; `interrupted`: by the user."""
        status, code = status_of(place), self.process.returncode
        if code == 0 and status in DONE:
            return Outcome(status=status, launched=launched)
        if interrupted:
            return Outcome(status="interrupted", launched=launched)
        if code != 0:
            reason = self.reason().replace(_ABOVE, f"see the traceback in {self.log}")
        elif status:
            reason = f"the training did not end well: {status}"
        else:
            reason = "the run has left no record of training: mh.Trainer and mh.Run write one"
        return Outcome(status="failed", reason=reason, launched=launched)
