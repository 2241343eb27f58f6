"""What one run writes down and says: its record, the events for its listeners, its samples, and signs of life.

Listeners are on rank 0 alone. Every other worker remembers what was reported last, so that one of them can lead in
its place: it takes over the files, and writes what the last rank 0 had not written.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhosts import device
from manyhosts.communication.gathering import gather_plain, gather_words
from manyhosts.config import overrides
from manyhosts.events import (
    EpochDone,
    Event,
    Listener,
    LossLooked,
    Note,
    RunEnded,
    RunStarted,
    StepDone,
    StepTiming,
    ValidationDone,
    WorkersTimed,
    WorkerTimes,
)
from manyhosts.listeners.broadcast import Broadcast
from manyhosts.listeners.loggers import Logger
from manyhosts.listeners.metrics_file import WriteMetrics
from manyhosts.listeners.standard import standard
from manyhosts.records import first_batch, provenance, run_lock
from manyhosts.records.line_file import read_from_end
from manyhosts.records.metrics import MetricsFile
from manyhosts.records.run_directory import content_hash
from manyhosts.records.run_record import GIVEN, RunRecord, plain_settings, versions_for
from manyhosts.records.samples import SamplesFile
from manyhosts.snapshot.separate_disks import bring_files, first_of_disk
from manyhosts.training.consistency.same_given import optimizer_described
from manyhosts.training.state.snapshot_schedule import SnapshotSchedule

_LOG = logging.getLogger("manyhosts")
_NAMES = ("run.json", "metrics.jsonl")
_NO_RECORD = -1
_RECENT_EVENTS = 4096
_TOLD_BY_ALL: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (StepDone, EpochDone, ValidationDone, WorkersTimed)
}
"""What every worker could report; the rest is rank 0's alone."""


