"""Shares that follow speeds: found in few comparisons, kept where only noise speaks against them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from manyhosts.data.cut import Cut, CutBatches, Cuts
from manyhosts.data.order import Position
from manyhosts.events import WorkerTimes
from manyhosts.training.loop.balance import Balance


class Workers:
    """Some that need `fixed_s` for a step and `each_s` for each sample, or part, of it."""

    def __init__(self, each_s: Sequence[float], *, batch: int, parts: int | None, fixed_s: float = 0.0) -> None:
        self.each_s, self.fixed_s, self.batch = list(each_s), fixed_s, batch
        workers = len(each_s)
        if parts is None:
            self.begin_anew(workers)
        else:
            assignment = tuple(range(*Cut(workers, 0, 1, None).bounds(parts, rank)) for rank in range(workers))
            self.cuts = [Cuts(Cut(parts, own.start, own.stop, None, assignment=assignment)) for own in assignment]
        self.balances = [Balance(partial(self.batches_of, rank)) for rank in range(workers)]
        self.steps, self.since = 0, Position()
        self.said: list[str] = []

    def batches_of(self, rank: int) -> CutBatches:
        return CutBatches(self.cuts[rank], self.batch, rank)

    def begin_anew(self, workers: int) -> None:
        """As at the beginning, and after a worker has gone or come: all have equal shares."""
        self.cuts = [Cuts(Cut(workers, rank, rank + 1, None)) for rank in range(workers)]

    def shares(self) -> list[int]:
        cut = self.cuts[0].newest
        if cut.assignment:
            return [len(own) for own in cut.assignment]
        return [end - begin for begin, end in (cut.bounds(self.batch, rank) for rank in range(len(self.cuts)))]

    def step_s(self) -> float:
        return max(self.fixed_s + share * each for share, each in zip(self.shares(), self.each_s, strict=True))

    def compare(self, times: int, noise: float = 0.0, draw: random.Random | None = None) -> None:
        """So many comparisons, each after ten steps."""
        for _ in range(times):
            table = [
                WorkerTimes(
                    rank=rank,
                    total=1.0,
                    communication_exposed=0.0,
                    snapshot_stall=0.0,
                    host="ab"[rank % 2],
                    compute=(self.fixed_s + share * each) * (1 + noise * (draw.random() - 0.5 if draw else 0)),
                    data_wait=0.0,
                    samples=share,
                )
                for rank, (share, each) in enumerate(zip(self.shares(), self.each_s, strict=True))
            ]
            self.steps += 10
            reached = Position(0, self.steps * self.batch)
            said: list[Any] = [balance.hear(table, since=self.since, reached=reached) for balance in self.balances]
            assert len(set(said)) == 1, "all come to the same"
            cuts = {own.newest.sizes if not own.newest.assignment else own.newest.assignment for own in self.cuts}
            assert len(cuts) == 1
            for rank, own in enumerate(self.cuts):
                cut = own.newest
                own_parts = range(cut.first, cut.last)
                assert not cut.assignment or own_parts == cut.assignment[rank], "each computes its own parts"
            self.said += [said[0]] if said[0] else []
            self.since = reached


@pytest.mark.parametrize("parts", [None, 24])
@pytest.mark.parametrize("fixed_s", [0.0, 0.1])
def test_worker_of_half_the_speed_soon_has_half_the_share(parts: int | None, fixed_s: float) -> None:
    workers = Workers([0.01, 0.02], batch=24, parts=parts, fixed_s=fixed_s)
    workers.compare(8)
    assert workers.shares() in ([[16, 8]] if not fixed_s else [[16, 8], [15, 9]])
    assert len(workers.said) <= 1 + (fixed_s > 0), workers.said
    assert "host a {}, host b {}".format(*workers.shares()) in workers.said[-1]
    assert ("parts" if parts else "samples") in workers.said[-1]


def test_shares_follow_a_host_that_becomes_slow_and_recovers() -> None:
    workers = Workers([0.01, 0.01, 0.01], batch=90, parts=None)
    workers.compare(5)
    assert (workers.shares(), workers.said) == ([30, 30, 30], [])
    workers.each_s[1] = 0.04
    workers.compare(8)
    assert workers.shares() == [40, 10, 40]
    workers.each_s[1] = 0.01
    workers.compare(8)
    assert workers.step_s() <= 1.05 * 0.3


def test_noise_alone_moves_nothing() -> None:
    for seed in range(20):
        workers = Workers([0.01, 0.01, 0.011], batch=64, parts=None)
        workers.compare(50, noise=0.05, draw=random.Random(seed))
        assert workers.said == []


def test_parts_that_cannot_be_divided_better_stay() -> None:
    workers = Workers([0.01, 0.012], batch=64, parts=4)
    workers.compare(10)
    assert (workers.shares(), workers.said) == ([2, 2], [])


def test_other_workers_begin_with_what_they_have_themselves() -> None:
    workers = Workers([0.01, 0.04], batch=40, parts=None)
    workers.compare(1)  # one more of these, and the cut would change
    workers.begin_anew(2)
    workers.compare(1)
    assert workers.said == []
    workers.compare(1)
    assert workers.shares() == [32, 8]


def test_batch_of_fewer_samples_than_workers_is_left_alone() -> None:
    workers = Workers([0.01, 0.04, 0.01], batch=2, parts=None)
    workers.compare(4)
    assert workers.said == []
