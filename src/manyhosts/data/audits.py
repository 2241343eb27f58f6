"""Which parts of a batch other workers compute again, and which workers: drawn alike on every worker.

A draw has the address (seed, epoch, place in the epoch, part), so it knows nothing of restarts. Whoever checks is of
another host than the owner where there is one: what is wrong with a processor is wrong for all workers on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manyhosts.data import randomness
from manyhosts.data.order import Position, bounds

_RANGE = 1 << 63
_THIRD_BITS = 20
"""Shift to the bits of a draw that choose the third worker; others choose the auditor."""


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
    hosts: Sequence[str]
    """The host of each worker, by rank."""
    rank: int
    """This worker."""

    def of(self, position: Position, parts: int, samples: int) -> list[Audit]:
        """The audits of the step of `samples` samples that begins at `position`, by part."""
        found = []
        for owner in range(len(self.hosts)):
            for part in range(*bounds(parts, len(self.hosts), owner)):
                begin, behind = bounds(samples, parts, part)
                draw = randomness.seed_at(self.seed, randomness.AUDIT, position.epoch, position.sample, part)
                if begin < behind and draw < self.share * _RANGE:
                    found.append(self._of_part(part, owner, draw))
        return found

    def _of_part(self, part: int, owner: int, draw: int) -> Audit:
        auditors = self._away_from(owner)
        auditor = auditors[draw % len(auditors)]
        thirds = self._away_from(owner, auditor)
        return Audit(part, owner, auditor, thirds[(draw >> _THIRD_BITS) % len(thirds)] if thirds else None)

    def _away_from(self, *ranks: int) -> list[int]:
        """The other workers that share no host with `ranks`, or with the first of them, or at least are others."""
        others = [rank for rank in range(len(self.hosts)) if rank not in ranks]
        for near in (ranks, ranks[:1]):
            hosts = {self.hosts[rank] for rank in near}
            if found := [rank for rank in others if self.hosts[rank] not in hosts]:
                return found
        return others
