"""Compares, every few seconds of training, what a step takes each worker: told of all, and who is slow is named.

The workers tell each other the means of their last steps: one exchange of less than a KiB each. Where steps wait for
the network and not for a worker, the links between hosts are measured, for at most a two-hundredth of the time.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from manyhosts.cluster.membership import MEMBER
from manyhosts.communication.world import World
from manyhosts.data.order import Position
from manyhosts.data.steps import Step
from manyhosts.events import Event, Note, Slowdown, StepDone, WorkersTimed, WorkerTimes
from manyhosts.training.loop import balance
from manyhosts.training.loop.balance import Balance
from manyhosts.training.telemetry import links, stragglers
from manyhosts.training.telemetry.throttling import Throttling

EVERY_S = 5.0
_NAME_BYTES = 64
_WAITING = 0.2
"""Links are measured where even the worker that waits least waits for this share of its steps."""
MOST_OF_THE_TIME = 0.005
"""The share of a run in which links are measured; what is found slow is measured again at once, to be sure."""
_SAMPLED = 24
"""Of so many steps between two comparisons it is known, step by step, how long each worker waited for the others."""
_FACTS = 10
"""Numbers that each worker tells before these waits; behind them come two, how far its steps are planned."""


class StragglerMonitor:
    """The one of this worker. All workers call `compare` after the same steps, and all hear the same."""

    def __init__(
        self,
        world: World,
        reported: Callable[[], Sequence[Event]],
        tell: Callable[[Event], None],
        balance: Balance | None = None,
    ) -> None:
        """`reported`: the last events that all workers remember, oldest first. `balance` cuts batches by the table."""
        self._world, self._reported, self._tell, self._balance = world, reported, tell, balance
        self._since, self._number = Position(), float(os.environ.get(MEMBER, "-1"))
        self._workers, self._links = stragglers.of_workers(), stragglers.of_links()
        self._step, self._samples, self._throttling = 0, 0, Throttling()
        self._begin, self._probed_s = time.perf_counter(), 0.0

    def is_due(self, before_s: float, now_s: float) -> bool:
        """Whether to compare after a step that has taken the run's clock, which all workers share, so far."""
        every_s = EVERY_S if self._balance is None else min(EVERY_S, balance.EVERY_S)
        return self._world.size > 1 and now_s // every_s > before_s // every_s

    def compare(self, taken: Step | None, *, is_last: bool = False) -> None:
        """Tell the others what the last steps took here, tell of all workers, and name who is slow.

        `taken`: what the last step has read. `is_last`: no steps follow, so nobody is named.
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
        self._tell(timed)
        if not begin or is_last:
            return  # what comes before the first comparison is warming up
        if self._balance is None or not self._move(self._balance, timed, since, table):
            self._name_slow(timed)

    def _new_steps(self) -> list[StepDone]:
        """Those since the last comparison, the newest first."""
        newest: Iterator[StepDone] = (event for event in reversed(self._reported()) if isinstance(event, StepDone))
        last = next(newest, None)
        if last is None:
            return []
        if last.step < self._step:
            self._step = 0  # the run went back to a snapshot
        return list(itertools.takewhile(lambda event: event.step > self._step, itertools.chain([last], newest)))

    def _own_row(self, steps: Sequence[StepDone]) -> torch.Tensor:
        """The means of this worker's last steps, how long it waited in some of them, and its host's name."""
        if not self._step:  # the first step of all is another thing: what compiles, or is looked at once, does so in it
            steps = steps[:-1]
        facts: list[float] = [math.nan] * _FACTS
        facts[-1] = self._number
        waits = [math.nan] * _SAMPLED
        if steps:
            # Means: a processor whose quota is used up stands still in one step of many, and medians do not see that.
            timings = [step.timing for step in steps]
            total, waited, data, stalled = (
                statistics.fmean(column)
                for column in zip(
                    *((one.total, one.communication_exposed, one.data_wait, one.snapshot_stall) for one in timings),
                    strict=True,
                )
            )
            compute = max(0.0, total - waited - data - stalled)
            hot = self._throttling.share()
            facts = [self._step, len(steps), self._samples, total, compute, waited, data, stalled, hot, self._number]
            every = -(-len(steps) // _SAMPLED)
            sampled = [step.timing.communication_exposed for step in steps[::every]]
            waits = sampled + waits[len(sampled) :]
        name = socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        planned = Position() if self._balance is None else self._balance.reached
        row = [*facts, *waits, planned.epoch, planned.sample, *name]
        return torch.tensor(row, dtype=torch.float64, device=self._world.device)

    def _move(self, balance: Balance, timed: WorkersTimed, since: Position, table: Sequence[Sequence[float]]) -> bool:
        """Cut batches otherwise where that is worth it. Whether whoever holds the others up will soon do so no more."""
        reached = max(Position(*map(int, row[_FACTS + _SAMPLED :][:2])) for row in table)
        news = balance.hear(timed.workers, since=since, reached=reached)
        if news:
            self._tell(Note(step=timed.step, text=news, time=time.time()))
        return news is not None

    def _name_slow(self, timed: WorkersTimed) -> None:
        workers = timed.workers
        factors = stragglers.factors_of_workers(workers)
        for change in self._workers.hear(factors):
            self._say(timed.step, "worker", change, stragglers.cause(change, workers))
        waiting = min(worker.communication_exposed / max(worker.total, 1e-9) for worker in workers)
        hosts = [worker.host for worker in workers]
        if waiting > _WAITING and len(set(hosts)) > 2 and links.can_measure(self._world):
            self._compare_links(timed.step, hosts, factors)

    def _compare_links(self, step: int, hosts: Sequence[str], factors: Mapping[str, float]) -> None:
        world = self._world
        spent = time.perf_counter() - self._begin
        may = self._probed_s < MOST_OF_THE_TIME * spent or self._links.is_unsure
        if not world.agree(float(may)):
            return
        begin = time.perf_counter()
        seconds = links.measure(world, hosts)
        self._probed_s += time.perf_counter() - begin
        for change in self._links.hear(stragglers.factors_of_links(seconds, factors)):
            self._say(step, "link", change, stragglers.cause(change))

    def _say(self, step: int, what: str, change: stragglers.Change, cause: str) -> None:
        text, now = stragglers.sentence(change, cause), time.time()
        self._tell(
            Slowdown(step=step, text=text, what=what, who=change.who, factor=change.factor, cause=cause, time=now)
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
