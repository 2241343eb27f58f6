"""Has fast workers compute more of each batch and slow ones less, by what their steps take while a run continues.

What one sample takes a worker (of virtual workers: what one part takes) is measured with the step's own clock and
reported in the exchange of `pace`. All workers see the same table, so all come to the same cut by the same arithmetic.
It is no part of the state of a run: a resumed run begins with equal parts, and finds the rest again.
"""

from __future__ import annotations

import operator
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
        self._begin_anew(_FIRST)

    def _begin_anew(self, sure: int) -> None:
        """Forget what was measured. `sure`: after how many comparisons that speak for another cut it is made."""
        self._sure = sure
        self._heard: deque[list[float]] = deque(maxlen=_LATER)
        """What one sample or part took each worker, in each of the last comparisons since the last change."""
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
        batches = self._batches()
        cuts, cut = batches.cuts, batches.cuts.newest
        if cuts is not self._cuts:  # the workers are others than before
            self._cuts = cuts
            self._begin_anew(_FIRST)
        if since < cuts.begin_of_newest:
            return ""  # some of these steps were cut as before
        now = _shares(cut, batches.samples, len(table))
        if sum(now) < len(table):
            return None
        self._heard.append([max(one.own, 1e-9) / max(share, 1) for one, share in zip(table, now, strict=True)])
        seconds = [statistics.fmean(each) for each in zip(*self._heard, strict=True)]
        wanted = shared_out(sum(now), seconds)
        slowest_s, wanted_s = (max(map(operator.mul, shares, seconds)) for shares in (now, wanted))
        if wanted_s > (1 - WORTH) * slowest_s:
            self._times = 0
            return None
        self._times += 1
        if self._times < self._sure:
            return ""
        cuts.change(reached, _with_shares(cut, wanted, batches.rank))
        self._begin_anew(_LATER)
        return _sentence(wanted, [one.host for one in table], "parts" if cut.assignment else "samples")


def _shares(cut: Cut, samples: int, workers: int) -> list[int]:
    """How many samples of a full batch, or parts, each worker has."""
    if cut.assignment:
        return [len(own) for own in cut.assignment]
    return [end - begin for begin, end in (cut.bounds(samples, rank) for rank in range(workers))]


def _with_shares(before: Cut, shares: Sequence[int], rank: int) -> Cut:
    """The cut in which each worker has its share, as worker `rank` takes part in it."""
    if not before.assignment:
        return replace(before, sizes=tuple(shares))
    assignment = tuple(range(*ends) for ends in pairwise(accumulate(shares, initial=0)))
    return replace(before, first=assignment[rank].start, last=assignment[rank].stop, assignment=assignment)


def _sentence(shares: Sequence[int], hosts: Sequence[str], things: str) -> str:
    by_host = Counter[str]()
    several = len(set(hosts)) > 1
    for rank, (share, host) in enumerate(zip(shares, hosts, strict=True)):
        by_host[f"host {host}" if several else f"rank {rank}"] += share
    reported = ", ".join(f"{who} {share}" for who, share in list(by_host.items())[:_SHOWN])
    rest = f" and {len(by_host) - _SHOWN} more" if len(by_host) > _SHOWN else ""
    return f"each batch of {sum(shares)} {things} is cut by the workers' speeds now: {reported}{rest}"
