"""Which parts of a batch other workers compute again, and which workers: drawn alike on every worker.

Drawn are steps, from (seed, epoch, place in the epoch): in such a step one part of every worker is audited, and every
worker audits one. So no one waits for somebody else's audit, and audits take the share of the time that was asked for.
An auditor is of another host than the owner where that can be: what is wrong with a processor or a memory is wrong
for all workers of a host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from manyhosts.data import randomness
from manyhosts.data.order import Position, bounds

_RANGE = 1 << 63


@dataclass(frozen=True, slots=True)
class Audit:
    """One part of one step that is computed by more than its owner. Workers are named by rank."""

    part: int
    owner: int
    auditor: int
    """Always computes it, too."""
    third: int | None
    """Computes it where those two do not agree; None where there are but two workers."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All who may have to compute it."""
        return (self.owner, self.auditor) if self.third is None else (self.owner, self.auditor, self.third)


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """What is audited while these workers train together."""

    share: float
    """Of all parts; above 0, at most 1."""
    seed: int
    hosts: tuple[str, ...]
    """The host of each worker, by rank."""
    rank: int
    """This worker."""

    def of(self, position: Position, parts: int, samples: int, assignment: Sequence[range] = ()) -> list[Audit]:
        """The audits of the step of `samples` samples that begins at `position`.

        `assignment`: the parts of each worker, by rank; empty: neighbouring ones, as evenly as integers allow.
        """
        size = len(self.hosts)
        assignment = assignment or [range(*bounds(parts, size, rank)) for rank in range(size)]
        draw = self._draw(position) / _RANGE
        if draw >= self.share * max(map(len, assignment)):
            return []
        pairs = _distances(self.hosts)
        auditor, third = pairs[self._draw(position, 1) % len(pairs)]
        found = []
        for owner, own in enumerate(assignment):
            # So many of its parts; what is left over is the chance of one more.
            full, left = divmod(self.share * len(own), 1.0)
            chosen = sorted(own, key=lambda part: self._draw(position, 2, part))[: int(full) + (draw < left)]
            for part in sorted(chosen):
                begin, end = bounds(samples, parts, part)
                if begin < end:
                    by = None if third is None else (owner + third) % size
                    found.append(Audit(part, owner, (owner + auditor) % size, by))
        return found

    def _draw(self, position: Position, *what: int) -> int:
        return randomness.seed_at(self.seed, randomness.AUDIT, position.epoch, position.sample, *what)


@lru_cache(maxsize=8)
def _distances(hosts: tuple[str, ...]) -> list[tuple[int, int | None]]:
    """How many ranks after an owner its auditor and the third worker may be: on as many other hosts as can be."""
    size = len(hosts)

    def on_one_host(one: int, other: int) -> int:
        return sum(hosts[(owner + one) % size] == hosts[(owner + other) % size] for owner in range(size))

    shared: dict[tuple[int, int | None], tuple[int, int]] = {}
    for auditor in range(1, size):
        thirds: list[int | None] = [third for third in range(1, size) if third != auditor]
        for third in thirds or [None]:
            with_third = 0 if third is None else on_one_host(0, third) + on_one_host(auditor, third)
            shared[auditor, third] = (on_one_host(0, auditor), with_third)
    return [pair for pair, counts in shared.items() if counts == min(shared.values())]
