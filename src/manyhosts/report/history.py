"""What has happened in a run so far, read line by line: curves in few points, where the time went, events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from manyhosts.errors import ConfigError
from manyhosts.listeners.figures import amount, figure, figures
from manyhosts.records.line_file import Line
from manyhosts.report.windows import Windows, of_step, of_workers
from manyhosts.study.times import Thinned
from manyhosts.units import bytes_in_words, seconds_in_words

_RECENT_S = 5.0
"""The speed that is reported now is that of the last few seconds."""
_MOST_HAPPENINGS = 2000
_TAKEN = ("start", "step", "end", "workers", "validation", "snapshot", "restart", "slow", "test")


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that is reported in a sentence."""

    time: float
    """Seconds since the Unix epoch."""
    step: int
    kind: str
    """The `event` of its line."""
    text: str
    is_trouble: bool = False


@dataclass(slots=True)
class Period:
    """From a start of training to its end, in seconds since the Unix epoch."""

    begin: float
    end: float
    status: str = ""
    """How it ended; empty while it continues, and where it broke off."""


@dataclass(slots=True)
class History:
    """Takes the lines of `metrics.jsonl` in their order."""

    start: Line = field(default_factory=dict)
    end: Line = field(default_factory=dict)
    """The last line of each kind; empty where there is none. A start after an end takes the end away."""
    last: Line = field(default_factory=dict)
    """The last step."""
    validation: Line = field(default_factory=dict)
    test: Line = field(default_factory=dict)
    steps: int = 0
    restarts: int = 0
    loss: Thinned = field(default_factory=Thinned)
    rate: Thinned = field(default_factory=Thinned)
    """The learning rate."""
    speed: Thinned = field(default_factory=Thinned)
    """Samples in a second of a step."""
    validations: list[tuple[float, int, Mapping[str, float]]] = field(default_factory=list)
    """Of each the seconds of training, the step, and its values."""
    happenings: deque[Happening] = field(default_factory=lambda: deque(maxlen=_MOST_HAPPENINGS))
    reported: int = 0
    """How many things have happened, also those that are too long ago to be in `happenings`."""
    periods: list[Period] = field(default_factory=list)
    snapshots: list[float] = field(default_factory=list)
    """When each was saved."""
    slow: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Of each that held the others up: when its factor became another one, and which."""
    rank_0: Windows = field(default_factory=Windows)
    """The times of rank 0 alone, which every record has."""
    workers: Windows = field(default_factory=Windows)
    """The times of all workers, where the record has them."""
    _recent: deque[tuple[float, int, float]] = field(default_factory=deque)
    _passed: float = 0.0
    """Seconds of training before the present start."""

    def hear(self, line: Line) -> None:
        """Take one line. What is not known here is passed over.

        Raises:
            ConfigError: it lacks something that such a line has.
        """
        try:
            self._take(line)
        except KeyError as lacking:
            raise ConfigError(
                f"a line {line.get('event')!r} has no {lacking}",
                where="metrics.jsonl",
                fix="read the record with the manyhosts that wrote it: its version is in run.json",
            ) from lacking

    def _take(self, line: Line) -> None:
        kind = str(line.get("event"))
        take = getattr(self, f"_{kind}", None) if kind in _TAKEN else None
        if take is not None:
            take(line)
        if kind == "step":
            return
        if self.periods and kind != "test" and not self.end and "time" in line:
            self.periods[-1].end = line["time"]
        if text := sentence(line):
            self.happenings.append(Happening(line["time"], line["step"], kind, text, is_trouble(line)))
            self.reported += 1

    def clock(self, time: float) -> float:
        """Seconds of training up to `time`; what lay between an end and continuing is not in it."""
        return self._passed + (time - self.periods[-1].begin if self.periods else 0.0)

    @property
    def seconds(self) -> float:
        """Of training, so far."""
        return self.clock(self.periods[-1].end) if self.periods else 0.0

    @property
    def trained_s(self) -> float:
        """As a limit on time counts it: what a snapshot had, and the time since. Work that was lost is not in it."""
        if not self.start:
            return self.seconds
        return float(self.start.get("seconds_done", 0.0)) + self.periods[-1].end - float(self.start["time"])

    @property
    def times(self) -> Windows:
        """Those of all workers, or of rank 0 where the record has no others."""
        return self.workers if self.workers.blocks() else self.rank_0

    @property
    def samples_per_second(self) -> float | None:
        """Of the last few seconds."""
        samples, seconds = (sum(each[place] for each in self._recent) for place in (1, 2))
        return samples / seconds if seconds > 0 else None

    def fraction(self, seconds: float | None) -> float | None:
        """How much of the run is done, 0 to 1; `seconds`: how long it may train. None where it is not known."""
        step, total = self.last.get("step", self.start.get("step", 0)), self.start.get("total_steps")
        known = [step / total] if total else []
        if seconds:
            known.append(self.trained_s / seconds)
        return min(1.0, max(known)) if known else None

    @property
    def epochs(self) -> int | None:
        """How many the run is to have; None where that is not known. The steps of one may be others than before."""
        total, per_epoch = self.start.get("total_steps"), self.start.get("steps_per_epoch")
        if not total or not per_epoch:
            return None
        before = float(self.start.get("epochs_done", self.start["step"] / per_epoch))
        done = math.floor(before + 1e-6)
        of_this_one = math.floor((before - done) * per_epoch + 1e-6)  # its last step is smaller
        return int(done + math.ceil((of_this_one + total - self.start["step"]) / per_epoch))

    def seconds_left(self, seconds: float | None) -> float | None:
        """By whichever limit comes first, at the pace since the last start; None where that is not known."""
        left = [max(0.0, seconds - self.trained_s)] if seconds else []
        total, begin = self.start.get("total_steps"), self.start.get("step", 0)
        if total and self.last and self.last["step"] > begin:
            pace = (self.last["time"] - self.start["time"]) / (self.last["step"] - begin)
            left.append(max(0, total - self.last["step"]) * pace)
        return min(left, default=None)

    def _start(self, line: Line) -> None:
        if self.periods:
            self._passed = self.seconds
        self.start, self.end = line, {}
        for changes in self.slow.values():
            if changes[-1][1] > 1:
                changes.append((line["time"], 1.0))  # who is slow now is said again
        self.periods.append(Period(line["time"], line["time"]))
        self._recent.clear()

    def _end(self, line: Line) -> None:
        if self.periods:
            self.periods[-1].end, self.periods[-1].status = line["time"], line["status"]
        self.end = line

    def _step(self, line: Line) -> None:
        if not self.periods:
            self.periods.append(Period(line["time"] - line["seconds"], line["time"]))
        self.last, self.steps = line, self.steps + 1
        self.periods[-1].end = line["time"]
        now = self.clock(line["time"])
        self.loss.add(now, line["step"], line["loss"])
        self.rate.add(now, line["step"], line["lr"])
        if line["seconds"] > 0:
            self.speed.add(now, line["step"], line["samples"] / line["seconds"], line["seconds"])
        self.rank_0.add(line["step"], of_step(line))
        self._recent.append((line["time"], line["samples"], line["seconds"]))
        while self._recent[0][0] < line["time"] - _RECENT_S and len(self._recent) > 1:
            self._recent.popleft()

    def _workers(self, line: Line) -> None:
        self.workers.add(line["step"], of_workers(line))

    def _validation(self, line: Line) -> None:
        self.validation = line
        self.validations.append((self.clock(line["time"]), line["step"], line["values"]))

    def _snapshot(self, line: Line) -> None:
        self.snapshots.append(line["time"])

    def _restart(self, line: Line) -> None:
        self.restarts += 1

    def _slow(self, line: Line) -> None:
        self.slow.setdefault(line["who"], []).append((line["time"], line["factor"]))

    def _test(self, line: Line) -> None:
        self.test = line


def sentence(line: Line) -> str:
    """What happened; empty for what is reported by curves, and for what is not known here."""
    words = _WORDS.get(str(line.get("event")))
    return words(line) if words else ""


def is_trouble(line: Line) -> bool:
    """Whether it is something that went wrong."""
    slow = line["event"] == "slow" and line["factor"] > 1
    return line["event"] in ("restart", "skipped") or slow or line.get("status") == "failed"


def _start(line: Line) -> str:
    if not line["step"]:
        return "training begins"
    source = f" from {_last_word(line['resumed_from'])}" if line.get("resumed_from") else ""
    return f"continues after step {line['step']}{source}"


def _validation(line: Line) -> str:
    return f"validation: {figures(line['values'], ', ')}{' (the best)' if line['best'] else ''}"


def _snapshot(line: Line) -> str:
    size, seconds = bytes_in_words(line["bytes"]), seconds_in_words(line["seconds"])
    return f"snapshot of {size} in {seconds}: {_last_word(line['path'])}"


def _restart(line: Line) -> str:
    cost = f"{amount(line['steps_redone'], 'step')} redone, {seconds_in_words(line['seconds_lost'])} lost"
    also = f"; lost with it: {line['lost']}" if line.get("lost") else ""
    return f"continued {line['how']} after {line['reason']}: {cost}{also}"


def _end(line: Line) -> str:
    return f"{line['status']}: {line['reason']}" if line.get("reason") else str(line["status"])


def _last_word(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


_WORDS: dict[str, Callable[[Line], str]] = {
    "start": _start,
    "epoch": lambda line: f"epoch {line['epoch'] + 1}: {figure('loss', line['train_loss'])}",
    "validation": _validation,
    "snapshot": _snapshot,
    "copied": lambda line: f"copied to {line['address']}: {bytes_in_words(line['bytes'])}",
    "skipped": lambda line: f"snapshot {_last_word(line['path'])} is left out: {line['reason']}",
    "restart": _restart,
    "note": lambda line: str(line["text"]),
    "slow": lambda line: str(line["text"]),
    "compression": lambda line: f"compression {line['compression']}: {line['why']}",
    "end": _end,
    "test": lambda line: f"test: {figures(line['values'], ', ')}",
}
