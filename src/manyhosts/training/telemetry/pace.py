"""Compares, every few seconds of training, what a step takes each worker; all are shown it, and who is slow is named.

The workers send each other the means of their last steps: one exchange of less than a KiB each. Where steps wait for
the network and not for a worker, the links between hosts are measured, for at most a two-hundredth of the time. Who
holds the others up, by which factor, and when that is sure enough to be said, are pure rules: times in, sentences out.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from manyhosts.cluster.membership import MEMBER
from manyhosts.communication.batch_norm import GlobalBatch
from manyhosts.communication.shared_norm import Batch
from manyhosts.communication.world import World
from manyhosts.data.order import Position
from manyhosts.data.steps import Step
from manyhosts.events import Event, Note, Slowdown, StepDone, WorkersTimed, WorkerTimes
from manyhosts.training.loop import balance
from manyhosts.training.loop.balance import Balance
from manyhosts.training.telemetry import links
from manyhosts.units import seconds_in_words

SYSTEM = Path("/sys/devices/system/cpu")
_COUNTERS = "cpu[0-9]*/thermal_throttle/*_throttle_total_time_ms"
"""Milliseconds since the start of the system, of each core and of the chip that it is on: Linux from 5.5, on Intel."""


class Throttling:
    """Of the processors of this host. Where the kernel does not count, they are never found to be slowed down."""

    def __init__(self, system: Path = SYSTEM) -> None:
        self._counters = sorted(system.glob(_COUNTERS))
        self._last_ms, self._since = self._read(), time.monotonic()

    def share(self) -> float:
        """Of the time since the last call, or the beginning: the share, 0 to 1, of the processor it was longest for."""
        before, since = self._last_ms, self._since
        self._last_ms, self._since = self._read(), time.monotonic()
        passed_ms = 1000 * (self._since - since)
        most = max((ms - before.get(path, ms) for path, ms in self._last_ms.items()), default=0)
        return min(1.0, max(0.0, most / passed_ms)) if passed_ms > 0 else 0.0

    def _read(self) -> dict[Path, int]:
        found = {}
        for path in self._counters:
            with contextlib.suppress(OSError, ValueError):
                found[path] = int(path.read_text())
        return found


SLOW = 1.5
"""A host or worker that takes this many times as long as the others for its own part of a step is named."""
SLOW_LINK = 2.0
_MATTERS = 0.1
"""What a host takes more than the others counts where it is this share of a step: the rest of it may be the network."""
_NO_MORE = 0.8
"""It is slow no more when its factor is below this share of what it takes to be named."""
_HOT = 0.1
"""A host that has slowed its processors down for this share of the time more than the others is slow for that."""
_WINDOWS = 3
_PROBES = 3


@dataclass(frozen=True, slots=True)
class Change:
    """Somebody was found to be slow, or is so no more."""

    who: str
    """`host b`, or `rank 3 on host b`, `the link to host c`."""
    factor: float
    """How many times slower than the others; 1.0: no more."""


@dataclass(slots=True)
class SlownessDetector:
    """Names somebody when all of the last few measurements call it slow, and once again when it is so no more."""

    slow: float
    times: int
    _heard: dict[str, deque[float]] = field(default_factory=dict)
    _named: set[str] = field(default_factory=set)

    @property
    def is_unsure(self) -> bool:
        """Whether somebody was slow in the last measurement, and is not named yet."""
        return any(last and last[-1] >= self.slow and who not in self._named for who, last in self._heard.items())

    def hear(self, factors: Mapping[str, float]) -> list[Change]:
        """Take one measurement: the factor of everybody that was measured. Returns what is to be said."""
        heard = self._heard
        self._heard = {who: deque([*heard.get(who, ()), new], maxlen=self.times) for who, new in factors.items()}
        self._named.intersection_update(factors)
        changes = []
        for who, last in self._heard.items():
            if who in self._named:
                if max(last) < _NO_MORE * self.slow:
                    changes.append(Change(who, 1.0))
            elif len(last) == self.times and min(last) >= self.slow:
                changes.append(Change(who, statistics.median(last)))
        self._named.symmetric_difference_update(change.who for change in changes)
        return changes


def factors_of_workers(workers: Sequence[WorkerTimes]) -> dict[str, float]:
    """How many times as long as the others each host takes, and each worker among several of one host.

    Who has more samples than others is not slow for that: the smaller of two factors counts, of its time and of its
    time for each sample. A host is as fast as its faster workers, and a single slow one of them is named itself.
    """
    hosts: dict[str, list[WorkerTimes]] = {}
    for worker in workers:
        if worker.samples:
            hosts.setdefault(worker.host, []).append(worker)
    times = {
        f"host {name}": (
            statistics.median_low(worker.own for worker in its),
            statistics.median_low(worker.own / worker.samples for worker in its),
        )
        for name, its in hosts.items()
    }
    least_s = _MATTERS * statistics.median(worker.total for worker in workers)
    found = _against_others(times, least_s)
    for its in hosts.values():
        found |= _against_others({_name(worker): (worker.own, worker.own / worker.samples) for worker in its}, least_s)
    return found


def _name(worker: WorkerTimes) -> str:
    return f"rank {worker.rank} on host {worker.host}"


def factors_of_links(
    seconds: Mapping[tuple[str, str], float], of_workers: Mapping[str, float] | None = None
) -> dict[str, float]:
    """How many times as long as the others' each host's link takes, and each way between two hosts.

    `seconds`: of the same amount between every two hosts, there and back. A host's link is as fast as its fastest way,
    and a way is compared with the links of its two hosts. Of two hosts no one can say whose link it is.
    A host that computes slowly, as `of_workers` has it, answers late whatever its link does: nothing is said of that.
    """
    hosts = sorted({host for pair in seconds for host in pair})
    if len(hosts) < 3:
        return {}
    best = {host: min(taken for pair, taken in seconds.items() if host in pair) for host in hosts}
    found = {
        f"the link to host {host}": best[host] / statistics.median_low(best[other] for other in hosts if other != host)
        for host in hosts
    }
    if len(hosts) > 3:
        found |= {
            f"the link between hosts {one} and {other}": taken / max(best[one], best[other])
            for (one, other), taken in seconds.items()
        }
    late = [host for host in hosts if (of_workers or {}).get(f"host {host}", 1.0) > _NO_MORE * SLOW]
    return {who: 1.0 if any(host in who.split() for host in late) else factor for who, factor in found.items()}


def _against_others(times: Mapping[str, tuple[float, float]], least_s: float) -> dict[str, float]:
    """Of each its time by the middle one of the others', in the unit in which that is less.

    A difference of less than `least_s` seconds is none.
    """
    if len(times) < 2:
        return {}
    found = {}
    for who, own in times.items():
        others = [time for other, time in times.items() if other != who]
        middle = [statistics.median_low(column) for column in zip(*others, strict=True)]
        factor = min(mine / max(usual, 1e-9) for mine, usual in zip(own, middle, strict=True))
        found[who] = factor if own[0] - middle[0] >= least_s else min(factor, 1.0)
    return found


def cause(change: Change, workers: Sequence[WorkerTimes] = ()) -> str:
    """The likely cause: `data`, `compute`, `thermal` or `network`; empty for who is slow no more.

    `workers`: all of them, for a host or a worker.
    """
    if change.factor <= 1:
        return ""
    if change.who.startswith("the link"):
        return "network"
    its = [worker for worker in workers if change.who in (f"host {worker.host}", _name(worker))]
    rest = [worker for worker in workers if worker not in its]
    if not its or not rest:
        return "compute"

    def more(part: Callable[[WorkerTimes], float]) -> float:
        return statistics.median(map(part, its)) - statistics.median(map(part, rest))

    if more(lambda worker: worker.data_wait) > more(lambda worker: worker.own) / 2:
        return "data"
    return "thermal" if more(lambda worker: worker.hot) >= _HOT else "compute"


_SENTENCES = {
    "network": "{who} is {factor:.1f} times slower than the others: every step waits for it",
    "data": "{who} takes {factor:.1f} times as long as the others for a step: it waits for its data",
    "compute": "{who} computes {factor:.1f} times slower than the others: every step waits for it",
    "thermal": (
        "{who} computes {factor:.1f} times slower than the others, and its processors were slowed down by heat: "
        "every step waits for it"
    ),
    "": "{who} is as fast as the others again",
}


def sentence(change: Change, cause: str) -> str:
    """What is said of a change that has this cause."""
    return _SENTENCES[cause].format(who=change.who, factor=change.factor)


_FIRST = 3
"""Steps before it that do not count: memory is made, kernels are chosen."""
_STEPS = 10


class NormPrice:
    """Of the exchanges of one model's layers."""

    def __init__(self, batch: Batch | None, notes: list[str]) -> None:
        """The sentence goes to `notes`."""
        self.notes = notes
        self.batch = batch if isinstance(batch, GlobalBatch) else None
        self._seconds: list[float] = []
        self._begin = 0.0, 0

    def after_step(self, seconds: float) -> None:
        """A step took so many `seconds`. After the last one that counts it is said what exchanges took of them."""
        batch = self.batch
        if batch is None or batch.members.size == 1 or batch.members.device.type != "cpu":
            return
        self._seconds.append(seconds)
        if len(self._seconds) == _FIRST:
            self._begin = batch.exchange_s, batch.exchanges
        if len(self._seconds) < _FIRST + _STEPS:
            return
        self.batch = None
        took, count = batch.exchange_s - self._begin[0], batch.exchanges - self._begin[1]
        if count:
            total = sum(self._seconds[_FIRST:])
            way = "through shared memory" if batch.is_shared_memory else "over the network"
            self.notes.append(
                f"BatchNorm over the batch of {batch.members.size} workers: {count / _STEPS:.0f} exchanges {way} take "
                f"{seconds_in_words(took / _STEPS)} of a step of {seconds_in_words(total / _STEPS)} "
                f"({100 * took / total:.0f} %, waiting for the slowest worker included); "
                'batch_norm="local" has none, and its result depends on the number of workers'
            )


