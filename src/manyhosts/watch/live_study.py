"""A study that may be in progress: the state of each of its runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from manyhosts.listeners.figures import number
from manyhosts.records import run_lock
from manyhosts.report.run import WELL
from manyhosts.study.points import Asked
from manyhosts.study.study import POINTS, asked_in
from manyhosts.trials.runs import Place, outcome_of
from manyhosts.watch.live_run import LiveRun, OwnerWatch

_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """One run of the study."""

    name: str
    status: str
    fraction: float | None = None
    step: str = ""
    speed: float | None = None
    """Samples in a second, of its last few seconds."""
    loss: str = ""


class LiveStudy:
    """The study in one folder."""

    def __init__(self, folder: Path) -> None:
        """Nothing but what was asked is read before `refresh`.

        Raises:
            ConfigError: the folder holds no study that can be read.
        """
        self.folder = folder
        self.rows: list[Row] = []
        self._owner = OwnerWatch(folder)
        self._runs: dict[str, LiveRun] = {}
        self._done: dict[str, Row] = {}
        self._alone_since: float | None = None
        self.asked: Asked = asked_in(folder)

    def refresh(self) -> bool:
        """Take in what is new. Returns whether there is more to be read at once."""
        lives, more = self._owner.lives(), False
        self.asked = asked_in(self.folder)  # sizes may have been added
        rows = []
        for point in self.asked.points():
            place = Place(self.folder / POINTS, point.name)
            row, unread = self._row(str(point), place)
            rows.append(row)
            more |= unread
        self.rows = rows
        self._alone_since = None if lives else self._alone_since or time.monotonic()
        return more

    @property
    def script(self) -> str:
        """The file that is studied."""
        return Path(self.asked.script).name

    @property
    def is_running(self) -> bool:
        """Whether somebody studies in the folder."""
        return not self.is_over

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._alone_since is not None and time.monotonic() - self._alone_since >= _SETTLE_S

    @property
    def done(self) -> int:
        """How many runs have ended well."""
        return sum(row.status in WELL for row in self.rows)

    @property
    def share(self) -> float | None:
        """The finished fraction of the study, with runs in progress; None where it has no run."""
        under_way = sum((row.fraction or 0.0) for row in self.rows if row.status not in WELL)
        return (self.done + under_way) / len(self.rows) if self.rows else None

    @property
    def exit_code(self) -> int:
        """0: every run has ended well; else 1."""
        return 0 if self.done == len(self.rows) else 1

    def close(self) -> None:
        """Let go of all files."""
        for run in self._runs.values():
            run.close()

    def _row(self, name: str, place: Place) -> tuple[Row, bool]:
        """The state of one run, and whether more of it is to be read. What has ended well is read no more."""
        if name in self._done:
            return self._done[name], False
        if place.name not in self._runs:
            if not (place.run.path / run_lock.NAME).exists() and not place.run.metrics.exists():
                return Row(name, outcome_of(place).status), False
            self._runs[place.name] = LiveRun(place.run.path)
        live = self._runs[place.name]
        more = live.refresh()
        history, last = live.history, live.history.last
        goes_on = live.owner.lives()
        outcome = outcome_of(place)
        status = "running" if goes_on else outcome.status
        total = history.start.get("total_steps")
        step = f"{last['step']:,}" + (f" of {total:,}" if total else "") if last else ""
        loss = number(last["loss"]) if last else ""
        row = Row(name, status, history.fraction(live.run.longest_s), step, history.samples_per_second, loss)
        if outcome.done and not goes_on and not more:
            live.close()
            self._done[name] = row
        return row, more
