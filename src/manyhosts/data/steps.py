"""The steps of a run as one worker sees them: which samples, in which pieces, fetched."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from manyhosts.data import loader_process
from manyhosts.data.audits import Audit
from manyhosts.data.cut import Cut, Cuts
from manyhosts.data.fetch import Fetcher
from manyhosts.data.measured import MEASURED, Timed, chosen_for
from manyhosts.data.order import Indices, Order, Position
from manyhosts.errors import ManyhostsError


@dataclass(slots=True)
class PiecePlan:
    """The samples of one forward pass; a ghost (`weight` 0) is computed for its collectives only."""

    part: int
    micro: int
    indices: Indices
    weight: float
    shares: Mapping[str, float] | None = None
    """Of each loss of several; None where there is one."""


@dataclass(frozen=True, slots=True)
class LoadedPiece:
    """A piece and its batch."""

    plan: PiecePlan
    batch: Any


class DuePiece:
    """A piece whose batch is fetched when it is asked for, and kept by no one here: so few are in memory at a time."""

    __slots__ = ("_asked", "_fetch", "plan")

    def __init__(self, plan: PiecePlan, fetch: Callable[..., Any], *asked: Any) -> None:
        """`fetch(*asked)` gives the batch."""
        self.plan, self._fetch, self._asked = plan, fetch, asked

    @property
    def batch(self) -> Any:
        """Ask once, in the order of the pieces; a piece may be passed over."""
        return self._fetch(*self._asked)


@dataclass(frozen=True, slots=True)
class LoadedAudit:
    """An audit, and what this worker has to compute for it: nothing where it is not one of those who check."""

    audit: Audit
    pieces: list[LoadedPiece]


@dataclass(slots=True)
class Step:
    """One optimizer step: this worker's pieces of one global batch."""

    epoch: int
    samples: int
    """Samples of the global batch."""
    after: Position
    """Where the data is when the step is done."""
    ends_epoch: bool
    pieces: Sequence[LoadedPiece | DuePiece]
    taken: Indices
    """The samples of the global batch, by index; of a stream that is read in shards, by number (see `shards`)."""
    stream: Mapping[str, Any] = field(default_factory=dict)
    """What a stream needs besides `after` to continue from here; its worker knows what a dataset said of its place."""
    shards: int = 0
    """In how many its epoch is read; 0 where it is not."""
    first_samples: Sequence[float] = ()
    """Of the first step of a stream that every worker reads entirely: what distinguishes its samples."""
    said: str = ""
    """What is to be said of how it was read."""
    audits: Sequence[LoadedAudit] = ()
    """The same ones on every worker."""
    assignment: Sequence[range] = ()
    """The parts that each worker computes, by rank; empty: neighbouring ones, as evenly as integers allow."""

    def fetched(self, most: int | None = None) -> list[LoadedPiece]:
        """The first `most` pieces, or all, with their batches. The caller puts them in the place of those."""
        return [
            piece if isinstance(piece, LoadedPiece) else LoadedPiece(piece.plan, piece.batch)
            for piece in self.pieces[:most]
        ]


Steps = Generator[Step, None, None]
"""Steps without end. Who needs no more of them closes them: then processes that fetch ahead end at once."""


