"""`summary.json`: what came out of a run, reckoned from its record and the lines of its metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.records.atomic_file import read_json, write_json
from manyhosts.records.line_file import Line
from manyhosts.records.numbers import from_words, to_words
from manyhosts.records.run_record import RunRecord

SCHEMA_VERSION = 1
PARTS = ("compute", "communication_exposed", "data_wait", "snapshot_stall", "other")
"""What the time of a step is made of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What `summary.json` holds. None or an empty mapping means what the run did not do."""

    status: str
    """`completed`, `stopped early`, `failed` or `interrupted`."""
    reason: str
    workers: int
    nodes: int
    strategy: str
    compression: str
    precision: str
    global_batch: int | None
    """Samples of one optimizer step, over all workers."""
    lr: float | None
    """The highest learning rate of the run: what a warm-up rises to and a schedule falls from."""
    steps: int
    """Optimizer steps, each counted once however often it was redone."""
    epochs: int
    """Epochs that were finished."""
    steps_per_epoch: int | None
    samples_per_second: float | None
    """Samples over the time of their steps: validation and snapshots between steps are not in it."""
    epoch_seconds: Sequence[float]
    """Of each finished epoch: the time of its steps."""
    step_seconds: Mapping[str, float]
    """`median` and `p95` of entire steps; `compute`, `communication_exposed`, `data_wait`, `snapshot_stall` and `other`
    are means, which add up to the mean step."""
    bytes_sent_per_step: float | None
    """Mean over the steps, of rank 0."""
    network: Mapping[str, float] = field(default_factory=dict)
    """In bytes per second and worker: `effective_bandwidth`: what was sent over the time in which exchanges were under
    way, hidden or not; where `compression="auto"` probed also `probed_bandwidth` and, in seconds, `probed_latency`."""
    compression_reason: str = ""
    """Why `auto` took the compression that it took."""
    restarts: int
    """How often training continued after a failure."""
    steps_redone: int
    samples_lost: int = 0
    """Samples that were computed for nothing, and are trained on again: of steps after a snapshot, and where
    a step is many updates of those that broke off."""
    seconds_lost: float
    """What failures cost: the work done again and the time down."""
    train_loss: float | None
    """Mean over the samples of the last epoch, or of the part of it that ran."""
    validation: Mapping[str, float]
    """The last one."""
    best: Mapping[str, Any]
    """`metric`, `value` and `step` of the best validation."""
    test: Mapping[str, float]
    weights_sha256: str
    """Over the parameters and buffers in name order: equal hash, equal bits."""
    seconds: float
    """From the first start to the end, without the time between an orderly end and continuing later."""
    worker_seconds: float | None = None
    """The same, of every worker that there was meanwhile; None where an older version wrote the record."""
    schema_version: int = field(default=SCHEMA_VERSION)

    def write(self, path: Path) -> None:
        """Write the summary to `path`, completely or not at all. NaN and infinity become words, as in the metrics."""
        write_json(path, to_words(dataclasses.asdict(self)))

    @classmethod
    def of_last_start(cls, run_dir: Path) -> Summary:
        """The summary of the run in `run_dir`, if it is of the run's last start.

        Raises:
            ConfigError: see `read`; or the run was begun again since it was written.
        """
        path, begun = run_dir / "summary.json", 0.0
        with contextlib.suppress(OSError):
            begun = (run_dir / "run.json").stat().st_mtime
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < begun and not _has_ended(run_dir / "metrics.jsonl"):
                raise ConfigError("the run was begun again since its summary was written", where=str(path))
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> Summary:
        """The summary at `path`.

        Raises:
            ConfigError: there is none, a field is missing, or another version of manyhosts wrote it.
        """
        fields = read_json(path, version=SCHEMA_VERSION, written_by=" (see `versions` in run.json)")
        # An older file is none the worse without them.
        given_later = {"network", "compression_reason", "samples_lost", "worker_seconds"}
        names = [entry.name for entry in dataclasses.fields(cls)]
        missing = [name for name in names if name not in fields and name not in given_later]
        if missing:
            raise ConfigError(
                f"summary.json lacks {', '.join(missing)}", where=str(path), fix="restore the file, or run again"
            )
        texts = {"status", "reason", "strategy", "compression", "compression_reason", "precision", "weights_sha256"}
        return cls(
            **{name: fields[name] if name in texts else from_words(fields[name]) for name in names if name in fields}
        )


_TAIL = 1 << 16


def _has_ended(metrics: Path) -> bool:
    """Whether an end is the last turn on record: a copy of a run may have its files in any order of their times."""
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            event = json.loads(line)["event"]
            if event in ("start", "restart", "step", "end"):
                return bool(event == "end")
    return False


def summarise(lines: Iterable[Line], record: RunRecord, *, failure: str = "") -> Summary:
    """The summary of a run whose metrics are `lines`, in their order, also across restarts.

    `failure`: why it failed, for a run that has no end on record or whose rank 0 knew less.
    """
    story = Story()
    for line in lines:
        story.hear(line)
    return story.summary(record, failure=failure)


class Story:
    """What has been heard of the lines so far; numbers of steps are kept close, for there may be millions."""

    def __init__(self) -> None:
        self.start: Line = {}
        self.trained: Line = {}
        """The last start after which there was a step."""
        self.end: Line = {}
        self.validation: Line = {}
        self.best_validation: Line = {}
        self.test: Line = {}
        self.restarts: list[Line] = []
        self.finished: list[int] = []
        self.totals, self.samples, self.lrs = array("d"), array("q"), set[float]()
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.seconds_of: dict[int, float] = defaultdict(float)
        self.bytes_sent = 0
        self.samples_lost = 0
        self.bytes_in_exchanges, self.exchange_seconds = 0, 0.0
        self.compression: Line = {}
        self.last_step = 0
        self.epoch = -1
        self.loss_sum, self.loss_weight = 0.0, 0.0
        self.seconds = self.worker_seconds = 0.0
        self._workers: int | None = None
        """Those that there are; None where that is not on record."""
        self._running_since: float | None = None
        self._before: tuple[int, float, float] = (-1, 0.0, 0.0)
        """Steps, and seconds of the run and of its workers, when the run was last started after an orderly end."""

    def hear(self, line: Line) -> None:
        """Take the next line."""
        kind = line["event"]
        if kind == "step":
            self._step(line)
        elif kind == "epoch":
            self.finished.append(line["epoch"])
        elif kind == "validation":
            self.validation = line
            if line["best"]:
                self.best_validation = line
        elif kind == "restart":
            self.restarts.append(line)
            self.samples_lost += line.get("samples_lost", 0)
        elif kind == "start":
            self.start, self.end = line, {}
        elif kind in ("test", "compression", "end"):
            setattr(self, kind, line)
        if kind != "test":
            self._clock(kind, line["time"])
            self._count(line.get("workers"))

    def _count(self, given: int | Sequence[Any] | None) -> None:
        """Take how many workers there are: their number, or what each of them reports, for some may have joined."""
        if given:
            self._workers = given if isinstance(given, int) else len(given)

    def summary(self, record: RunRecord, *, failure: str = "") -> Summary:
        """Of all that was heard: see `summarise`."""
        end = self.end
        if failure and end.get("status", "failed") == "failed":
            end = {**end, "status": "failed", "reason": failure}
        strategy = record.settings.get("strategy") or {}
        return Summary(
            status=end.get("status", "interrupted" if self.totals else "completed"),
            reason=end.get("reason", "no end is on record" if self.totals else "tested without training"),
            workers=record.workers,
            nodes=len(record.hosts),
            strategy=record.strategy,
            compression=self.compression.get("compression") or strategy.get("compression") or "none",
            compression_reason=self.compression.get("why", ""),
            network=self.network(),
            precision=record.settings["precision"],
            global_batch=self._global_batch(record),
            lr=max(self.lrs, default=None),
            steps=end.get("step", self.last_step),
            epochs=len(self.finished),
            steps_per_epoch=(self.trained or self.start).get("steps_per_epoch"),
            samples_per_second=_ratio(sum(self.samples), sum(self.totals)),
            epoch_seconds=[round(self.seconds_of[epoch], 6) for epoch in self.finished],
            step_seconds=self.step_seconds(),
            bytes_sent_per_step=_ratio(self.bytes_sent, len(self.totals)),
            restarts=len(self.restarts),
            steps_redone=sum(line["steps_redone"] for line in self.restarts),
            samples_lost=self.samples_lost,
            seconds_lost=round(sum(line["seconds_lost"] for line in self.restarts), 6),
            train_loss=_ratio(self.loss_sum, self.loss_weight),
            validation=self.validation.get("values", {}),
            best=self.best(record),
            test=self.test.get("values", {}),
            weights_sha256=end.get("weights_sha256", ""),
            seconds=round(self.seconds, 6),
            worker_seconds=round(self.worker_seconds, 6) if math.isfinite(self.worker_seconds) else None,
        )

    def _step(self, line: Line) -> None:
        self.last_step, self.trained = line["step"], self.start
        if self.end:  # by the worker that was left, which had come farther than the rank 0 that reported the end
            self.end = {**self.end, "step": line["step"], "weights_sha256": ""}
        self.totals.append(line["seconds"])
        self.samples.append(line["samples"])
        self.samples_lost += int(line.get("values", {}).get("samples_lost", 0))
        self.lrs.add(line["lr"])
        for part in PARTS:
            self.parts[part] += line[part]
        self.seconds_of[line["epoch"]] += line["seconds"]
        self.bytes_sent += line["bytes_sent"]
        if line.get("exchange_seconds"):
            self.bytes_in_exchanges += line["bytes_sent"]
            self.exchange_seconds += line["exchange_seconds"]
        if line["epoch"] != self.epoch:
            self.epoch, self.loss_sum, self.loss_weight = line["epoch"], 0.0, 0
        if (weight := line.get("weight", line["samples"])) and math.isfinite(line["loss"]):  # else it was left out
            self.loss_sum += line["loss"] * weight
            self.loss_weight += weight

    def _clock(self, kind: str, time: float) -> None:
        """Count from each start, or what led to it, to the end; a run that broke off continues counting."""
        if self._running_since is not None:
            self.seconds += time - self._running_since
            self.worker_seconds += (self._workers or math.nan) * (time - self._running_since)
        elif kind != "start":
            return
        else:
            self._before = (len(self.totals), self.seconds, self.worker_seconds)
        if kind == "end" and self._before[0] == len(self.totals) > 0:
            # Asked for again when it was over: it has only said so.
            self.seconds, self.worker_seconds = self._before[1:]
        self._running_since = None if kind == "end" else time

    def step_seconds(self) -> dict[str, float]:
        """Median and 95th percentile of a step, and the mean of each part."""
        if not self.totals:
            return {}
        ordered = sorted(self.totals)
        values = {"median": percentile(ordered, 50), "p95": percentile(ordered, 95)}
        values |= {part: total / len(ordered) for part, total in self.parts.items()}
        return {name: round(value, 9) for name, value in values.items()}

    def network(self) -> dict[str, float]:
        """What the network gave, and what it was found to be able to give."""
        found = {}
        if self.exchange_seconds:
            found["effective_bandwidth"] = round(self.bytes_in_exchanges / self.exchange_seconds, 1)
        if self.compression:
            found |= {"probed_bandwidth": self.compression["bandwidth"], "probed_latency": self.compression["latency"]}
        return found

    def best(self, record: RunRecord) -> dict[str, Any]:
        """The best validation by the metric that says so: the loss, where nothing is said."""
        rule = record.settings.get("best") or record.settings.get("early_stopping") or {}
        metric = rule.get("metric", "loss")
        line = self.best_validation
        if metric not in line.get("values", {}):
            return {}
        return {"metric": metric, "value": line["values"][metric], "step": line["step"]}

    def _global_batch(self, record: RunRecord) -> int | None:
        """As it was set; where that is for each worker, as it was: virtual workers or copies may count."""
        settings = record.settings
        if settings.get("batch_size") or not settings.get("batch_size_per_worker"):
            return settings.get("batch_size")
        of_last_epoch = self.samples[-(self.trained.get("steps_per_epoch") or 1) :]
        return max(of_last_epoch, default=None)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of `ordered` (sorted, not empty) lie, linear between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _ratio(amount: float, over: float) -> float | None:
    return amount / over if over else None
