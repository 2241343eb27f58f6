"""A profile of some steps: what PyTorch's profiler saw, as a trace to look at and a page to read.

It hears of the steps as listeners do, on every worker, so no step is longer for it while nothing is profiled. The first
steps are left out: in them memory is first taken, and what compiles does so.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from manyhosts import device
from manyhosts.communication.world import World
from manyhosts.config.profile import ProfileRequest
from manyhosts.events import StepDone, StepTiming

WARM_UP = 5
"""Steps of a run before those that are profiled."""
TRACE, SUMMARY = "trace.json.gz", "summary.txt"
_VIEWER = "https://ui.perfetto.dev"
_MOST_OPERATORS = 15
_PARTS: dict[str, Callable[[StepTiming], float]] = {
    "computing": lambda timing: timing.compute + timing.other,
    "waiting for other workers": lambda timing: timing.communication_exposed,
    "waiting for data": lambda timing: timing.data_wait,
    "standing still for a snapshot": lambda timing: timing.snapshot_stall,
}
_TABLES = (
    ("operators on the processor, their waits included", "self_cpu_time_total"),
    ("on the GPU", "self_device_time_total"),
)
_profiled: set[Path] = set()
"""Folders in which this process has made a profile: of several `fit` one is enough."""


class Profiling:
    """Of one run on one worker. Every worker hears the same steps; those of the chosen ranks profile them."""

    def __init__(self, request: ProfileRequest, world: World, folder: Path, say: Callable[[str, int], None]) -> None:
        self._request, self._world, self._folder, self._say = request, world, folder, say
        self._is_chosen = request.ranks is None or world.rank in request.ranks
        self._warming, self._steps = WARM_UP, list[StepDone]()
        self._profiler: profile | None = None
        self._began = 0.0
        self._is_over = False

    def hear(self, step: StepDone) -> None:
        """Begin after the steps that warm up, and end after those that were asked for."""
        if self._is_over:
            return
        if self._warming:
            self._warming -= 1
            if not self._warming:
                self._began = time.perf_counter()
                if self._is_chosen:
                    self._profiler = profile(activities=[ProfilerActivity.CPU, *device.activities(self._world.device)])
                    self._profiler.start()
            return
        self._steps.append(step)
        if self._profiler is not None:
            self._profiler.step()  # a mark between two steps
        if len(self._steps) == self._request.steps:
            self._end()

    def finish(self) -> None:
        """The run has no more steps: keep what there is of a profile, and say what is missing of it."""
        if self._is_over:
            return
        if done := len(self._steps):
            self._end(f"; the run ended after {done} of the {self._request.steps} steps that were asked for")
        else:
            self.close()
            self._say(f"no profile was made: this training had no step after the first {WARM_UP}, which warm up", 0)

    def close(self) -> None:
        """End it, and keep nothing. Safe to call twice."""
        self._is_over = True
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _end(self, but: str = "") -> None:
        seconds, profiler = time.perf_counter() - self._began, self._profiler
        self.close()
        first, last = self._steps[0].step, self._steps[-1].step
        if profiler is not None:
            folder = self._folder / f"rank-{self._world.rank}"
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / TRACE))
            (folder / SUMMARY).write_text(self._summary(profiler, seconds))
        _profiled.add(self._folder)
        ranks = range(self._world.size) if self._request.ranks is None else self._request.ranks
        name = f"rank-{ranks[0]}" if len(ranks) == 1 else "rank-*"
        where = f"{self._folder / name / SUMMARY}" + ("" if list(ranks) == [0] else " (each on its worker's host)")
        self._say(f"profile of steps {first} to {last}{but}: {where} to read, {TRACE} for {_VIEWER}", last)

    def _summary(self, profiler: profile, seconds: float) -> str:
        steps, world, count = self._steps, self._world, len(self._steps)
        rows = [(name, math.fsum(part(step.timing) for step in steps)) for name, part in _PARTS.items()]
        rows.append(("between steps: validation, snapshots, records", max(0.0, seconds - sum(s for _, s in rows))))
        total = sum(taken for _, taken in rows)
        lines = [
            f"Steps {steps[0].step} to {steps[-1].step} of rank {world.rank} of {world.size} "
            f"on host {socket.gethostname()}",
            f"{count} steps in {seconds:.3g} s, {sum(step.samples for step in steps) / seconds:,.0f} samples/s",
            "",
            f"{'where the time went':<48}{'ms a step':>12}{'share':>9}",
            *(f"  {name:<46}{1e3 * s / count:>12.3f}{100 * s / total:>7.1f} %" for name, s in rows),
        ]
        for title, attribute in _TABLES:
            lines += _operators(profiler.key_averages(), title, attribute, count, seconds)
        lines += ["", f"{TRACE} has all of it by time: open it in {_VIEWER} or chrome://tracing.", ""]
        return "\n".join(lines)


def _operators(averages: Any, title: str, attribute: str, steps: int, seconds: float) -> list[str]:
    """Those that took the most time for themselves, what they call left out; none where that device did nothing."""
    own = sorted(
        (
            (getattr(each, attribute) / 1e6, each.count, each.key)
            for each in averages
            if getattr(each, attribute) > 0 and not each.key.startswith("ProfilerStep")
        ),
        reverse=True,
    )
    if not own:
        return []
    total = sum(taken for taken, _, _ in own)
    return [
        "",
        f"{title:<48}{'ms a step':>12}{'share':>9}{'calls a step':>14}",
        *(
            f"  {key[:44]:<46}{1e3 * taken / steps:>12.3f}{100 * taken / total:>7.1f} %{calls / steps:>14.1f}"
            for taken, calls, key in own[:_MOST_OPERATORS]
        ),
        f"  {'all operators together':<46}{1e3 * total / steps:>12.3f}  (of {1e3 * seconds / steps:.3f} ms of a step)",
    ]


def profiling_for(
    request: ProfileRequest | None, world: World, folder: Path, say: Callable[[str, int], None]
) -> Profiling | None:
    """What profiles a run, where that was asked for and not done yet. Who joins while others train profiles nothing.

    Raises:
        ConfigError: a rank that was asked for is not there.
    """
    if request is None or folder in _profiled or world.is_joining:
        return None
    request.check(world.size)
    return Profiling(request, world, folder, say)
