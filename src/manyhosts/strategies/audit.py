"""A worker that computes wrongly is found: some parts of each batch are computed twice, and their bits compared.

With virtual workers a part has the same bits on any worker. So a worker whose bits are others than those of two
more is wrong, and what it has may not reach the weights: the comparison comes before the update. In the same steps the
weights of all workers are compared, each of which has the same ones.

In a step with an audit: the owner takes a digest of the part when it hands it to the tree, the auditor computes it once
more, and one exchange gives all workers the digests. Where two differ, everybody who has the part's samples (the
third worker, too) computes it twice more, and sends that in a second exchange. All workers see the same digests, so all
come to the same verdict.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import torch
from torch import Tensor, nn

from manyhosts import device
from manyhosts.cluster.membership import MEMBER
from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.data.audits import Audit, AuditPlan
from manyhosts.device import processor
from manyhosts.errors import ConfigError, TrainingError
from manyhosts.strategies.strategy import Piece

_NOT_COMPUTED = 0
_AGAIN = 2
"""How often a part about which two workers disagree is computed again by each of them."""
_LOOK_AT_IT = "look at the machine before it is used again: its memory (memtest), its temperature, `dmesg`, `mcelog`"
_THREE = f"{_LOOK_AT_IT}; with three workers or more a third one decides"


Checksums = Callable[[Mapping[str, Tensor]], Mapping[str, str]]
"""Name → a checksum of the bits of that tensor, made on its device."""


class Digest:
    """Eight bytes that depend on the bits of some tensors, in the order in which they come."""

    def __init__(self, checksums: Checksums) -> None:
        self._checksums = checksums
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, tensors: Sequence[Tensor | None]) -> None:
        """Take the bits of `tensors`, wherever they lie in memory; None is something of its own."""
        there = {str(place): tensor for place, tensor in enumerate(tensors) if tensor is not None}
        found = self._checksums(there) if there else {}
        self._hash.update(" ".join(found.get(str(place), "none") for place in range(len(tensors))).encode() + b";")

    @property
    def value(self) -> int:
        """As a number of 63 bits that is never 0."""
        return (int.from_bytes(self._hash.digest(), "little") >> 1) or 1


@dataclass(frozen=True, slots=True)
class Auditable:
    """An audit of the step under way, and the pieces that this worker computes for it."""

    audit: Audit
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class _Member:
    """One of the workers that train together."""

    host: str
    node: str
    name: str
    """Distinguishes it from every other worker that the run ever had."""
    processor: str
    make: str
    """What must be equal for equal bits."""


Again = Callable[[int, Sequence[Piece]], int]
"""Computes a part, and gives its digest."""


class WrongBits(TrainingError):
    """Workers have other bits than the rest, who know it and have changed nothing."""

    def __init__(self, what: str, *, where: str = "", fix: str = _LOOK_AT_IT) -> None:
        super().__init__(what, where=where, fix=fix)
        self.guilty: dict[int, str] = {}
        """What is wrong with each worker, by rank; empty where it is not known which one it is."""
        self.trusted = 0
        """The last step up to which nothing speaks against what they did."""


def find_wrong(reported: Mapping[int, Sequence[int]]) -> set[int] | None:
    """The ranks that computed wrongly, by the digests that each has `told` of the same part, the last ones twice.

    Right is what two of them, or one of two, say every time that they compute it, if everybody else changes or has an
    answer of its own. None: that is not known, or the part itself has other bits every time, and no one is accused.
    """
    steady = {rank: digests[0] for rank, digests in reported.items() if len(set(digests)) == 1}
    if not steady:
        return None
    [(value, votes), *others] = Counter(steady.values()).most_common()
    if len(reported) > 2:
        return {rank for rank in reported if steady.get(rank) != value} if votes > 1 else None
    # Of two workers, one that changes its own answer to that of the other has been wrong before.
    changed = [digests for rank, digests in reported.items() if rank not in steady]
    back = all(digests[-_AGAIN:] == [value] * _AGAIN for digests in changed)
    return {rank for rank in reported if rank not in steady} if not others and back else None


class Auditor:
    """Compares what this worker computes with what the others do."""

    def __init__(self, share: float, seed: int, world: World, checksums: Checksums) -> None:
        """Look at all workers, each of which calls this.

        Raises:
            ConfigError: there is one worker only, or their processors are of several makes.
        """
        self.share, self.seed, self.world, self.checksums = share, seed, world, checksums
        self.members: list[_Member] = []
        self.due: Sequence[Auditable] = ()
        """The audits of the step under way."""
        self.step = 0
        self.digests: dict[int, Digest] = {}
        """Of this worker's own parts that are audited, while they are computed."""
        self.agreed: dict[str, int] = {}
        """By worker: the last step in which its bits were compared and were right."""
        self.fresh = True
        """Whether workers have come, or all begin, so that some have no such step yet."""
        self.equal_at = 0
        """The last step in which all workers had equal weights."""
        self.all_compute = False  # the third workers, too, where parts keep something that a later pass needs
        self.compared = 0
        """Parts that were computed again, on all workers together, and had the same bits."""
        at_start = not world.is_joining and (world.membership is None or not world.membership.group)
        if at_start and world.size == 1:
            raise ConfigError(
                "audit has parts computed again by another worker, and there is one worker only",
                where="audit",
                fix="start at least two workers, three to know which one is wrong; or leave audit out",
            )
        self._look_around()
        if at_start and (other := self._of_another_make()) is not None:
            raise ConfigError(
                f"the workers have processors of several makes, whose bits differ without a fault: {other}",
                where="audit",
                fix="leave audit out, or start workers on machines of one make, with one version of torch and equally"
                " many threads",
            )

    # Who they are.

    def plan(self) -> AuditPlan | None:
        """What is audited among the workers of now; None where nothing can be. Every worker calls this."""
        self._look_around()
        other = self._of_another_make()
        if other is not None:
            self.world.notes.append(f"audits pause while processors of several makes train together: {other}")
        if self.world.size == 1 or other is not None:
            return None
        return AuditPlan(self.share, self.seed, tuple(member.node for member in self.members), self.world.rank)

    def _look_around(self) -> None:
        world, self.fresh = self.world, True
        name, make = processor()
        if device.is_asynchronous(world.device):
            name = device.module(world.device).get_device_name(world.device)
            make = device.make(world.device)
        capability = torch.backends.cpu.get_cpu_capability()
        own = {
            "host": socket.gethostname(),
            "node": str(world.place.node_rank),
            "name": os.environ.get(MEMBER, str(world.rank)),
            "processor": f"{name}, torch {torch.__version__}, threads: {torch.get_num_threads()}",
            "make": f"{make}, {capability}, {torch.__version__}, {torch.get_num_threads()}",
        }
        self.members = [_Member(**each) for each in gather_plain(world, own)]

    def _of_another_make(self) -> str | None:
        """The first two workers that differ, in words; None where none do."""
        first = self.members[0]
        for rank, member in enumerate(self.members):
            if member.make != first.make:
                return f"{self._who(0)} has {first.processor}, {self._who(rank)} has {member.processor}"
        return None

    def _who(self, rank: int) -> str:
        return f"rank {rank} on host {self.members[rank].host}"

    # One step.

    def begin(self, step: int, audits: Sequence[Auditable]) -> None:
        """`step` is about to be computed, with these audits: the same ones on every worker."""
        self.step, self.due = step, audits
        self.digests = {
            each.audit.part: Digest(self.checksums) for each in audits if each.audit.owner == self.world.rank
        }
        if self.fresh:
            # With the state that they begin with all agree.
            self.equal_at = self.equal_at if self.agreed else step - 1
            self.agreed = {member.name: self.agreed.get(member.name, step - 1) for member in self.members}
            self.fresh = False

    def forget(self) -> None:
        """The run is at another step than before: what was found before counts no more."""
        self.agreed, self.fresh = {}, True

    @property
    def trusted(self) -> int | None:
        """Up to which step every worker was found right; None where nothing was compared yet."""
        return min([self.equal_at, *self.agreed.values()]) if self.agreed else None

    def compare(self, model: nn.Module, again: Again) -> None:
        """Compare the weights of all workers, and the audited parts of the step. Every worker calls this.

        `again` computes a part again, of these pieces, or of this worker's own where there are none.

        Raises:
            WrongBits: they differ somewhere.
        """
        if not self.due:
            return
        mine = [self._of(each, again) for each in self.due]
        weights = Digest(self.checksums)
        weights.add([value for value in model.state_dict().values() if isinstance(value, Tensor)])
        rows = self._reported([weights.value, *mine])
        self._compare_weights([row[0] for row in rows])
        audits = [each.audit for each in self.due]
        first = [{rank: rows[rank][1 + place] for rank in audit.ranks[:2]} for place, audit in enumerate(audits)]
        disputed = [place for place in range(len(audits)) if len(set(first[place].values())) > 1]
        if disputed:
            self._settle(disputed, first, again)
        self.agreed |= {self.members[rank].name: self.step for audit in audits for rank in audit.ranks[:2]}
        self.equal_at = self.step
        self.compared += len(audits)
        self.digests = {part: Digest(self.checksums) for part in self.digests}  # of the next pass, where a step has one

    def _of(self, each: Auditable, again: Again) -> int:
        """This worker's digest of an audited part, where it is the owner or the auditor."""
        if self.world.rank == each.audit.owner:
            return self.digests[each.audit.part].value
        computes = self.world.rank in (each.audit.ranks if self.all_compute else (each.audit.auditor,))
        return again(each.audit.part, each.pieces) if computes else _NOT_COMPUTED

    def _reported(self, own: Sequence[int]) -> list[list[int]]:
        """What every worker has sent, by rank."""
        return cast(
            list[list[int]],
            self.world.stack(torch.tensor(own, dtype=torch.int64, device=self.world.device)).tolist(),
        )

    def name_odd(self, weights: int) -> None:
        """The workers were found to have other weights than each other: say who is wrong. Every worker calls this.

        Raises:
            WrongBits: always, as far as the workers' digests of their `weights` differ.
        """
        self._compare_weights([row[0] for row in self._reported([weights])])

    def _compare_weights(self, digests: Sequence[int]) -> None:
        value, count = Counter(digests).most_common(1)[0]
        if count == len(digests):
            return
        odd = [rank for rank, digest in enumerate(digests) if digest != value]
        found = f"found in step {self.step}; all were equal in step {self.equal_at}"
        if 2 * count <= len(digests):
            everybody = " and ".join(self._who(rank) for rank in range(len(digests)))
            self._end(f"the weights of {everybody} differ, {found}; it is not known whose are right", _THREE)
        self._accuse({rank: f"has other weights than the other workers, {found}" for rank in odd})

    def _settle(
        self,
        disputed: Sequence[int],
        first: Sequence[Mapping[int, int]],
        again: Again,
    ) -> None:
        """Two have computed other bits of the same part: have it computed again, and say who is wrong."""
        mine = [
            again(each.audit.part, each.pieces) if self.world.rank in each.audit.ranks else _NOT_COMPUTED
            for each in (self.due[place] for place in disputed)
            for _ in range(_AGAIN)
        ]
        rows = self._reported(mine)
        guilty: dict[int, str] = {}
        for number, place in enumerate(disputed):
            audit = self.due[place].audit
            columns = slice(_AGAIN * number, _AGAIN * (number + 1))
            reported = {
                rank: [*([first[place][rank]] if rank in first[place] else []), *rows[rank][columns]]
                for rank in audit.ranks
            }
            found = find_wrong(reported)
            if found is None or len(found) == self.world.size:
                self._end(*self._undecided(audit, reported))
            guilty |= {rank: self._found_wrong(rank, audit, reported, found) for rank in sorted(found)}
        self._accuse(guilty)

    def _found_wrong(
        self, rank: int, audit: Audit, reported: Mapping[int, Sequence[int]], guilty: Collection[int]
    ) -> str:
        right = [self._who(other) for other in audit.ranks if other not in guilty]
        own = "which are others each time" if len(set(reported[rank])) > 1 else "which are the same each time"
        return (
            f"computed part {audit.part} of step {self.step} wrongly: its bits, {own}, are not those of"
            f" {' and '.join(right)}; it was compared before in step {self._agreed_by([rank])}, and was right"
        )

    def _agreed_by(self, ranks: Iterable[int]) -> int:
        return min(self.agreed[self.members[rank].name] for rank in ranks)

    def _undecided(self, audit: Audit, reported: Mapping[int, Sequence[int]]) -> tuple[str, str]:
        """What is said where no one can be named, and what to do."""
        who = " and ".join(self._who(rank) for rank in audit.ranks)
        part = f"part {audit.part} of step {self.step}"
        if all(len(set(digests)) > 1 for digests in reported.values()):
            return (
                f"{part} has other bits every time that {who} compute it, so the model or its step is to blame and no"
                " machine: something in it draws random numbers of its own, or remembers what it has seen",
                "take that out of it, or leave audit out",
            )
        return f"{who} disagree about the gradient of {part}, and it is not known which of them is wrong", _THREE

    def _end(self, what: str, fix: str) -> NoReturn:
        error = WrongBits(what, where="audit", fix=fix)
        error.trusted = min([self.equal_at, *self.agreed.values()])
        raise error

    def _accuse(self, guilty: Mapping[int, str]) -> NoReturn:
        named = "; ".join(f"{self._who(rank)} {what}" for rank, what in sorted(guilty.items()))
        error = WrongBits(named, where="audit")
        error.guilty, error.trusted = dict(guilty), self._agreed_by(self._left_with(guilty))
        raise error

    def _left_with(self, guilty: Iterable[int]) -> list[int]:
        """Those who are left out with `guilty` workers: their hosts' others, unless that is the only host."""
        hosts = {self.members[rank].node for rank in guilty}
        on_them = [rank for rank, member in enumerate(self.members) if member.node in hosts]
        return on_them if len({member.node for member in self.members}) > 1 else list(guilty)
