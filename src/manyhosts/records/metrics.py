"""`metrics.jsonl`: the story of a run, one JSON object per line, added to as it happens.

Every line has `event`, `step`, `epoch` (from 0) and `time` (seconds since the Unix epoch). By event:

    start        steps_per_epoch, total_steps, resumed_from
    step         loss, lr, samples, gradient_norm, bytes_sent, seconds and its parts: compute, communication_exposed,
                 data_wait, snapshot_stall, other; values: what the user's step returned;
                 weight: what the batch counts in the mean, where that is not its samples
    epoch        train_loss, seconds, samples
    validation   values: loss and every metric; best, seconds
    snapshot     path, bytes, seconds, stall_seconds
    copied       to the remote copy: address, bytes, seconds
    skipped      a snapshot that could not be written or read: path, reason
    restart      reason, how, steps_redone, seconds_lost, lost, samples_lost
    note         text
    slow         text, what, who, factor: what holds the others up, or does so no more (factor 1.0); cause
    workers      steps: how many, up to `step`; communication; workers: of each rank, host, samples, and the means
                 over these steps: total, compute, communication_exposed, data_wait, snapshot_stall; hot
    end          status, reason, weights_sha256
    test         values, seconds; weights: "best" or "last", and weights_step, the step that they are of

A number that is none is one of the strings "NaN", "Infinity" and "-Infinity", and `read` gives it back as a number.

No step is here twice, and none is missing, however often the run was killed: when it continues from a snapshot of
step s, what was reported of later steps is taken away (`resume_at`), for it will be reported again.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyhosts.events import (
    CompressionChosen,
    EpochDone,
    Event,
    LossLooked,
    Note,
    Recovered,
    RunEnded,
    RunStarted,
    Slowdown,
    SnapshotCopied,
    SnapshotSaved,
    SnapshotSkipped,
    StepDone,
    TestDone,
    ValidationDone,
    WorkersTimed,
)
from manyhosts.records.line_file import Line, LineFile, read_lines
from manyhosts.records.numbers import from_words, to_words

WORDS: dict[type[Event], str] = {
    RunStarted: "start",
    StepDone: "step",
    EpochDone: "epoch",
    ValidationDone: "validation",
    SnapshotSaved: "snapshot",
    SnapshotCopied: "copied",
    SnapshotSkipped: "skipped",
    Recovered: "restart",
    Note: "note",
    LossLooked: "look",
    Slowdown: "slow",
    WorkersTimed: "workers",
    CompressionChosen: "compression",
    RunEnded: "end",
    TestDone: "test",
}
"""The `event` of the line that each event becomes."""

_TOLD_AGAIN = frozenset({"step", "epoch", "validation", "snapshot", "copied", "workers"})
"""What happens again when steps are done again."""
_ORDERLY = frozenset({"completed", "stopped early", "interrupted"})
"""How a run ends when nothing failed."""
_TEXTS = frozenset(
    {
        "event",
        "text",
        "outcome",
        "what",
        "who",
        "reason",
        "how",
        "lost",
        "why",
        "compression",
        "path",
        "address",
        "resumed_from",
        "status",
        "weights_sha256",
        "cause",
        "weights",
    }
)

_STEP_LINE = re.compile(rb'\{"event": "step", "step": (\d+)\b')
_RESTART_LINE = b'{"event": "restart", '
# what `line_of` makes of a step, three times as fast: a thread that writes takes its time from the loop
_STEP = (
    '{"event": "step", "step": %d, "epoch": %d, "time": %.6f, "loss": %r, "lr": %r, "samples": %d, '
    '"gradient_norm": %s, "bytes_sent": %d, "seconds": %.6f, "compute": %.6f, "communication_exposed": %.6f, '
    '"data_wait": %.6f, "snapshot_stall": %.6f, "other": %.6f, "exchange_seconds": %.6f}\n'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """What the lines say about the run before this one."""

    cut_off: str
    """How it broke off, in words; "" where it ended in order, or there was none."""
    steps_redone: int
    """Steps past the snapshot, whose lines were taken away."""
    samples_lost: int
    """Of those steps."""
    seconds_lost: float
    """From the end of the last step that still counts to the new start: the work done again, and the time down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What a worker that is gone has reported. Called with an event: whether that one."""

    step: int
    """The last one."""
    lines: frozenset[tuple[Any, Any]]
    """The `event` and `step` of each line since then."""
    end: bool
    """Whether it has reported that the run ended, and no one has continued since."""

    def __call__(self, event: Event) -> bool:
        """Whether it is among them, or before them."""
        return event.step < self.step or (WORDS[type(event)], event.step) in self.lines


class MetricsFile:
    """Adds events to `metrics.jsonl`. `add` costs the training loop about as much as an append to a list."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: LineFile[Event] = LineFile(path, text_of)
        self.add = self._lines.add
        """Add one event. Its line is with the operating system within a second."""

    def resume_at(self, step: int, *, time: float) -> Resumed:
        """Make the lines those of a run that is at `step` and starts to continue at `time`.

        Steps, epochs, validations and snapshots after `step` are taken away; what broke the run off, notes and tests
        stay. Written completely or not at all.
        """
        tail = self._lines.tail(lambda line: line.get("event") == "step" and line["step"] <= step)
        left = [line for _, line in tail if line.get("event") not in _TOLD_AGAIN or line["step"] <= step]
        if len(left) < len(tail):
            self._lines.replace_tail(tail[0][0], left)
        redone = [line for _, line in tail if line.get("event") == "step" and line["step"] > step]
        # a run that broke off twice has a start after the step: the time before it was counted then
        counted_until = max((line["time"] for line in left if line.get("event") in ("step", "start")), default=time)
        return Resumed(
            cut_off=_how_it_broke_off([line for _, line in tail]),
            steps_redone=len(redone),
            samples_lost=sum(line["samples"] for line in redone),
            seconds_lost=max(0.0, time - counted_until),
        )

    def write_again(self, event: Event) -> None:
        """Add one event; where the lines of its step have it already, this one is in its place."""
        new, same = line_of(event), ("event", "step", "path", "weights")
        tail = self._lines.tail(lambda line: line.get("event") == "step" and line["step"] <= event.step)
        kept = [line for _, line in tail if any(line.get(key) != new.get(key) for key in same)]
        if len(kept) < len(tail):
            self._lines.replace_tail(tail[0][0], kept)
        self.add(event)

    def take_over(self) -> Told:
        """Continue with the file of a worker that is gone. Returns what that worker has reported.

        The file gets a new body under its old name: where the other worker still lives, cut off, it writes into the
        old body, which no one reads any more.
        """
        tail = self._lines.tail(lambda line: line.get("event") == "step")
        lines = [line for _, line in tail]
        if tail:
            self._lines.replace_tail(tail[0][0], lines)
        turns = [line["event"] for line in lines if line.get("event") in ("start", "restart", "end")]
        return Told(
            step=max((line["step"] for line in lines if line.get("event") == "step"), default=0),
            lines=frozenset((line.get("event"), line.get("step")) for line in lines),
            end=turns[-1:] == ["end"],
        )

    def restarts(self) -> int:
        """How many there are in the file: read as bytes, for a long run has millions of other lines."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            return sum(line.startswith(_RESTART_LINE) for line in file)
        return 0

    def flush(self) -> None:
        """Have every line on the disk before this returns. Called before a snapshot, so that none it counts is missing.

        Raises:
            OSError: the disk does not take them.
        """
        self._lines.flush()

    def close(self) -> None:
        """Write what is left. Safe to call twice."""
        self._lines.close()


def read(path: Path) -> list[Line]:
    """Every line of `metrics.jsonl`; none where there is no file, and a half-written last one left out."""
    return list(stream(path))


def stream(path: Path) -> Iterator[Line]:
    """The lines of `metrics.jsonl` one by one, also while the run adds to them."""
    return (decoded(line) for line in read_lines(path) if "event" in line)


def lost_steps(path: Path, last: int) -> str:
    """The steps up to `last` of which there is no complete line, in words; empty where none is lost."""
    there = bytearray(last + 1)
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:  # not parsed: a run may have millions
            found = _STEP_LINE.match(line)
            if found and line.endswith(b"}\n") and b"\0" not in line and (step := int(found[1])) <= last:
                there[step] = 1
    gaps = [(found.start() + 1, found.end()) for found in re.finditer(rb"\0+", bytes(there[1:]))]
    words = [f"step {first}" if first == final else f"steps {first} to {final}" for first, final in gaps]
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more gaps" if len(words) > 3 else "")


def decoded(line: Line) -> Line:
    """A line as it is meant: words that mean numbers are numbers."""
    return {key: value if key in _TEXTS else from_words(value) for key, value in line.items()}


def text_of(event: Event) -> str:
    """The line that `event` becomes, with its end."""
    if isinstance(event, StepDone) and not event.values and event.weight is None:
        timing, norm = event.timing, event.gradient_norm
        if math.isfinite(event.loss + event.lr + (norm or 0.0) + timing.total):
            return _STEP % (
                *(event.step, event.epoch, event.time, float(event.loss), float(event.lr), event.samples),
                *("null" if norm is None else repr(float(norm)), event.bytes_sent, timing.total, timing.compute),
                *(timing.communication_exposed, timing.data_wait, timing.snapshot_stall, timing.other),
                event.exchange_seconds,
            )
    return json.dumps(line_of(event), allow_nan=False) + "\n"


def line_of(event: Event) -> Line:
    """The object that `event` becomes: numbers that are none as words, paths as text."""
    fields = asdict(event)
    line = {"event": WORDS[type(event)], "step": fields.pop("step"), "epoch": fields.pop("epoch", None)}
    line["time"] = round(fields.pop("time"), 6)
    if line["epoch"] is None:
        del line["epoch"]
    if isinstance(event, StepDone):
        timing = {name: round(seconds, 6) for name, seconds in fields.pop("timing").items()}
        values = fields.pop("values")
        if event.weight is None:
            del fields["weight"]
        fields["exchange_seconds"] = round(fields["exchange_seconds"], 6)
        line |= fields | {"seconds": timing.pop("total")} | timing | ({"values": values} if values else {})
    else:
        line |= fields
    return {key: _plain(value) for key, value in line.items()}


def _how_it_broke_off(tail: list[Line]) -> str:
    """In words, how the run that wrote `tail` ended; "" for one that ended in order."""
    if not tail:
        return ""
    turns = [line for line in tail if line.get("event") in ("start", "end")]
    if turns and turns[-1]["event"] == "end":
        return "" if turns[-1]["status"] in _ORDERLY else f"the run failed: {turns[-1]['reason']}"
    last = max(
        (line["step"] for line in tail if line.get("event") == "step"), default=turns[-1]["step"] if turns else 0
    )
    return f"the run broke off after step {last}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str | int | None):
        return value
    return to_words(float(value))  # float: a user's value may be numpy's