def plan_pieces(indices: Indices, cut: Cut) -> list[PiecePlan]:
    """The pieces of one global batch that a worker with `cut` computes; their weights over all workers sum to 1."""
    count = len(indices)
    pieces = []
    for part in range(cut.first, cut.last):
        begin, end = cut.bounds(count, part)
        most = cut.micro_batch or max(end - begin, 1)
        starts = range(begin, end, most)
        for micro, start in enumerate(starts):
            chosen = indices[start : min(start + most, end)]
            pieces.append(PiecePlan(part, micro, chosen, len(chosen) / count))
        if cut.level:
            longest = cut.longest(count)
            for micro in range(len(starts), -(-longest // (cut.micro_batch or longest))):
                pieces.append(PiecePlan(part, micro, indices[:1], 0.0))
    return pieces


def plan_audits(indices: Indices, cut: Cut, position: Position) -> list[tuple[Audit, list[PiecePlan]]]:
    """The audits of the step that begins at `position`, each with what a worker with `cut` has to compute for it."""
    if cut.audits is None:
        return []
    rank = cut.audits.rank
    return [
        (
            audit,
            plan_pieces(indices, replace(cut, first=audit.part, last=audit.part + 1))
            if rank in (audit.auditor, audit.third)
            else [],
        )
        for audit in cut.audits.of(position, cut.parts, len(indices), cut.assignment)
    ]


class Loader:
    """Fetches batches in order, in this process or ahead of time in `processes` others."""

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        processes: int | Literal["auto"],
        pin: bool,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`processes="auto"`: fetch the first batches here, time them, and `say` how many processes fetch the rest."""
        self.fetcher = fetcher
        self.processes = processes
        self.pin = pin
        self.say = say
        self.measured = False
        """Whether the number was chosen by measuring."""

    def batches(self, requests: Iterator[tuple[int, Indices]]) -> Generator[Any, None, None]:
        """The batch of each (epoch, indices), in order. With loader processes, `requests` is read ahead."""
        if self.processes == "auto":
            timed = Timed(self._fetch(epoch, indices) for epoch, indices in islice(requests, MEASURED))
            yield from timed
            if len(timed.rest) < MEASURED:
                return  # there were no more
            self.processes, why = chosen_for(timed)
            self.measured = True
            if self.say is not None:
                self.say(why)
        if not self.processes:
            yield from (self._fetch(epoch, indices) for epoch, indices in requests)
            return
        with warnings.catch_warnings():
            if self.measured:
                # PyTorch warns of more processes than cores; these were found to wait more than they compute.
                warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader: DataLoader[Any] = DataLoader(
                _Requested(self.fetcher),  # type: ignore[arg-type]  # map-style by its __getitems__
                batch_sampler=([request] for request in requests),
                num_workers=self.processes,
                collate_fn=_only,
                pin_memory=self.pin,
                multiprocessing_context=loader_process.context(),
                worker_init_fn=loader_process.outlive,
                generator=torch.Generator(),  # or it would draw its seed from the generator that dropout uses
            )
            batches = iter(loader)
        for batch in batches:
            if isinstance(batch, Failed):
                raise batch.error
            yield batch

    def steps(self, order: Order, cuts: Cuts, position: Position) -> Steps:
        """Every step from `position` on, epoch after epoch without end."""
        cuts.begin(position)
        if not self.processes:
            for plan in _walk(order, cuts, position):
                yield plan.loaded(partial(self._fetch_piece, plan.epoch))
        # The plan is walked twice: once ahead, for the fetching, and once as steps are taken. So a step in which this
        # worker has no piece is taken without waiting for the first batch of a later one.
        fetched = self.batches(
            (plan.epoch, piece.indices) for plan in _walk(copy(order), cuts, position) for piece in plan.all_pieces()
        )
        with closing(fetched):
            batches, begun = _InOrder(fetched), 0
            for plan in _walk(order, cuts, position):
                yield plan.loaded(partial(batches.get, begun))
                begun += len(plan.all_pieces())

    def _fetch_piece(self, epoch: int, _number: int, piece: PiecePlan) -> Any:
        return self._fetch(epoch, piece.indices)

    def _fetch(self, epoch: int, indices: Indices) -> Any:
        batch = self.fetcher(epoch, indices)
        return pinned(batch) if self.pin else batch


@dataclass(slots=True)
class _StepPlan:
    """A step before its samples are fetched."""

    epoch: int
    taken: Indices
    after: Position
    pieces: list[PiecePlan]
    audits: list[tuple[Audit, list[PiecePlan]]]
    assignment: Sequence[range]

    def all_pieces(self) -> list[PiecePlan]:
        """What is to be fetched, in the order in which `loaded` asks for it."""
        return [*(piece for _, pieces in self.audits for piece in pieces), *self.pieces]

    def loaded(self, fetch: Callable[[int, PiecePlan], Any]) -> Step:
        """The step, with what `fetch` gives for each piece and its number among all.

        What is audited is there at once, because it may be computed more than once; the rest when it is asked for.
        """
        numbers = count()
        audits = [
            LoadedAudit(audit, [LoadedPiece(piece, fetch(next(numbers), piece)) for piece in pieces])
            for audit, pieces in self.audits
        ]
        own = [DuePiece(piece, fetch, next(numbers), piece) for piece in self.pieces]
        ends = self.after.epoch > self.epoch
        return Step(
            self.epoch, len(self.taken), self.after, ends, own, self.taken, audits=audits, assignment=self.assignment
        )


def _walk(order: Order, cuts: Cuts, position: Position) -> Iterator[_StepPlan]:
    """Every step from `position` on."""
    while True:
        indices = order.at(position)
        after = order.after(position)
        cut = cuts.plan(position, after)
        audits = plan_audits(indices, cut, position)
        yield _StepPlan(position.epoch, indices, after, plan_pieces(indices, cut), audits, cut.assignment)
        position = after


class _InOrder:
    """Batches that come one after another, asked for by number: those that no one asks for are passed over."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches, self.come = batches, 0

    def get(self, begun: int, number: int, piece: PiecePlan) -> Any:
        """That of `piece`, the one after `begun` + `number` others."""
        wanted = begun + number
        assert wanted >= self.come, f"batch {wanted} was asked for when {self.come} had come"
        for _ in range(wanted - self.come):
            next(self.batches)
        self.come = wanted + 1
        return next(self.batches)


class _Requested:
    """A dataset whose index is a request and whose item is the entire batch."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher

    def __getitems__(self, requests: list[tuple[int, Indices]]) -> list[Any]:
        try:
            return [self.fetcher(epoch, indices) for epoch, indices in requests]
        except ManyhostsError as error:
            return [Failed(error)]


@dataclass(frozen=True, slots=True)
class Failed:
    """What a loader process gives in the place of a batch. An error that it raised would come as two tracebacks."""

    error: ManyhostsError


def _only(batches: list[Any]) -> Any:
    return batches[0]


def pinned(batch: Any) -> Any:
    """`batch` in page-locked memory, from which copies to a GPU need not be waited for. What is there is left there."""
    return mapped(batch, lambda tensor: tensor.pin_memory() if tensor.is_cpu else tensor)


def on_device(batch: Any, device: torch.device) -> Any:
    """`batch` on an accelerator, later: nothing waits for the copy. Samples of a stream are pinned here."""
    return mapped(pinned(batch), lambda tensor: tensor.to(device, non_blocking=True))


def mapped(batch: Any, change: Any) -> Any:
    """`batch` with `change` applied to every tensor in its lists, tuples, mappings and named tuples."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, PackedSequence):  # its lengths stay on the CPU, where an RNN wants them
        orders = (None if order is None else change(order) for order in (batch.sorted_indices, batch.unsorted_indices))
        return PackedSequence(change(batch.data), batch.batch_sizes, *orders)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(item, change) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(item, change) for item in batch)
    if isinstance(batch, Mapping):
        changed = {key: mapped(item, change) for key, item in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return changed
        try:
            of_its_kind = copy(batch)  # a BatchEncoding, say, has methods that a script uses
            of_its_kind.update(changed)
        except Exception:  # of many kinds: a ModelOutput takes no update
            return changed
        return of_its_kind
    return batch