EVERY_S = 5.0
_NAME_BYTES = 64
_WAITING = 0.2
"""Links are measured where even the worker that waits least waits for this share of its steps."""
MOST_OF_THE_TIME = 0.005
"""The share of a run in which links are measured; what is found slow is measured again at once, to be sure."""
_SAMPLED = 24
"""Of so many steps between two comparisons it is known, step by step, how long each worker waited for the others."""
_FACTS = 10
"""Numbers that each worker sends before these waits; after them come two, how far its steps are planned."""


class StragglerMonitor:
    """The one of this worker. All workers call `compare` after the same steps, and all hear the same."""

    def __init__(
        self,
        world: World,
        reported: Callable[[], Sequence[Event]],
        emit: Callable[[Event], None],
        balance: Balance | None = None,
    ) -> None:
        """`reported`: the last events that all workers remember, oldest first. `balance` cuts batches by the table."""
        self._world, self._reported, self._emit, self._balance = world, reported, emit, balance
        self._since, self._number = Position(), float(os.environ.get(MEMBER, "-1"))
        self._workers, self._links = SlownessDetector(SLOW, _WINDOWS), SlownessDetector(SLOW_LINK, _PROBES)
        self._step, self._samples, self._throttling = 0, 0, Throttling()
        self._begin, self._probed_s = time.perf_counter(), 0.0

    def is_due(self, before_s: float, now_s: float) -> bool:
        """Whether to compare after a step that has taken the run's clock, which all workers share, so far."""
        every_s = EVERY_S if self._balance is None else min(EVERY_S, balance.EVERY_S)
        return self._world.size > 1 and now_s // every_s > before_s // every_s

    def compare(self, taken: Step | None, *, is_last: bool = False) -> None:
        """Send the others what the last steps took here, report all workers, and name who is slow.

        `taken`: what the last step has read. `is_last`: no steps follow, so no one is named.
        """
        if taken is not None and (not taken.ends_epoch or not self._samples):
            self._samples = sum(len(piece.plan.indices) for piece in taken.pieces)
        steps = self._new_steps()
        table = self._world.stack(self._own_row(steps)).tolist()
        if steps:
            self._step = steps[0].step
        since, self._since = self._since, self._since if taken is None else taken.after
        begin, count = table[0][:2]
        if math.isnan(count) or any(row[:2] != [begin, count] for row in table):
            return  # no step was done since, or somebody has only just come
        timed = _timed(table, self._step)
        self._emit(timed)
        if not begin or is_last:
            return  # what comes before the first comparison is warming up
        if self._balance is None or not self._move(self._balance, timed, since, table):
            self._name_slow(timed)

    def _new_steps(self) -> list[StepDone]:
        """Those since the last comparison, the newest first."""
        newest = [event for event in reversed(self._reported()) if isinstance(event, StepDone)]
        if newest and newest[0].step < self._step:
            self._step = 0  # the run went back to a snapshot
        return list(itertools.takewhile(lambda event: event.step > self._step, newest))

    def _own_row(self, steps: Sequence[StepDone]) -> torch.Tensor:
        """The means of this worker's last steps, how long it waited in some of them, and its host's name."""
        if not self._step:  # the first step of all is another thing: what compiles, or is looked at once, does so in it
            steps = steps[:-1]
        facts = [math.nan] * (_FACTS - 1)
        waits: list[float] = []
        if steps:
            # Means: a processor whose quota is used up is still in one step of many, and medians do not see that.
            timings = [step.timing for step in steps]
            rows = ((one.total, one.communication_exposed, one.data_wait, one.snapshot_stall) for one in timings)
            total, waited, data, stalled = map(statistics.fmean, zip(*rows, strict=True))
            compute, hot = max(0.0, total - waited - data - stalled), self._throttling.share()
            facts = [self._step, len(steps), self._samples, total, compute, waited, data, stalled, hot]
            waits = [one.communication_exposed for one in timings[:: -(-len(steps) // _SAMPLED)]]
        waits += [math.nan] * (_SAMPLED - len(waits))
        planned = Position() if self._balance is None else self._balance.reached
        name = socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        row = [*facts, self._number, *waits, planned.epoch, planned.sample, *name]
        return torch.tensor(row, dtype=torch.float64, device=self._world.device)

    def _move(self, balance: Balance, timed: WorkersTimed, since: Position, table: Sequence[Sequence[float]]) -> bool:
        """Cut batches otherwise where that is worth it. Whether one that holds the others up will soon not."""
        reached = max(Position(*map(int, row[_FACTS + _SAMPLED :][:2])) for row in table)
        news = balance.hear(timed.workers, since=since, reached=reached)
        if news:
            self._emit(Note(step=timed.step, text=news, time=time.time()))
        return news is not None

    def _name_slow(self, timed: WorkersTimed) -> None:
        workers, factors = timed.workers, factors_of_workers(timed.workers)
        for change in self._workers.hear(factors):
            self._say(timed.step, "worker", change, cause(change, workers))
        waiting = min(worker.communication_exposed / max(worker.total, 1e-9) for worker in workers)
        hosts = [worker.host for worker in workers]
        if waiting > _WAITING and len(set(hosts)) > 2 and links.can_measure(self._world):
            self._compare_links(timed.step, hosts, factors)

    def _compare_links(self, step: int, hosts: Sequence[str], factors: Mapping[str, float]) -> None:
        is_cheap = self._probed_s < MOST_OF_THE_TIME * (time.perf_counter() - self._begin)
        if not self._world.agree(float(is_cheap or self._links.is_unsure)):
            return
        begin = time.perf_counter()
        seconds = links.measure(self._world, hosts)
        self._probed_s += time.perf_counter() - begin
        for change in self._links.hear(factors_of_links(seconds, factors)):
            self._say(step, "link", change, cause(change))

    def _say(self, step: int, what: str, change: Change, cause: str) -> None:
        self._emit(
            Slowdown(
                step=step,
                text=sentence(change, cause),
                what=what,
                who=change.who,
                factor=change.factor,
                cause=cause,
                time=time.time(),
            )
        )


def _timed(table: Sequence[Sequence[float]], step: int) -> WorkersTimed:
    """What the rows of all workers say, which are of the same steps."""
    waits = zip(*(row[_FACTS : _FACTS + _SAMPLED] for row in table), strict=True)
    least = [min(waited) for waited in waits if not math.isnan(waited[0])]
    return WorkersTimed(
        step=step,
        steps=int(table[0][1]),
        workers=tuple(_worker(rank, row) for rank, row in enumerate(table)),
        communication=round(statistics.fmean(least), 6),
        time=time.time(),
    )


def _worker(rank: int, row: Sequence[float]) -> WorkerTimes:
    total, compute, waited, data, stalled = (round(seconds, 6) for seconds in row[3:8])
    return WorkerTimes(
        rank=rank,
        host=bytes(map(int, row[_FACTS + _SAMPLED + 2 :])).rstrip(b"\0").decode(errors="replace"),
        samples=int(row[2]),
        total=total,
        compute=compute,
        communication_exposed=waited,
        data_wait=data,
        snapshot_stall=stalled,
        hot=round(row[8], 3),
        worker=int(row[9]),
    )
