"""Run directories that nobody has trained in: the records of made-up runs, for pages and for whoever watches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from stories import BEGIN, ended, epoch_done, record, snapshot_saved, started, stepped, validated, was_tested

from manyhosts.events import Event, Note, Recovered, Slowdown, WorkersTimed, WorkerTimes
from manyhosts.records import first_batch
from manyhosts.records.metrics import text_of
from manyhosts.records.run_directory import RunDirectory

LONG_HOST = "a-host-with-a-rather-long-name.of-a-department.example.org"
HOSTS = ("here", "there", "beyond", LONG_HOST)


def timed(step: int, steps: int, hosts: Sequence[str] = HOSTS, slow: int = 2) -> WorkersTimed:
    """What `steps` steps of a second took one worker on each host, of which number `slow` is slow at the end."""
    workers = []
    for rank, host in enumerate(hosts):
        own = 0.8 if rank == slow and step > 40 else 0.3 + 0.02 * rank
        parts = {"compute": own, "data_wait": 0.1, "communication_exposed": 0.9 - own, "snapshot_stall": 0.0}
        workers.append(WorkerTimes(rank=rank, host=host, samples=2, total=1.0, **parts))
    return WorkersTimed(step=step, steps=steps, workers=tuple(workers), communication=0.1, time=BEGIN + step)


def story(steps: int = 96, *, hosts: Sequence[str] = HOSTS) -> Iterator[Event]:
    """A run of `steps` steps in epochs of four, which was interrupted by a lost worker and had a slow host."""
    yield started(total_steps=steps)
    yield Note(text="BatchNorm sees the batch of all workers <b>& another model</b>", step=0, time=BEGIN)
    for step in range(1, steps + 1):
        yield stepped(step, loss=2 * math.exp(-step / 20), lr=0.1 * (1 - step / (steps + 1)), samples=8)
        if step % 4 == 0:
            yield epoch_done(step)
            yield validated(step, best=step % 8 == 0, loss=1 / step + 0.1, accuracy=1 - 1 / (step + 1))
        if step % 10 == 0:
            yield snapshot_saved(step)
        if step % 6 == 0 and len(hosts) > 1:
            yield timed(step, 6, hosts)
        if step == 30:
            yield Recovered(
                step=30, reason="rank 1 on there was killed", how="with the 3 workers that were left", steps_redone=1,
                seconds_lost=0.4, time=BEGIN + 30.5,
            )  # fmt: skip
        if step in (44, 80):
            factor = 2.4 if step == 44 else 1.0
            text = "host beyond is 2.4 times as slow as the others" if factor > 1 else "host beyond is slow no more"
            yield Slowdown(step=step, text=text, what="worker", who="host beyond", factor=factor, time=BEGIN + step)


def make_run(
    folder: Path,
    events: Sequence[Event] | None = None,
    *,
    end: str | None = "completed",
    pictures: bool = True,
    hosts: Sequence[str] = HOSTS,
    **settings: Any,
) -> RunDirectory:
    """The directory of a run to which `events` happened; `end`: how it ended, None: it broke off."""
    directory = RunDirectory(folder)
    events = list(story(hosts=hosts)) if events is None else list(events)
    last = max((event.step for event in events), default=0)
    if end is not None:
        events.append(ended(last, status=end, reason=f"why it {end}", time=BEGIN + last + 1))
        if end == "completed":
            events.append(was_tested(last, loss=0.2, accuracy=0.97))
    folder.mkdir(parents=True, exist_ok=True)
    directory.metrics.write_text("".join(map(text_of, events)))
    replace(record(**settings), hosts=list(hosts), workers=len(hosts), arguments=["--width", "a b"]).write(
        directory.run_json
    )
    if pictures:
        pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
        first_batch.write(directory.first_batch, first_batch.FirstBatch(pixels, ("0", "1", "2", "3", "4", "<5>")))
    return directory


def add(directory: RunDirectory, *events: Event) -> None:
    """What the run tells next."""
    with directory.metrics.open("a") as file:
        file.write("".join(map(text_of, events)))
