"""Where the time of one run went, from the lines of its metrics: each part measured by a clock of its own.

The clock runs from the `start` of training to its `end`; what led there (a queue, the start of Python) and what comes
after it (the test) are not in it. Of a run that broke off and continued, the time between is not in it either.

    start_up                from the start to the end of the first step: compiling, the first batch, the first look
    compute, data_wait      of every later step, as the loop measures them
    communication_exposed   waiting for others in a step, as long as the worker that waited least did
    straggler               what a step took beyond that and the middle worker's own work: the others wait for it
    evaluation              the seconds of validations
    snapshot                within steps: the stall; between two steps: the rest of a gap in which a snapshot, or the
                            best model, was written
    other                   what is left: the gaps between steps, and what a step calls other

The times of steps are rank 0's. Where the record has those of all workers (`workers` lines), a step is shared out
as they say: of computing and of data what the middle worker took (the lower one of two), of snapshots what the one
took that was stalled longest. So what one worker takes more than the others is `straggler`, what all take more is not.
Where there are no such lines (one worker, or the last steps before a run broke off) rank 0's own parts count.
"""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhosts.records.blocks import Blocks
from manyhosts.records.line_file import Line

CAUSES = (
    "compute",
    "communication_exposed",
    "data_wait",
    "straggler",
    "evaluation",
    "snapshot",
    "start_up",
    "other",
)

_OWN = {
    "compute": "compute", "communication_exposed": "communication_exposed", "data_wait": "data_wait",
    "snapshot_stall": "snapshot",
}  # fmt: skip
"""The parts of a step as rank 0 has measured them, and the cause that each is counted to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What a run did, and the seconds that it spent on it."""

    seconds: Mapping[str, float]
    """By cause, all of them; they add up to `total`."""
    samples: int
    steps: int
    epoch_seconds: tuple[float, ...] = ()
    """Of each finished epoch, from its first step to the next epoch's, evaluation and snapshots included."""
    validations: tuple[tuple[float, int, Mapping[str, float]], ...] = ()
    """Of each validation the seconds since the start, the step, and its values."""
    losses: tuple[tuple[float, int, float], ...] = ()
    """Of up to 256 blocks of steps: the seconds since the start, the last step, and the mean training loss."""
    slowest: tuple[str, float] | None = None
    """The slowest worker, and the part of `straggler` that it takes more than the middle one from the first step to the
    last; what is left comes from pauses that workers have in turn. None where not all workers are known."""

    @property
    def total(self) -> float:
        """From start to end, in seconds."""
        return sum(self.seconds.values())

    def lowest_loss(self) -> float | None:
        """Of all validations; None where there is none that is a number."""
        losses = [values["loss"] for _, _, values in self.validations if "loss" in values]
        return min(filter(math.isfinite, losses), default=None)

    def seconds_to(self, loss: float) -> float | None:
        """Until a validation found `loss` or less; None where none did."""
        return next((when for when, _, values in self.validations if values.get("loss", loss + 1) <= loss), None)


def spent(lines: Iterable[Line]) -> Spent:
    """Where the time went, by the metrics of a run."""
    clock = Clock()
    for line in lines:
        clock.hear(line)
    return clock.spent()


class Thinned(Blocks[tuple[float, int, float, float]]):
    """A curve of any length in a few points: the seconds, the step, and the weighted mean over a block of steps.

    A value that is no number counts nothing, so that one bad step does not hide all of its block.
    """

    MOST = 256

    @staticmethod
    def merged(blocks: Sequence[tuple[float, int, float, float]]) -> tuple[float, int, float, float]:
        """The sums, at the last step."""
        return (*blocks[-1][:2], sum(each[2] for each in blocks), sum(each[3] for each in blocks))

    def add(self, seconds: float, step: int, value: float, weight: float = 1.0) -> None:
        """One step more."""
        self.take((seconds, step, value * weight, weight) if math.isfinite(value) else (seconds, step, 0.0, 0.0))

    def points(self) -> list[tuple[float, int, float]]:
        """The seconds, the step and the mean of each block."""
        return [(seconds, step, total / by if by else math.nan) for seconds, step, total, by in self.blocks()]


