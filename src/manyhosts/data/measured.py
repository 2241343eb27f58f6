"""How many loader processes a dataset deserves, found by timing the first batches.

While this process fetches its own batches, a step takes what fetching takes (f seconds for a batch) and then what the
rest of it takes (r seconds). n processes that fetch at the same time have a batch ready every f / n seconds: a step
never waits where that is less than r. So `n = f / r`, and a fifth more, because neither is the same each time. No more
than the cores have room for: a process that decodes keeps one busy, one that waits for a disk or a network does not.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

MEASURED = 5
"""Batches that are timed; the first one, which warms everything up, does not count."""
WORTH_IT = 0.02
"""The share of a step that fetching may take before a process is started for it."""
_SPARE = 1.2
_MOST = 16


class Timed(Iterator[T]):
    """The items of an iterator, and how long it took to get each, and until the next was asked for."""

    def __init__(self, items: Iterator[T]) -> None:
        self.items = items
        self.fetching: list[float] = []
        self.rest: list[float] = []
        self.busy_s = 0.0
        """What fetching took of a core, in all."""
        self._given: float | None = None

    def __next__(self) -> T:
        begin = time.perf_counter()
        if self._given is not None:
            self.rest.append(begin - self._given)
        busy = time.thread_time()
        item = next(self.items)
        self.busy_s += time.thread_time() - busy
        self._given = time.perf_counter()
        self.fetching.append(self._given - begin)
        return item


def loaders_for(fetch_s: float, rest_s: float, *, most: int) -> int:
    """Processes so that batches, which take `fetch_s` each, keep pace with steps that take `rest_s` without them."""
    if fetch_s <= WORTH_IT * (fetch_s + rest_s):
        return 0
    wanted = most if rest_s <= 0 else math.ceil(_SPARE * fetch_s / rest_s)
    return max(1, min(wanted, most))


def chosen_for(timed: Timed[T]) -> tuple[int, str]:
    """How many processes, and why in one line."""
    fetch_s, rest_s = (statistics.median(times[1:] or times or [0.0]) for times in (timed.fetching, timed.rest))
    most = most_here(timed.busy_s / max(sum(timed.fetching), 1e-9))
    count = loaders_for(fetch_s, rest_s, most=most)
    return count, (
        f"loader processes: {count} (at most {most}); a batch takes {1e3 * fetch_s:.2g} ms to fetch, "
        f"the rest of its step {1e3 * rest_s:.2g} ms"
    )


def most_here(busy: float) -> int:
    """Processes that this host's cores have room for, if each keeps one busy for the share `busy` of its time.

    The cores are shared out over the host's workers. At most 16, and never none.
    """
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    return max(1, min(_MOST, int(len(os.sched_getaffinity(0)) / workers / max(busy, 1 / _MOST))))
