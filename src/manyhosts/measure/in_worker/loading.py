"""How many samples a worker's loader gives in a second, when nothing waits for it but the next batch.

And what it takes of the cores for each: a loader that waits for a disk or a network shares them with many others.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import Any

from manyhosts.data.measured import MEASURED, Timed, chosen_for
from manyhosts.data.steps import Loader, Step
from manyhosts.measure.in_worker import machine
from manyhosts.training.setup.build import Components
from manyhosts.training.state.run_state import RunState

_FEWEST, _MOST = 2, 200
_PATIENCE = 3
"""Times the seconds that were asked for: batches that take very long are waited for, but not for ever."""


def measure(components: Components, state: RunState, *, step_s: float, seconds: float) -> dict[str, Any]:
    """The facts of `Measured` that are about the loader. `step_s`: what the rest of a step takes.

    Where the number of processes is left to the run, it is chosen as the run would choose it.
    """
    loader = getattr(components.batches.source, "loader", None)
    if isinstance(loader, Loader) and loader.processes == "auto":
        timed = Timed(
            loader.fetcher(state.position.epoch, components.batches.source.order.at(state.position))  # type: ignore[attr-defined]
            for _ in range(MEASURED)
        )
        for _ in timed:
            timed.rest = [step_s] * len(timed.fetching)
        loader.processes, _ = chosen_for(timed)
        loader.measured = True
    processes = loader.processes if isinstance(loader, Loader) else 0
    assert processes != "auto", "it has just been chosen"
    steps = components.batches.source.steps(state.position, state.stream)
    begun = time.perf_counter()
    # What processes have fetched before the clock begins is no measure of how fast they fetch.
    for step in itertools.islice(steps, 2 * processes + 1):
        step.fetched()
        if time.perf_counter() - begun > seconds:
            break
    children = [process.pid for process in multiprocessing.active_children() if process.pid is not None]
    fetching = children if processes else [os.getpid()]
    before = machine.processor_s(fetching)
    samples, spent = _fetched(steps, seconds)
    after = machine.processor_s(fetching)
    of_loaders = machine.process_bytes(fetching) if processes else 0
    return {
        "loader_samples_per_second": samples / spent,
        "loader_processes": processes,
        "process_bytes": of_loaders,
        "loader_processor_s": None if before is None or after is None else (after - before) / samples,
    }


def _fetched(steps: Iterator[Step], seconds: float) -> tuple[int, float]:
    """Samples of the steps that are fetched in about `seconds`, and how many seconds it were."""
    begun = time.perf_counter()
    samples, number = 0, 0
    while number < _MOST:
        step = next(steps)
        step.fetched()
        samples, number, spent = samples + step.samples, number + 1, time.perf_counter() - begun
        if (number >= _FEWEST and spent > seconds) or spent > _PATIENCE * seconds:
            break
    return samples, max(time.perf_counter() - begun, 1e-9)