@dataclass(frozen=True, slots=True)
class _Window:
    """Steps that all workers have reported the times of."""

    after: int
    upto: int
    shares: Mapping[str, float]
    """What part of the time of these steps went to which cause."""


def _window(line: Line) -> _Window | None:
    """What a `workers` line says; None where its steps took no time."""
    workers = line["workers"]
    total = statistics.fmean(worker["total"] for worker in workers)
    seconds = {
        "compute": statistics.median_low(worker["compute"] for worker in workers),
        "data_wait": statistics.median_low(worker["data_wait"] for worker in workers),
        "communication_exposed": line["communication"],
        "snapshot": max(worker["snapshot_stall"] for worker in workers),
    }
    seconds["straggler"] = max(0.0, total - sum(seconds.values()))
    total = sum(seconds.values())
    if total <= 0:
        return None
    shares = {cause: part / total for cause, part in seconds.items()}
    return _Window(after=line["step"] - line["steps"], upto=line["step"], shares=shares)


@dataclass(slots=True)
class Clock:
    """Reads the lines in their order. Numbers of steps are kept close, for there may be millions."""

    written: set[int] = field(default_factory=set)
    """Steps after which something was written to continue from: what lies after such a step is known by its line
    alone, which may come many steps later."""
    windows: list[_Window] = field(default_factory=list)
    """These come after their steps, too."""
    each: dict[str, list[float]] = field(default_factory=dict)
    """Of each worker: the steps that it reported, and the seconds of its own work in them."""
    own: array[float] = field(default_factory=lambda: array("d"))
    """Of each step its number, its seconds but for `other`, and rank 0's own parts of them."""
    gaps: array[float] = field(default_factory=lambda: array("d"))
    """The number of a step, and the seconds after it in which nothing was evaluated."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    samples: int = 0
    steps: int = 0
    first: bool = True
    until: float | None = None
    """Up to when the time is accounted for; None while no clock runs."""
    after: int = 0
    """The step that was done last."""
    evaluating: float = 0.0
    """Seconds of validations since that step."""
    passed: float = 0.0
    """Seconds that the clock ran before the present start."""
    began: float = 0.0
    validations: list[tuple[float, int, Mapping[str, float]]] = field(default_factory=list)
    losses: Thinned = field(default_factory=Thinned)
    epochs: dict[int, list[float]] = field(default_factory=dict)
    """Of each epoch, by the clock: when it began, and when the next one did."""
    finished: list[int] = field(default_factory=list)

    def hear(self, line: Line) -> None:
        """Take one line."""
        kind = line["event"]
        if kind in ("snapshot", "skipped") or (kind == "validation" and line["best"]):
            self.written.add(line["step"])
        elif kind == "workers" and (window := _window(line)):
            self.windows.append(window)
            for rank, worker in enumerate(line["workers"]):
                number = worker.get("worker", -1)  # it stays, where ranks change
                where = f" on {worker['host']}" if worker.get("host") else ""
                name = f"worker {rank if number < 0 else number}{where}"
                told = self.each.setdefault(name, [0.0, 0.0])
                told[0] += line["steps"]
                told[1] += line["steps"] * (worker["compute"] + worker["data_wait"])
        if kind == "start":
            self.pause(self.until)
            self.until = self.began = line["time"]
            self.first, self.after, self.evaluating = True, line["step"], 0.0
        elif self.until is None:
            return  # a test, say: training is over
        elif kind == "step":
            self.step(line)
        elif kind == "validation":
            self.evaluating += line["seconds"]
            self.validations.append((self.clock(line["time"]), line["step"], line["values"]))
        elif kind == "epoch":
            self.finished.append(line["epoch"])
        elif kind == "end":
            self.gap(line["time"])
            self.pause(line["time"])

    def clock(self, time: float) -> float:
        """Seconds that the clock shows."""
        return self.passed + time - self.began

    def pause(self, time: float | None) -> None:
        """The clock stops at `time`."""
        if time is not None:
            self.mark_epoch(time)
            self.passed = self.clock(time)
        self.until = None

    def mark_epoch(self, time: float) -> None:
        """The epoch that was under way lasts up to `time`, as far as is known."""
        if self.epochs:
            next(reversed(self.epochs.values()))[1] = self.clock(time)

    def step(self, line: Line) -> None:
        """One optimizer step, and what was between it and the one before."""
        assert self.until is not None, "the clock runs"
        begin = line["time"] - line["seconds"]
        if self.first:
            self.seconds["start_up"] += max(0.0, line["time"] - self.until)
            self.first = False
        else:
            self.gap(begin)
            self.seconds["other"] += line["other"]
            self.own.extend((line["step"], line["seconds"] - line["other"], *(line[part] for part in _OWN)))
        if line["epoch"] not in self.epochs:
            self.mark_epoch(begin)
            self.epochs[line["epoch"]] = [self.clock(begin), self.clock(line["time"])]
        self.until, self.after = line["time"], line["step"]
        self.losses.add(self.clock(line["time"]), line["step"], line["loss"])
        self.samples += line["samples"]
        self.steps += 1

    def share_out(self) -> None:
        """The seconds of all steps by cause, but for `other`: as all workers reported them, else rank 0's own."""
        windows = sorted(self.windows, key=lambda window: window.upto)
        columns = [self.own[place :: 2 + len(_OWN)] for place in range(2 + len(_OWN))]
        for step, total, *parts in zip(*columns, strict=True):
            place = bisect_left(windows, step, key=lambda window: window.upto)
            if place < len(windows) and windows[place].after < step:
                for cause, share in windows[place].shares.items():
                    self.seconds[cause] += share * total
            else:
                for part, seconds in zip(_OWN, parts, strict=True):
                    self.seconds[_OWN[part]] += seconds
        for step, seconds in zip(self.gaps[::2], self.gaps[1::2], strict=True):
            self.seconds["snapshot" if step in self.written else "other"] += seconds

    def gap(self, begin: float) -> None:
        """From the last step to `begin`: validation, what was written, and the rest."""
        assert self.until is not None, "the clock runs"
        gap = begin - self.until
        evaluation = min(self.evaluating, max(0.0, gap))
        self.seconds["evaluation"] += evaluation
        self.gaps.extend((self.after, gap - evaluation))
        self.evaluating = 0.0

    def slowest(self) -> tuple[str, float] | None:
        """See `Spent.slowest`. A worker that is slow is so in every line, and one that pauses now and then is not."""
        means = {name: seconds / steps for name, (steps, seconds) in self.each.items()}
        steps = sum(window.upto - window.after for window in self.windows)
        if len(means) < 2 or not self.seconds["straggler"]:
            return None
        name = max(means, key=lambda each: means[each])
        more = means[name] - statistics.median_low(means.values())
        return name, min(1.0, more * steps / self.seconds["straggler"])

    def spent(self) -> Spent:
        """All of it. Called once, after the last line."""
        if self.until is not None:
            self.pause(self.until)
        self.share_out()
        lasted = {epoch: end - begin for epoch, (begin, end) in self.epochs.items()}
        return Spent(
            seconds=self.seconds,
            samples=self.samples,
            steps=self.steps,
            epoch_seconds=tuple(lasted[epoch] for epoch in self.finished if epoch in lasted),
            validations=tuple(self.validations),
            losses=tuple(self.losses.points()),
            slowest=self.slowest(),
        )


def pooled(runs: Iterable[Spent]) -> Spent:
    """Several runs as if they were one."""
    runs = list(runs)
    return Spent(
        seconds={cause: sum(run.seconds[cause] for run in runs) for cause in CAUSES},
        samples=sum(run.samples for run in runs),
        steps=sum(run.steps for run in runs),
    )


def shares_lost(run: Spent, base: Spent, *, times: float) -> dict[str, float]:
    """What part of its ideal speed a run lost to each cause, where it has `times` as many workers as `base`.

    Ideal is that each part of the base's time for a sample shrinks with the workers. What is spent on a cause beyond
    that, over the time that a sample took, is the share lost to it: they add up to 1 - efficiency. A negative share is
    a gain. Both runs have seen samples.
    """
    per_sample = run.total / run.samples
    return {
        cause: (run.seconds[cause] / run.samples - base.seconds[cause] / base.samples / times) / per_sample
        for cause in CAUSES
    }


def plain(spent: Spent) -> dict[str, Any]:
    """For `study.json`: the seconds of each part."""
    return {cause: round(seconds, 6) for cause, seconds in spent.seconds.items()}