class RunLog:
    """The one of this worker."""

    def __init__(
        self,
        snapshot_schedule: SnapshotSchedule,
        script: Path,
        listeners: Sequence[Listener],
        report: Callable[..., None],
    ) -> None:
        """Nothing is opened before `open_records`. `report` sends to the head; see `cluster.reports`."""
        self.world, self.settings = snapshot_schedule.components.world, snapshot_schedule.settings
        self.directory, self.script = snapshot_schedule.directory, script
        self.snapshot_schedule, self.listeners, self.report = snapshot_schedule, listeners, report
        snapshot_schedule.emit = self.emit
        self.news = Broadcast([])
        self.recent: deque[Event] = deque(maxlen=_RECENT_EVENTS)
        """What was reported last, on every worker: should rank 0 go, another one knows what it had not written."""
        self.started: RunStarted | None = None
        self.samples: SamplesFile | None = None
        self.led = self.is_over = False
        self._end_is_told = False
        self._lock: run_lock.RunLock | None = None
        self.copies = False
        """Whether this worker writes a copy of rank 0's records, on a disk that rank 0 does not see."""

    # The files, and who writes them.

    def lock(self) -> None:
        """Take the lock of the run directory on this worker's disk. Where it takes none, that is said, and no more.

        Raises:
            ConfigError: another run is in progress in it.
        """
        run_dir = self.directory.path
        try:
            self._lock = run_lock.take(run_dir, run_lock.token_of_this_run())
        except OSError as cause:
            run_lock.see_that_free(run_dir)
            _warn(f"no lock can be kept in {run_dir} ({cause.strerror}): a second run there is not refused")

    def open_records(self, step: int, *, is_over: bool) -> None:
        """Record what was asked, and let rank 0 have its listeners, where the run continues after `step`.

        `is_over`: no step is left to do. What trained the run stays on record then, and not what is asked now.
        """
        self.is_over, hosts = is_over, gather_words(self.world, socket.gethostname())
        if self.snapshot_schedule.store.separate_disks:
            self._restore_records(step)
        if self.world.is_rank_0:
            record = RunRecord(
                script=str(self.script),
                arguments=sys.argv[1:],
                settings=plain_settings(self.settings),
                seed=self.settings.seed,
                versions=versions_for(self.script),
                hosts=list(dict.fromkeys(hosts)),
                workers=self.world.size,
                strategy=self.snapshot_schedule.strategy,
                backend=self.world.backend if self.world.size > 1 else None,
                started=time.time(),
                overrides=overrides.from_environment(),
                environment=[name for name in os.environ.get(GIVEN, "").split(",") if name],
                script_sha256=content_hash(self.script),
            )
            if is_over and self.directory.run_json.exists():
                record = dataclasses.replace(
                    RunRecord.read(self.directory.run_json), script=record.script, started=record.started
                )
            else:
                self._keep_provenance()
            record.write(self.directory.run_json)
            self._open_listeners(record)
            self.led = True
        self.copy_records()
        self.open_samples()

    def _open_listeners(
        self, record: RunRecord, metrics: MetricsFile | None = None, started: RunStarted | None = None
    ) -> None:
        """Have listeners, also those of every run (see `standard`); loggers of several runs are told which this is."""
        for each in self.listeners:
            if isinstance(each, Logger):
                try:
                    each.begin_run(self.directory.path)
                except OSError as error:  # as with any listener that fails, training continues
                    _warn(f"{type(each).__name__} cannot be where it was told: {error}")
        self.news = Broadcast([*standard(self.directory, record, metrics=metrics, started=started), *self.listeners])

    def _keep_provenance(self) -> None:
        """Write down what the run comes from; who watches the trials of a script has no use for it."""
        components = self.snapshot_schedule.components
        if components.watcher is not None:
            return
        try:
            provenance.keep(
                self.directory.path,
                self.script,
                hardware={
                    "device": "" if self.world.device.type == "cpu" else device.make(self.world.device),
                    "instructions": torch.backends.cpu.get_cpu_capability(),
                    "threads": str(torch.get_num_threads()),
                    "workers": str(self.world.size),
                },
                identity=components.batches.identity(),
                described={
                    "architecture": str(components.model),
                    "parameters": f"{sum(math.prod(shape) for _, shape in components.own_fingerprint.values()):,}",
                    "optimizer": "; ".join(optimizer_described(components.optimizer).values()),
                    "schedule": type(components.schedule).__qualname__ if components.schedule is not None else "none",
                    "data": components.batches.identity.described(),
                },
            )
        except OSError as cause:
            path = self.directory.path / provenance.NAME
            _warn(f"{path} could not be written ({cause.strerror}): `manyhosts reproduce` cannot run this again")

    def become_rank_0(self, *, continues: bool = True) -> None:
        """Be rank 0 from now on, and write what every worker knows and the last rank 0 has not written.

        `continues`: whether the run does. Where not, its directory is not locked; and where the last rank 0 has
        reported how the run ended, that is how: what ends this worker follows from it.
        """
        if self.led:
            return
        self.led = True
        if continues:
            self.lock()
        self.news.close()
        metrics = MetricsFile(self.directory.metrics)
        was_told = metrics.take_over()
        self._open_listeners(RunRecord.read(self.directory.run_json), metrics, self.started)
        if self.snapshot_schedule.second is not None:
            self.snapshot_schedule.second.catch_up()
        self._end_is_told = not continues and was_told.end
        for event in told_by_all(self.remembered()):
            if not was_told(event):
                self.emit(event)

    def _restore_records(self, step: int) -> None:
        """Where rank 0's record does not reach as far as `step`, and another host's does, or farther, bring that one.

        Every worker calls this at the start, when the run continues after `step`.
        """
        own = last_step(self.directory.metrics) if first_of_disk(self.world) else _NO_RECORD
        steps: list[int] = gather_plain(self.world, own)
        if steps[0] < min(step, max(steps)):
            self._bring_records(steps.index(max(steps)), lacks=self.world.is_rank_0)

    def copy_records(self) -> None:
        """Where hosts share no disk, have each write down the steps, too, should rank 0's be lost."""
        store = self.snapshot_schedule.store
        if not store.separate_disks:
            return
        lacks = store.leads_disk() and not self.led and not self.copies
        if lacks and self._lock is None:
            self.lock()  # this worker has come late
        if self.world.is_rank_0:
            self.news.flush()
        if self.world.any(lacks):
            self.directory.path.mkdir(parents=True, exist_ok=True)
            self._bring_records(0, lacks=lacks)
        if lacks:
            self.copies, self.news = True, Broadcast([WriteMetrics(MetricsFile(self.directory.metrics))])

    def _bring_records(self, source: int, *, lacks: bool) -> None:
        """Bring the record of worker `source` to the disks of those that lack it. Every worker calls this."""
        path, has = self.directory.path, self.world.rank == source
        bring_files(path if has else None, path if lacks else None, _NAMES, self.world, source=source)

    def flush(self) -> bool:
        """Have all that was reported on the disk: a snapshot must not be ahead of the records. Whether it is there.

        Where the disk is full the lines wait, and training continues.

        Raises:
            ConfigError: another run has taken the run directory, while this one was stopped for long.
        """
        if self._lock is not None:
            self._lock.check()
        written = self.news.flush()
        if self.samples is not None:
            try:
                self.samples.flush()
            except OSError:
                return False
        return written

    def lay_down(self) -> None:
        """Close everything, and lead no more: the run begins again, perhaps under another rank 0."""
        self.close()
        self.news, self.led, self.copies = Broadcast([]), False, False

    def close(self) -> None:
        """Let the listeners finish. Safe to call twice."""
        self.news.close()
        if self.samples is not None:
            self.samples.close()

    def end(self) -> None:
        """The same, and let others run in the directory."""
        self.close()
        if self._lock is not None:
            self._lock.release()

    # What happens.

    def emit(self, event: Event) -> None:
        """Pass an event to the listeners, which are on rank 0."""
        if self.world.is_shared:
            self.recent.append(event)
        if isinstance(event, StepDone):
            self.report("step", step=event.step)
        else:
            self.report("busy")
        if isinstance(event, LossLooked) and self.world.is_rank_0:
            path, found = self.directory.run_json, {"outcome": event.outcome, "text": event.text}
            dataclasses.replace(RunRecord.read(path), same_answer=found).write(path)
        self.news(event)

    def say(self, text: str, step: int) -> None:
        """Report in words what is worth saying once of `step`."""
        self.emit(Note(text=text, step=step, time=time.time()))

    def emit_end(self, event: RunEnded) -> None:
        """Report how the run ended, once: see `become_rank_0`."""
        if self.world.is_rank_0 and not self.is_over:
            provenance.add_data(self.directory.path)
        if not self._end_is_told:
            self.emit(event)

    def remembered(self) -> list[Event]:
        """What was reported last, oldest first."""
        return list(self.recent)

    # Which samples there are, and which each step takes.

    def keep_pictures(self, batch: Any) -> None:
        """Keep some samples of the first batch, on rank 0, where they are pictures and none are kept. Never fails.

        `batch` is on the CPU: its inputs, or these and its targets; of one of another form nothing is kept.
        """
        path, most = self.directory.first_batch, self.settings.keep_pictures
        if not self.world.is_rank_0 or path.exists():
            return
        members = batch[:2] if isinstance(batch, tuple | list) else [batch]
        arrays = [_array(each, most) for each in members if isinstance(each, Tensor)]
        inputs, targets, *_ = [*arrays, None, None]
        found = first_batch.pictures_of(inputs, targets, most)
        if found is not None:
            try:
                first_batch.write(path, found)
            except OSError as refused:
                _LOG.warning("cannot keep pictures of the first batch in %s: %s", path, refused.strerror or refused)

    def open_samples(self) -> None:
        """Note this worker's samples under its present rank."""
        if self.samples is not None:
            self.samples.close()
        if self.settings.record_samples:
            self.samples = SamplesFile(self.directory.samples(self.world.rank))

    def note_samples(self, step: int, indices: Sequence[int]) -> None:
        """Write down what `step` takes, before it is computed."""
        if self.samples is not None:
            membership = self.world.membership
            self.samples.add(step, indices, group=0 if membership is None else membership.group)

    def resume_samples(self, step: int) -> None:
        """Steps after `step` are taken again: what was noted of them counts no more, by ranks that are gone, too."""
        if self.samples is None:
            return
        self.samples.resume_at(step)
        world = self.world
        for path in self.directory.samples(world.rank).parent.glob("samples-*.jsonl"):
            rank = int(path.stem.removeprefix("samples-"))
            if rank >= world.size and rank % world.size == world.rank:
                with closing(SamplesFile(path)) as of_another:
                    of_another.resume_at(step)


