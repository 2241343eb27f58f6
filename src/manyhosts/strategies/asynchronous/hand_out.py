"""Who computes which micro-batch of a step: a free worker takes the next, unless it is too far ahead of the slowest.

A worker's clock is the number of micro-batches whose gradients it has pushed in this step. Under a bound n it begins
another only where its clock is at most n above the lowest of those that still compute: then it sees all that anybody
has pushed up to n + 1 clocks before.

Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".
"""

from __future__ import annotations

import threading

NONE_LEFT = -1


class HandOut:
    """The micro-batches of one step, from 0 up, each to one worker. Its calls may come from any thread."""

    def __init__(self, pieces: int, workers: int, bound: int | None) -> None:
        self.pieces, self.bound = pieces, bound
        self.clocks = [0] * workers
        self.taken = 0
        self.most_ahead = [0] * workers
        """Of each worker the most that it was ahead when it began one."""
        self._computing = set(range(workers))
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def take(self, worker: int) -> int:
        """The next for `worker`, which has pushed what it took before; `NONE_LEFT` where all are taken.

        Waits until the bound allows it.

        Raises:
            RuntimeError: somebody has `fail`ed meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.may_begin(worker) or self.taken == self.pieces or self._error)
            if self._error is not None:
                raise RuntimeError(f"a server has failed: {self._error}") from self._error
            if self.taken == self.pieces:
                self._computing.discard(worker)
                self._changed.notify_all()
                return NONE_LEFT
            self.most_ahead[worker] = max(self.most_ahead[worker], self._ahead(worker))
            self.taken += 1
            return self.taken - 1

    def pushed(self, worker: int) -> None:
        """The gradient of what `worker` took is with all servers."""
        with self._changed:
            self.clocks[worker] += 1
            self._changed.notify_all()

    def may_begin(self, worker: int) -> bool:
        """Whether the bound lets `worker` begin one now."""
        return self.bound is None or self._ahead(worker) <= self.bound

    def fail(self, error: BaseException) -> None:
        """Let no one wait any more."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _ahead(self, worker: int) -> int:
        return self.clocks[worker] - min(self.clocks[each] for each in self._computing | {worker})
