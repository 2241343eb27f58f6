"""Compares, every few seconds of training, what a step takes each worker, and names a host or a link that is slow.

The workers tell each other the means of their last steps: one exchange of less than a KiB each. Where steps wait for
the network and not for a worker, the links between hosts are measured, for at most a two-hundredth of the time.
"""

from __future__ import annotations

import itertools
import math
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from manyhosts.communication import links
from manyhosts.communication.world import World
from manyhosts.data.steps import Step
from manyhosts.events import Event, Slowdown, StepDone
from manyhosts.training import slowness
from manyhosts.training.slowness import Part

EVERY_S = 5.0
_NAME_BYTES = 64
_WAITING = 0.2
"""Links are measured where even the worker that waits least waits for this share of its steps."""
MOST_OF_THE_TIME = 0.005
"""The share of a run in which links are measured; what is found slow is measured again at once, to be sure."""


class Pace:
    """The one of this worker. All workers call `compare` after the same steps, and all hear the same."""

    def __init__(self, world: World, told: Callable[[], Sequence[Event]], tell: Callable[[Event], None]) -> None:
        """`told`: the last events that every worker remembers, oldest first."""
        self._world, self._told, self._tell = world, told, tell
        self._workers, self._links = slowness.of_workers(), slowness.of_links()
        self._step, self._samples = 0, 0
        self._begin, self._probed_s = time.perf_counter(), 0.0

    def is_due(self, before_s: float, now_s: float) -> bool:
        """Whether to compare after a step that has taken the run's clock, which all workers share, so far."""
        return self._world.size > 1 and now_s // EVERY_S > before_s // EVERY_S

    def compare(self, step: int, taken: Step | None) -> None:
        """Tell the others what the last steps took here, and tell of changes. `taken`: what the last step has read."""
        if taken is not None and (not taken.ends_epoch or not self._samples):
            self._samples = sum(len(piece.plan.indices) for piece in taken.pieces)
        table = self._world.stack(self._own_row(step)).tolist()
        parts = [_part(row) for row in table]
        if any(math.isnan(part.compute_s) for part in parts):
            return  # somebody has only just come
        factors = slowness.factors_of_workers(parts)
        for change in self._workers.hear(factors):
            self._say(step, "worker", change, slowness.sentence(change, parts))
        waiting = min(row[4] for row in table)
        hosts = [part.host for part in parts]
        if waiting > _WAITING and len(set(hosts)) > 2 and links.can_measure(self._world):
            self._compare_links(step, hosts, factors)

    def _own_row(self, step: int) -> torch.Tensor:
        """Seconds of computing and of data, samples, seconds of a step, the share waited, and this host's name."""
        begin, self._step = self._step, step
        timings = [event.timing for event in _last_steps(self._told(), after=begin)]
        facts = [math.nan, math.nan, 0.0, 0.0, 0.0]
        if timings and begin:  # what comes before the first comparison is warming up
            # Means: a processor whose quota is used up stands still in one step of many, and medians do not see that.
            total, waited, data, stalled = (
                statistics.fmean(column)
                for column in zip(
                    *((one.total, one.communication_exposed, one.data_wait, one.snapshot_stall) for one in timings),
                    strict=True,
                )
            )
            compute = max(0.0, total - waited - data - stalled)
            facts = [compute, data, float(self._samples), total, waited / max(total, 1e-9)]
        name = socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        return torch.tensor([*facts, *name], dtype=torch.float64, device=self._world.device)

    def _compare_links(self, step: int, hosts: Sequence[str], factors: Mapping[str, float]) -> None:
        world = self._world
        spent = time.perf_counter() - self._begin
        may = self._probed_s < MOST_OF_THE_TIME * spent or self._links.is_unsure
        if not world.agree(float(may)):
            return
        begin = time.perf_counter()
        seconds = links.measure(world, hosts)
        self._probed_s += time.perf_counter() - begin
        for change in self._links.hear(slowness.factors_of_links(seconds, factors)):
            self._say(step, "link", change, slowness.sentence(change))

    def _say(self, step: int, what: str, change: slowness.Change, text: str) -> None:
        self._tell(Slowdown(step=step, text=text, what=what, who=change.who, factor=change.factor, time=time.time()))


def _last_steps(events: Sequence[Event], *, after: int) -> list[StepDone]:
    newest: Iterable[StepDone] = (event for event in reversed(events) if isinstance(event, StepDone))
    return list(itertools.takewhile(lambda event: event.step > after, newest))


def _part(row: Sequence[float]) -> Part:
    host = bytes(map(int, row[5:])).rstrip(b"\0").decode(errors="replace")
    return Part(host=host, compute_s=row[0], data_s=row[1], samples=int(row[2]), step_s=row[3])
