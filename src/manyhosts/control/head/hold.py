"""The run directory in the head's hands: locked while the run lasts, and named at an end that is no success."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from manyhosts.control.head.course import Course
from manyhosts.errors import ManyhostsError
from manyhosts.records import run_lock

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
        self.token = succeeds or run_lock.new_token()
        try:
            self._lock = run_lock.take(run_dir, self.token, launches=True, succeeds=bool(succeeds))
        except OSError:
            # Perhaps only the hosts have that disk. There the leader takes the lock, and says where it cannot.
            run_lock.see_that_free(run_dir)
            self._lock = None

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
