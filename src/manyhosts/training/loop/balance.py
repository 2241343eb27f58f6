"""Has fast workers compute more of each batch and slow ones less, by what their steps take while a run continues.

What one sample takes a worker (of virtual workers: what one part takes) is measured with the step's own clock and
reported in the exchange of `pace`. All workers see the same table, so all come to the same cut by the same arithmetic.
It is no part of the state of a run: a resumed run begins with equal parts, and finds the rest again.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from manyhosts.data.cut import Cut, CutBatches, Cuts, shared_out
from manyhosts.data.order import Position
from manyhosts.events import WorkerTimes

EVERY_S = 1.0
"""How often workers compare what their steps take: those of so many seconds say more than they vary."""
WORTH = 0.05
"""A new cut is made where the slowest worker would take less time by this share, in some comparisons in a row."""
_FIRST = 2
"""So many where the parts are equal until now."""
_LATER = 5
"""So many afterwards: what is noise does not stay. What a sample takes is the mean over as many."""
_SHOWN = 8


class Balance:
    """What this worker knows of the speeds of all. All workers call `hear` after the same steps."""

    def __init__(self, batches: Callable[[], CutBatches]) -> None:
        """`batches` gives those of now: they are others when workers have gone or come."""
        self._batches = batches
        self._cuts: Cuts | None = None
        self._sure = _FIRST
        self._forget()

    def _forget(self) -> None:
        self._seconds: list[float] = []
        """What one sample or part takes each worker: the mean over the last comparisons."""
        self._heard: deque[list[float]] = deque(maxlen=_LATER)
        """The same of each of the last comparisons, since the last change."""
        self._times = 0
        """Those of them, in a row, that speak for another cut."""

    @property
    def reached(self) -> Position:
        """Where the first step begins that this worker has planned nothing for."""
        return self._batches().cuts.reached

    def hear(self, table: Sequence[WorkerTimes], *, since: Position, reached: Position) -> str | None:
        """Take what all workers report of the steps since position `since`, and cut those from `reached` on otherwise.

        `reached`: the latest that any worker has come to. Returns what is to be said of the new cut, empty where a
        change is under way, None where none is.
        """
        cuts = self._batches().cuts
        if cuts is not self._cuts:  # the workers are others than before
            self._cuts = cuts
            self._forget()
            self._sure = _FIRST
        if since < cuts.begin_of_newest:
            return ""  # some of these steps were cut as before
        now = self._shares(cuts.newest, len(table))
        if sum(now) < len(table):
            return None
        new = [max(one.own, 1e-9) / max(share, 1) for one, share in zip(table, now, strict=True)]
        self._heard.append(new)
        self._seconds = [statistics.fmean(each) for each in zip(*self._heard, strict=True)]
        wanted = shared_out(sum(now), self._seconds)
        if self._slowest_s(wanted) > (1 - WORTH) * self._slowest_s(now):
            self._times = 0
            return None
        self._times += 1
        if self._times < self._sure:
            return ""
        self._sure = _LATER
        cuts.change(reached, self._cut(cuts.newest, wanted))
        self._forget()
        return self._sentence(wanted, [one.host for one in table])

    def _shares(self, cut: Cut, workers: int) -> list[int]:
        """How many samples of a full batch, or parts, each worker has."""
        if cut.assignment:
            return [len(own) for own in cut.assignment]
        return [end - begin for begin, end in (cut.bounds(self._batches().samples, rank) for rank in range(workers))]

    def _slowest_s(self, shares: Sequence[int]) -> float:
        return max(share * each for share, each in zip(shares, self._seconds, strict=True))

    def _cut(self, before: Cut, shares: Sequence[int]) -> Cut:
        if not before.assignment:
            return replace(before, sizes=tuple(shares))
        assignment = tuple(range(*ends) for ends in pairwise(accumulate(shares, initial=0)))
        own = assignment[self._batches().rank]
        return replace(before, first=own.start, last=own.stop, assignment=assignment)

    def _sentence(self, shares: Sequence[int], hosts: Sequence[str]) -> str:
        by_host = Counter[str]()
        several = len(set(hosts)) > 1
        for rank, (share, host) in enumerate(zip(shares, hosts, strict=True)):
            by_host[f"host {host}" if several else f"rank {rank}"] += share
        reported = ", ".join(f"{who} {share}" for who, share in list(by_host.items())[:_SHOWN])
        rest = f" and {len(by_host) - _SHOWN} more" if len(by_host) > _SHOWN else ""
        things = "parts" if self._cuts is not None and self._cuts.newest.assignment else "samples"
        return f"each batch of {sum(shares)} {things} is cut by the workers' speeds now: {reported}{rest}"
