"""What each point of a study came to: speed, efficiency, and the causes of what it lost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhosts.cluster.neighbours import NOTE
from manyhosts.errors import ConfigError
from manyhosts.records import metrics
from manyhosts.records.run_record import RunRecord
from manyhosts.records.summary import Summary
from manyhosts.study.points import Point
from manyhosts.study.times import Spent, plain, pooled, shares_lost, spent
from manyhosts.trials.runs import Outcome, Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the record of a run says."""

    summary: Summary
    spent: Spent
    launch_seconds: float | None
    """From the command to the start of training; a queue is in it."""
    neighbours: str = ""
    """What other programs took of the cores of rank 0's host; empty where that was little, or is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One point, and how it compares with the smallest size of its variant."""

    point: Point
    place: Place
    outcome: Outcome
    measured: Measured | None = None
    """None where it has not ended well."""
    speed_up: float | None = None
    causes: Mapping[str, float] | None = None
    times: float | None = None
    """Workers over those of the smallest size."""

    @property
    def workers(self) -> int:
        """As many as there were; where it has not run, as many as were asked for."""
        return self.measured.summary.workers if self.measured else self.point.workers

    @property
    def efficiency(self) -> float | None:
        """The speed-up over what as many workers would give at best."""
        return None if self.speed_up is None or self.times is None else self.speed_up / self.times

    def to_json(self) -> dict[str, Any]:
        """For `study.json`."""
        done = self.measured
        fields: dict[str, Any] = {
            "workers": self.workers,
            "nodes": self.point.nodes,
            "settings": self.point.settings,
            "status": self.outcome.status,
            "reason": self.outcome.reason,
            "samples_per_second": samples_per_second(done.spent) if done else None,
            "epoch_seconds": list(done.spent.epoch_seconds) if done else [],
            "speed_up": self.speed_up,
            "efficiency": self.efficiency,
            "causes": None if self.causes is None else dict(self.causes),
            "validation": dict(done.summary.validation) if done else {},
            "test": dict(done.summary.test) if done else {},
            "run_dir": str(self.place.run.path),
        }
        if done is None:
            return fields
        summary = done.summary
        return fields | {
            "lr": summary.lr,
            "global_batch": summary.global_batch,
            "steps": summary.steps,
            "steps_per_epoch": summary.steps_per_epoch,
            "epochs": summary.epochs,
            "best_validation_loss": done.spent.lowest_loss(),
            "bytes_sent_per_step": summary.bytes_sent_per_step,
            "restarts": summary.restarts,
            "seconds": plain(done.spent),
            "launch_seconds": done.launch_seconds,
            "neighbours": done.neighbours or None,
        }


def samples_per_second(run: Spent) -> float | None:
    """Over the entire time from start to end: evaluation, snapshots and the first step included."""
    return run.samples / run.total if run.samples and run.total else None


def read(place: Place, outcome: Outcome) -> Measured | None:
    """What a run left on disk; None where it did not end well, or its record cannot be read."""
    if not outcome.done:
        return None
    try:
        summary = Summary.read(place.run.summary)
        RunRecord.read(place.run.run_json)
    except ConfigError:
        return None
    began = next((line["time"] for line in metrics.stream(place.run.metrics) if line["event"] == "start"), None)
    launch = None if began is None or outcome.launched is None else began - outcome.launched
    return Measured(
        summary=summary,
        spent=spent(metrics.stream(place.run.metrics)),
        launch_seconds=launch if launch is not None and launch >= 0 else None,
        neighbours=_neighbours(place),
    )


def _neighbours(place: Place) -> str:
    notes = [line.get("text", "") for line in metrics.stream(place.run.metrics) if line["event"] == "note"]
    return next((text for text in reversed(notes) if text.startswith(NOTE)), "")


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with its speed-up over the smallest size of its variant that ended well, seeds taken together."""
    found = []
    for row in rows:
        mates = [each for each in rows if each.point.varied == row.point.varied and _counts(each)]
        least = min((each.workers for each in mates), default=0)
        if _counts(row) and row.measured is not None:
            base = pooled(each.measured.spent for each in mates if each.workers == least and each.measured is not None)
            times = row.workers / least
            run = row.measured.spent
            causes = shares_lost(run, base, times=times)
            speed_up = (base.total / base.samples) / (run.total / run.samples)
            row = Row(
                point=row.point, place=row.place, outcome=row.outcome, measured=row.measured,
                speed_up=speed_up, causes=causes, times=times,
            )  # fmt: skip
        found.append(row)
    return found


def _counts(row: Row) -> bool:
    return row.measured is not None and row.measured.spent.samples > 0 and row.measured.spent.total > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """One size of one variant: its rows, one for each seed."""

    rows: tuple[Row, ...]
    """Those that ended well; at least one."""

    @property
    def row(self) -> Row:
        """Any of them, for what is equal in all."""
        return self.rows[0]

    def mean(self, values: Sequence[float | None]) -> float | None:
        """Of what is known."""
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    @property
    def speed_up(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(row.speed_up for row in self.rows if row.speed_up is not None)

    @property
    def efficiency(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(row.efficiency for row in self.rows if row.efficiency is not None)

    @property
    def causes(self) -> dict[str, float]:
        """Mean over the seeds: they add up to 1 - efficiency, as those of each seed do."""
        known = [row.causes for row in self.rows if row.causes is not None]
        return {cause: statistics.fmean(each[cause] for each in known) for cause in known[0]}

    @property
    def times_spent(self) -> dict[str, float]:
        """The share of its time that each cause has, over all seeds."""
        run = pooled(row.measured.spent for row in self.rows if row.measured)
        return {cause: seconds / run.total for cause, seconds in run.seconds.items()}

    @property
    def epoch_seconds(self) -> float | None:
        """Mean over epochs and seeds; where no epoch was finished, reckoned from the steps."""
        known = [seconds for row in self.rows if row.measured for seconds in row.measured.spent.epoch_seconds]
        if known:
            return statistics.fmean(known)
        done = self.row.measured
        if done is None or done.summary.steps_per_epoch is None or not done.spent.steps:
            return None
        return done.spent.total / done.spent.steps * done.summary.steps_per_epoch


def sizes(rows: Sequence[Row]) -> dict[tuple[tuple[str, str], ...], list[Size]]:
    """By variant: every size that ended well, the smallest first."""
    groups: dict[tuple[tuple[str, str], ...], dict[tuple[int, int], list[Row]]] = {}
    for row in rows:
        if row.speed_up is not None:
            groups.setdefault(row.point.varied, {}).setdefault((row.workers, row.point.nodes), []).append(row)
    return {varied: [Size(rows=tuple(each)) for _, each in sorted(group.items())] for varied, group in groups.items()}


def loss_that_all_reached(rows: Sequence[Row]) -> float | None:
    """The lowest validation loss that every point has come down to; None where one has none."""
    losses = [row.measured.spent.lowest_loss() for row in rows if row.measured]
    known = [loss for loss in losses if loss is not None]
    return max(known) if known and len(known) == len(losses) else None