def _warn(text: str) -> None:
    sys.stderr.write(f"manyhosts: {text}\n")


def told_by_all(events: Iterable[Event]) -> list[Event]:
    """Those that a new rank 0 reports, where the last one has not written them."""
    return [event for event in events if type(event).__name__ in _TOLD_BY_ALL]


def to_plain(event: Event) -> dict[str, Any]:
    """One of `told_by_all`, for another worker."""
    return {"kind": type(event).__name__, **dataclasses.asdict(event)}


def from_plain(plain: dict[str, Any]) -> Event:
    """What `to_plain` was given."""
    kind = _TOLD_BY_ALL[plain.pop("kind")]
    if kind is StepDone:
        plain["timing"] = StepTiming(**plain["timing"])
    if kind is WorkersTimed:
        plain["workers"] = tuple(WorkerTimes(**worker) for worker in plain["workers"])
    return kind(**plain)


def last_step(path: Path) -> int:
    """The last step that the record in `path` has a line of; 0 where it has none, and less where there is no record."""
    if not path.exists():
        return _NO_RECORD
    return next((line["step"] for line in read_from_end(path) if line.get("event") == "step"), 0)


def _array(tensor: Tensor, most: int) -> Any:
    """The first `most` rows for NumPy, which knows no bfloat16; None of what has no rows."""
    if tensor.dim() == 0 or tensor.is_complex() or tensor.layout is not torch.strided:
        return None
    rows = tensor[:most].detach().cpu()
    return (rows.float() if rows.is_floating_point() else rows).numpy()
