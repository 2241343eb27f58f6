"""The state of a run that every part of the head reads, with its hold on the run directory."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manyhosts.control.display import Display
from manyhosts.control.job import Job
from manyhosts.control.loop import Loop
from manyhosts.errors import ConfigError, ManyhostsError
from manyhosts.records import run_lock
from manyhosts.records.metrics import stream
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.run_record import RunRecord
from manyhosts.records.summary import summarise


@dataclass(slots=True)
class Course:
    """One run, from the first agent to its result."""

    job: Job
    display: Display
    loop: Loop = field(default_factory=Loop)
    generation: int = 0
    """How often all workers have been started anew."""
    running: set[int] = field(default_factory=set)
    """The workers that run, by their members' numbers."""
    interrupted: float = 0.0
    """When the first signal came, on the monotonic clock; 0 before."""
    trainer_seen: bool = False
    """Whether a worker has said that it made a Trainer."""
    directories: set[Path] = field(default_factory=set)
    """The run directories in which a Trainer's run has begun, as workers name them."""
    warm: tuple[str, ...] = ()
    """What a host has loaded because the script imports it: one that comes later need not find that out."""
    result: int | ManyhostsError | None = None
    """How the run has ended; None while it goes on."""
    can_be_taken_over: bool = False
    """Whether another head can go on with the run where this one was killed."""

    @property
    def is_over(self) -> bool:
        """Whether there is a result."""
        return self.result is not None

    def written_down(self) -> dict[str, Any]:
        """What another head needs to go on with this run."""
        return {
            "generation": self.generation,
            "running": sorted(self.running),
            "interrupted": bool(self.interrupted),
            "trainer_seen": self.trainer_seen,
            "directories": sorted(map(str, self.directories)),
            "warm": list(self.warm),
            "workers_of": list(self.job.workers_of.items()),
        }

    def go_on_from(self, written: Mapping[str, Any]) -> None:
        """Be as far as another head was when it wrote that."""
        self.generation, self.running = int(written["generation"]), set(written["running"])
        self.interrupted = time.monotonic() if written["interrupted"] else 0.0
        self.trainer_seen, self.warm = bool(written["trainer_seen"]), tuple(written["warm"])
        self.directories = {Path(path) for path in written["directories"]}
        self.job = replace(self.job, workers_of=dict(written["workers_of"]))


_OPTIONS = ("--run-dir", "--resume")


class Hold:
    """The one of this head."""

    def __init__(self, course: Course, succeeds: str = "") -> None:
        """Take the lock. `succeeds`: the token of the start whose last head is dead.

        Raises:
            ConfigError: another run is going on in the run directory, or that head lives.
        """
        self._course = course
        run_dir = course.job.run_dir
        self._made = not run_dir.exists()
        before = run_lock.owner_of(run_dir)
        self.token = succeeds or run_lock.new_token()
        try:
            self._lock = run_lock.take(run_dir, self.token, launches=True, succeeds=bool(succeeds))
        except OSError:
            # Perhaps only the hosts have that disk. There the leader takes the lock, and says where it cannot.
            run_lock.see_that_free(run_dir)
            self._lock = None
        if before is not None and before.launches and before.token != self.token:  # else it would hold the lock
            course.display.warn(
                "manyhosts: the command that ran in this directory before was killed, and nothing of it goes on: this"
                " run starts from its newest snapshot, where there is one"
            )

    @property
    def is_lost(self) -> bool:
        """Whether another has the run directory."""
        return self._lock is not None and self._lock.lost is not None

    def check(self) -> None:
        """End the run where another one has taken its directory."""
        try:
            if self._lock is not None:
                self._lock.check()
        except ManyhostsError as error:
            self._course.result = error

    def release(self) -> None:
        """Let others run in the directory. Safe to call twice."""
        if self._lock is not None:
            self._lock.release()
        if self._made:
            with contextlib.suppress(OSError):  # it holds something, as a rule
                self._course.job.run_dir.rmdir()

    def command_to_go_on(self) -> str:
        """What the user types to go on with this run; empty where there is nothing to go on with."""
        job, begun = self._course.job, self._course.directories
        if not job.words:
            return ""
        if job.run_dir_is_chosen or any(path.is_relative_to(job.run_dir) for path in begun):
            return shlex.join(
                ["manyhosts", *with_run_dir(job.words, len(job.arguments), _short(job.run_dir, job.folder))]
            )
        return shlex.join(["manyhosts", *job.words]) if begun else ""  # the script itself names its directory


def with_run_dir(words: Sequence[str], arguments: int, run_dir: str) -> list[str]:
    """`words`, of which the last are the script and its so many arguments, for a run in `run_dir`."""
    end = len(words) - arguments - 1
    own, script = list(words[:end]), words[end:]
    kept: list[str] = []
    while own:
        word = own.pop(0)
        if word in _OPTIONS:
            own = own[1:]
        elif not word.startswith(tuple(f"{option}=" for option in _OPTIONS)):
            kept.append(word)
    return [kept[0], "--run-dir", run_dir, *kept[1:], *script]


def _short(run_dir: Path, folder: Path) -> str:
    """`run_dir` as it is typed in `folder`."""
    return str(run_dir.relative_to(folder) if run_dir.is_relative_to(folder) else run_dir)


def write_failed_summary(run_dirs: Iterable[Path], error: ManyhostsError) -> None:
    """Have each of `run_dirs` whose training has not come to its end say that it failed with `error`.

    Those that this machine does not have are passed over: the record is where the leader was.
    """
    for directory in map(RunDirectory, run_dirs):
        if not (directory.run_json.exists() and directory.metrics.exists()):
            continue
        with contextlib.suppress(OSError, ConfigError):  # the failure itself is told all the same
            summary = summarise(stream(directory.metrics), RunRecord.read(directory.run_json), failure=error.what)
            if summary.status == "failed":
                summary.write(directory.summary)
