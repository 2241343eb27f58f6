"""One run as its directory shows it: what was asked, what has happened, and its state."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from manyhosts.errors import ConfigError
from manyhosts.records import metrics, run_lock
from manyhosts.records.chosen_run import no_run, without_training
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.run_record import RunRecord
from manyhosts.records.summary import Story, Summary
from manyhosts.report.history import History
from manyhosts.study.times import Clock, Spent
from manyhosts.units import Duration

WELL = ("completed", "stopped early")


@dataclass(frozen=True, slots=True)
class Run:
    """What is known of a run at the moment."""

    directory: RunDirectory
    record: RunRecord | None
    """None where its workers have not come so far yet."""
    history: History
    is_running: bool
    failure: str = ""
    """Why it failed, where the launcher alone knows."""
    summary: Summary | None = None
    """What came out so far; None where nothing has happened, or no one has asked."""
    spent: Spent | None = None
    """Where all the time from its start to its end went; None where no one has asked."""

    @property
    def script(self) -> str:
        """Its file's name; until that is known, the directory's."""
        return Path(self.record.script).name if self.record else self.directory.path.name

    @property
    def status(self) -> str:
        """`not begun`, `running`, `broke off`, or how it has ended."""
        if self.history.end and not (self.failure and self.history.end["status"] == "failed"):
            return str(self.history.end["status"])
        if self.is_running:
            return "running" if self.history.periods else "starting"
        if self.failure:
            return "failed"
        return "broke off" if self.history.periods else "not begun"

    @property
    def reason(self) -> str:
        """Why it has ended so, or where it is."""
        status, last = self.status, self.history.last.get("step", 0)
        if status == "failed":
            return self.failure or str(self.history.end["reason"])
        if self.history.end:
            return str(self.history.end["reason"])
        if status == "broke off":
            return f"no end is on record; the last step is {last:,}, and the same command continues"
        return ""

    @property
    def longest_s(self) -> float | None:
        """How long it may train, where its duration is a time."""
        if self.record is None:
            return None
        with contextlib.suppress(ConfigError):
            return Duration.parse(str(self.record.settings.get("duration", ""))).seconds
        return None


def read_run(folder: Path) -> Run:
    """The run in `folder`, as it is now.

    Raises:
        ConfigError: there is none, or its record cannot be read.
    """
    directory = RunDirectory(folder)
    see_that_run(folder)
    history, story, clock = History(), Story(), Clock()
    for line in metrics.stream(directory.metrics):
        history.hear(line)
        story.hear(line)
        clock.hear(line)
    record, failure = record_of(directory), failure_of(directory, history)
    has_begun = bool(history.periods or history.test)
    return Run(
        directory,
        record,
        history,
        run_lock.goes_on(folder),
        failure,
        summary=story.summary(record, failure=failure) if record is not None and has_begun else None,
        spent=clock.spent(),
    )


def see_that_run(folder: Path) -> None:
    """See that `folder` is the directory of a run.

    Raises:
        ConfigError: it is not.
    """
    directory = RunDirectory(folder)
    if not any(path.exists() for path in (directory.run_json, directory.metrics, folder / run_lock.NAME)):
        raise without_training(directory) or no_run(
            folder,
            "this folder holds neither a run nor a study",
            fix="give the directory of a run, such as runs/train-…, or a study's",
        )


def record_of(directory: RunDirectory) -> RunRecord | None:
    """Its record, where it is written already.

    Raises:
        ConfigError: there is one that cannot be read.
    """
    return RunRecord.read(directory.run_json) if directory.run_json.exists() else None


def failure_of(directory: RunDirectory, history: History) -> str:
    """Why the run failed, as its launcher has written it; empty where it did not fail, or has begun again since."""
    with contextlib.suppress(ConfigError):
        summary = Summary.read(directory.summary)
        last = history.periods[-1] if history.periods else None
        begun_since = last is not None and directory.summary.stat().st_mtime < last.begin
        if summary.status == "failed" and not begun_since:
            return summary.reason
    return ""
