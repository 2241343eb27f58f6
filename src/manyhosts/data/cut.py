"""How each global batch is cut over the workers, and from which step on it is cut otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manyhosts.data.audits import AuditPlan
from manyhosts.data.order import Position, bounds


@dataclass(frozen=True, slots=True)
class Cut:
    """Which parts of each global batch a worker computes: `first` up to, not including, `last`, of `parts`."""

    parts: int
    first: int
    last: int
    micro_batch: int | None
    """Most samples in one piece; None: a part is one piece."""
    level: bool = False
    """Whether every part must have the same number of pieces, because there are collectives inside the model."""
    audits: AuditPlan | None = None
    """Which parts of others this worker computes again."""
    assignment: tuple[range, ...] = ()
    """The parts of every worker, by rank; empty: neighbouring ones, as evenly as integers allow."""
    sizes: tuple[int, ...] | None = None
    """The samples of each part of a full batch; None: as even as integers allow. A smaller batch is cut likewise."""

    def bounds(self, count: int, part: int) -> tuple[int, int]:
        """Begin and end of `part` in a batch of `count` samples."""
        if self.sizes is None:
            return bounds(count, self.parts, part)
        before, total = sum(self.sizes[:part]), sum(self.sizes)
        return count * before // total, count * (before + self.sizes[part]) // total

    def longest(self, count: int) -> int:
        """The samples of the largest part of a batch of `count`."""
        if self.sizes is None:
            return bounds(count, self.parts, 0)[1]
        return max(end - begin for begin, end in (self.bounds(count, part) for part in range(self.parts)))


class Cuts:
    """The cut of each step: that of the beginning, until the workers agree on another for all steps from one on.

    Loader processes fetch what steps to come will ask for. So a change may begin where no worker has asked for anything
    yet, which each of them knows of itself as `reached`: then nothing that was fetched is thrown away.
    """

    def __init__(self, cut: Cut) -> None:
        self._from = [(Position(), cut)]
        self.reached = Position()
        """Where the first step begins for which this worker has planned nothing."""

    @property
    def newest(self) -> Cut:
        """The one agreed on last; steps may come before it begins."""
        return self._from[-1][1]

    @property
    def begin_of_newest(self) -> Position:
        """Where its first step begins."""
        return self._from[-1][0]

    def at(self, position: Position) -> Cut:
        """That of the step that begins at `position`."""
        if len(self._from) == 1:
            return self.newest  # in nearly every run
        for begin, cut in reversed(self._from):
            if begin <= position:
                return cut
        raise AssertionError("the first cut begins before every step")

    def plan(self, position: Position, after: Position) -> Cut:
        """The same, where what that step needs is asked for now. It ends at `after`."""
        self.reached = max(self.reached, after)
        return self.at(position)

    def begin(self, position: Position) -> None:
        """Nothing is planned, and the next step begins at `position`."""
        self.reached = position

    def change(self, begin: Position, cut: Cut) -> None:
        """Cut all steps from `begin` on otherwise. Every worker calls this with the same `begin`.

        `begin` is where no worker has come to: the latest that `reached` is on any of them.
        """
        assert begin >= self.reached, f"a step after {begin} was planned already, up to {self.reached}"
        self._from = [(position, other) for position, other in self._from if position < begin] or [(Position(), cut)]
        self._from.append((begin, cut))


@dataclass(frozen=True, slots=True)
class CutBatches:
    """The batches of a run, as one worker cuts them while no worker goes or comes."""

    cuts: Cuts
    samples: int
    """Of a full batch."""
    rank: int
    """The worker's."""


def shared_out(count: int, seconds: Sequence[float]) -> list[int]:
    """How many of `count` equal things each worker takes, so that the last to be done is done as soon as can be.

    `seconds`: what one thing takes each. Everybody takes at least one; `count` must be at least as many as workers.
    """
    assert count >= len(seconds), f"{count} things for {len(seconds)} workers"
    speed = sum(1 / each for each in seconds)
    taken = [max(1, int(count / each / speed)) for each in seconds]

    def done_s(rank: int, more: int) -> float:
        return (taken[rank] + more) * seconds[rank]

    ranks = range(len(taken))
    while sum(taken) > count:
        taken[max((rank for rank in ranks if taken[rank] > 1), key=lambda rank: done_s(rank, 0))] -= 1
    while sum(taken) < count:
        taken[min(ranks, key=lambda rank: done_s(rank, 1))] += 1
    return taken
