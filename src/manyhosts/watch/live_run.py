"""A run that may be in progress: read again and again, until no process trains in its directory any more."""

from __future__ import annotations

import os
import time
from pathlib import Path

from manyhosts.records import metrics, run_lock
from manyhosts.records.follower import Follower
from manyhosts.records.run_directory import RunDirectory
from manyhosts.report.history import History
from manyhosts.report.run import WELL, Run, failure_of, record_of, see_that_run

_SETTLE_S = 1.0
"""How long no process must have had the directory: between a head and its workers the lock may have no owner."""
_QUIET_S = 30.0
"""So long after its end a run whose process lives on (a notebook) may record more: the test, another start."""
INTERRUPTED = 130


class LiveRun:
    """The run in one directory."""

    def __init__(self, folder: Path) -> None:
        """Nothing is read before `look`.

        Raises:
            ConfigError: `folder` is no run's directory.
        """
        see_that_run(folder)
        self.directory = RunDirectory(folder)
        self.history = History()
        self.begun_again = 0
        """How often all that was read has been read again, for the run went back and cut its record."""
        self.record = record_of(self.directory)
        self.owner = OwnerWatch(folder)
        self._follower = Follower(self.directory.metrics, metrics.decoded)
        self._alone_since: float | None = None
        self._heard_at = time.monotonic()
        self._has_read = False

    def refresh(self) -> bool:
        """Take in what is new. Returns whether there is more to be read at once.

        Raises:
            ConfigError: its record is damaged.
        """
        lives = self.owner.lives() or self._grows_without_lock()
        news = self._follower.look()
        if news.began_again:
            self.history = History()
            self.begun_again += 1
        for line in news.lines:
            self.history.hear(line)
        if self.record is None or any(line.get("event") == "start" for line in news.lines):
            self.record = record_of(self.directory)
        self._has_read = not news.more
        if news.lines:
            self._heard_at = time.monotonic()
        if lives or news.lines:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
        return news.more

    @property
    def run(self) -> Run:
        """What is known."""
        failure = failure_of(self.directory, self.history) if not self.is_running else ""
        return Run(self.directory, self.record, self.history, self.is_running, failure)

    @property
    def is_running(self) -> bool:
        """Whether somebody trains there, as far as is known."""
        return not self.is_over

    @property
    def is_over(self) -> bool:
        """Whether everything is read, and no process could add to it."""
        now, since = time.monotonic(), self._alone_since
        is_alone = since is not None and now - since >= _SETTLE_S
        is_quiet = bool(self.history.end) and now - self._heard_at >= _QUIET_S
        return self._has_read and (is_alone or is_quiet)

    @property
    def exit_code(self) -> int:
        """0: it has ended well; 130: it was interrupted; 1: it has failed, broken off, or never begun."""
        status = self.run.status
        return 0 if status in WELL else INTERRUPTED if status == "interrupted" else 1

    def close(self) -> None:
        """Let go of the file."""
        self._follower.close()

    def _grows_without_lock(self) -> bool:
        """Whether the record was written to just now, where the disk keeps no lock and so the owner is unknown."""
        if self.owner.is_known or self.history.end:
            return False
        try:
            return time.time() - os.stat(self.directory.metrics).st_mtime < run_lock.SILENT_S
        except OSError:
            return False


class OwnerWatch:
    """Whether the owner of a directory's lock lives, asked often and answered at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._touched = 0
        self._touched_at = time.monotonic()
        self.is_known = False
        """Whether there has been one."""

    def lives(self) -> bool:
        """By its process where that is on this machine, else by its signs of life, by this machine's clock alone."""
        owner = run_lock.owner_of(self._folder)
        if owner is None:
            return False
        self.is_known = True
        if owner.is_here:
            return owner.may_live
        try:
            touched = os.stat(self._folder / run_lock.NAME).st_mtime_ns
        except OSError:
            return False
        if touched != self._touched:
            self._touched, self._touched_at = touched, time.monotonic()
        return time.monotonic() - self._touched_at < run_lock.SILENT_S
