"""Where a run's steps come from: a dataset with an index, or a stream, cut for this worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch.utils.data import IterableDataset

from manyhosts.communication.world import World
from manyhosts.config.settings import Settings
from manyhosts.data.cut import Cut, Cuts
from manyhosts.data.data import Data, reads_in_shards
from manyhosts.data.fetch import Fetcher
from manyhosts.data.identity import DataIdentity
from manyhosts.data.order import Order, Position
from manyhosts.data.own_order import asked
from manyhosts.data.shards import ShardProgress, ShardReader, Share, States
from manyhosts.data.steps import LoadedPiece, Loader, PiecePlan, Step, Steps
from manyhosts.data.stream import Stream
from manyhosts.device import is_asynchronous
from manyhosts.elastic.state_transfer import gather
from manyhosts.errors import ConfigError, DataError


class Source(Protocol):
    """The steps of the training set."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps that an epoch has; None for a stream."""
        return None

    @property
    def cuts(self) -> Cuts | None:
        """How the steps are cut, where that may change from one step to the next."""
        return None

    def steps(self, position: Position, stream: Mapping[str, Any]) -> Steps:
        """Every step from `position` on; `stream` is what the last step's `stream` kept on this worker."""

    def epochs(self, position: Position) -> float:
        """Epochs done at `position`; integers only for a stream."""
        return float(position.epoch)

    def of_snapshot(self, kept: Sequence[Mapping[str, Any]], rank: int, position: Position) -> Mapping[str, Any]:
        """What this rank continues from, of what each of a snapshot's workers has `kept` of its stream."""
        return {}

    def begin(self, position: Position) -> Position:
        """Where the next step begins, from a position that steps of another size may have led to."""
        return position

    def met(self, stream: Mapping[str, Any], before: Mapping[str, Any]) -> Mapping[str, Any]:
        """Called on every worker when the workers have changed: what this one continues from.

        `stream` is that of a worker that is where all continue; `before`, of the same epoch, what this one had itself.
        """
        return stream


class TrainBatches:
    """The global batches of a run: how large, of which data, and where this worker reads what is its own of them."""

    def __init__(self, make: Callable[[int], Source], size: int, identity: DataIdentity) -> None:
        """`make`: the source for batches of a size and this worker's present place."""
        self._make, self.identity = make, identity
        self.size = size
        """Samples in each: as many as at the beginning, however many workers there are later."""
        self.source = make(size)

    def recut(self) -> None:
        """Read from now on what is this worker's, by its place among the workers of now."""
        self.source = self._make(self.size)


@dataclass(frozen=True, slots=True)
class IndexedSource(Source):
    """Steps of a map-style dataset, of which the position says all."""

    loader: Loader
    order: Order
    cuts: Cuts

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps that an epoch has."""
        return self.order.steps_per_epoch

    def steps(self, position: Position, stream: Mapping[str, Any]) -> Steps:
        """Every step from `position` on."""
        return self.loader.steps(self.order, self.cuts, position)

    def epochs(self, position: Position) -> float:
        """Epochs done, with the fraction of the one under way."""
        return position.epoch + position.sample / self.order.used

    def begin(self, position: Position) -> Position:
        """There, or with the next epoch where too few samples are left for a step."""
        return self.order.begin(position)


@dataclass(frozen=True, slots=True)
class StreamSource(Source):
    """Steps of a stream that every worker reads entirely."""

    stream: Stream
    cuts: Cuts

    def steps(self, position: Position, stream: Mapping[str, Any]) -> Steps:
        """Every step from `position` on."""
        return self.stream.steps(self.cuts, position, stream)

    def of_snapshot(self, kept: Sequence[Mapping[str, Any]], rank: int, position: Position) -> Mapping[str, Any]:
        """What the worker of this rank has kept.

        Raises:
            DataError: the epoch was begun in shards.
        """
        if any("shards" in each for each in kept):
            raise DataError(
                "this run has read a part of its stream in shards, and now there are none",
                where="train set",
                fix="let the dataset have its shard(index, count) again, at least until the epoch is over",
            )
        return kept[rank] if rank < len(kept) else {}


@dataclass(frozen=True, slots=True)
class ShardedSource(Source):
    """Steps of a stream of which every worker reads some shards.

    No one knows beforehand how long a shard is, so before each step the workers send each other how many samples each
    shard gives, whether there is more of it, and whether it continues elsewhere than where it was; the epoch is over
    when all are. So each knows how far every shard has been read. Costs one exchange of three times as many numbers as
    there are shards, and one. A shard stays with its worker until the epoch is over.
    """

    stream: Stream
    cut: Cut
    world: World

    def steps(self, position: Position, stream: Mapping[str, Any]) -> Steps:
        """Every step from `position` on."""
        reader = ShardReader(self.stream, self.cut)
        begun = (
            ShardProgress.of(stream, position.sample) if position.sample else ShardProgress.at_beginning(reader.shards)
        )
        return self._agreed(reader, position.epoch, begun)

    def _agreed(self, reader: ShardReader, epoch: int, progress: ShardProgress) -> Steps:
        own = reader.shares(epoch, progress)
        pending: Share | None = None
        ghost: LoadedPiece | None = None
        while True:
            pending = pending or next(own)
            share = pending if pending.epoch == epoch else Share(epoch, {}, [], [], {})
            shards = len(progress.read)
            given, left, elsewhere, most_pieces = self._exchange(share, shards)
            total, going_on = sum(given), any(left)
            if not total:
                raise self.stream.no_sample(epoch)
            pieces = _weighted(share.pieces, total)
            if self.cut.level:
                # A worker that has less than others shows the model a sample that counts for nothing.
                ghost = (pieces or pending.pieces or [ghost or reader.ghost(epoch, shards)])[-1]
                pieces = _leveled(pieces, self.cut, most_pieces, ghost)
            taken, said = progress.taken(given), self._said(elsewhere, progress)
            progress = progress.after(given, left, share.states)
            after = Position(epoch, sum(progress.read)) if going_on else Position(epoch + 1)
            kept = progress.to_stream() if going_on else {}
            yield Step(
                epoch,
                total,
                after,
                not going_on,
                pieces,
                taken,
                kept,
                shards,
                said=said,
                assignment=self.cut.assignment,
            )
            if share is pending:
                pending = None
            if not going_on:
                epoch, progress = epoch + 1, ShardProgress.at_beginning(reader.shards)

    def _exchange(self, share: Share, shards: int) -> tuple[list[int], list[bool], list[int], int]:
        """What each shard gives to the step, whether there is more of it, which continue elsewhere than where they
        were, and the most pieces that a part has.
        """
        # Three rows of as many numbers as there are shards, and one number: here what is not 0 of this worker's.
        own = {**share.given, 3 * shards: max(Counter(piece.plan.part for piece in share.pieces).values(), default=0)}
        own |= {shards + shard: 1 for shard in share.left} | {2 * shards + shard: 1 for shard in share.elsewhere}
        mine = torch.zeros(3 * shards + 1, dtype=torch.int64)
        for place, number in own.items():
            mine[place] = number
        rows = self.world.stack(mine.to(self.world.device)).cpu()
        given, left, elsewhere = rows[:, :-1].sum(0).reshape(3, shards).tolist()
        moved = [shard for shard, number in enumerate(elsewhere) if number]
        return given, [bool(more) for more in left], moved, int(rows[:, -1].max())

    def _said(self, elsewhere: Sequence[int], progress: ShardProgress) -> str:
        """What is to be said of shards that continue elsewhere than where they were; empty where none does."""
        if not elsewhere:
            return ""
        first, others = elsewhere[0], len(elsewhere) - 1
        more = f" (nor {'does 1 other' if others == 1 else f'do {others} others'})" if others else ""
        return (
            f"shard {first} of {len(progress.read)} of the {self.stream.name} stream does not continue where it "
            f"was{more}: after {progress.read[first]} samples of it another one comes than before; the epoch repeats "
            "some and leaves others out, unless shard, __iter__, state_dict and load_state_dict lead to the same ones"
        )

    def of_snapshot(self, kept: Sequence[Mapping[str, Any]], rank: int, position: Position) -> Mapping[str, Any]:
        """How far every shard was read, with what all workers kept of theirs: any may be read by another now."""
        return ShardProgress.of_all(kept, position.sample).to_stream() if position.sample else {}

    def met(self, stream: Mapping[str, Any], before: Mapping[str, Any]) -> Mapping[str, Any]:
        """How far every shard was read, with what each worker knows of its own."""
        known: States = stream.get("states", {})
        if len(before.get("read", ())) == len(stream.get("read", ())):
            known = {**before.get("states", {}), **known}
        reported = [found["states"] for found in gather(self.world, {"states": known})]
        return ShardProgress.of(stream, 0).knowing(reported).to_stream() if stream else stream


def _weighted(pieces: Sequence[LoadedPiece], total: int) -> list[LoadedPiece]:
    """`pieces` with their shares of a batch of `total` samples."""
    return [replace(piece, plan=replace(piece.plan, weight=len(piece.plan.indices) / total)) for piece in pieces]


def _leveled(pieces: Sequence[LoadedPiece], cut: Cut, most: int, ghost: LoadedPiece) -> list[LoadedPiece]:
    """`pieces`, with ghosts after those of each part that has fewer than `most`."""
    found: list[LoadedPiece] = []
    for part in range(cut.first, cut.last):
        own = [piece for piece in pieces if piece.plan.part == part]
        plans = [PiecePlan(part, micro, ghost.plan.indices, 0.0) for micro in range(len(own), most)]
        found += [*own, *(LoadedPiece(plan, ghost.batch) for plan in plans)]
    return found


def make_source(data: Data, settings: Settings, *, batch: int, cut: Cut, world: World) -> Source:
    """The source for what `data` holds.

    Raises:
        ConfigError: there is no training set.
    """
    if data.train is None:
        raise ConfigError(
            "there is no training set",
            where="mh.Data(train=…)",
            fix="give one; to evaluate alone, give the same set as train=, too, and call test() without fit()",
        )
    if isinstance(data.train, IterableDataset):
        if settings.audit is not None and reads_in_shards(data.train):
            raise ConfigError(
                "the training set is a stream that is read in shards, so no other worker has the samples of a part",
                where="audit",
                fix="leave audit out, or the dataset's shard(index, count): then every worker reads the entire stream",
            )
        if settings.balance == "speed":
            _check_may_move(data.train, settings)
        if settings.loader_workers not in (0, 1, "auto"):
            world.notes.append(
                f"loader_workers={settings.loader_workers}: a stream is read by one process, for a second would read "
                "the same samples again"
            )
        stream = Stream(
            data.train,
            batch=batch,
            seed=settings.seed,
            name="train",
            collate=data.collate,
            drop_last=settings.drop_last,
            processes=1 if settings.loader_workers == "auto" else settings.loader_workers,
        )
        return ShardedSource(stream, cut, world) if reads_in_shards(data.train) else StreamSource(stream, Cuts(cut))
    length = len(cast(Any, data.train))
    order = Order(
        length,
        batch=batch,
        seed=settings.seed,
        shuffle=settings.shuffle,
        drop_last=settings.drop_last,
        weights=data.weights,
        own=None if data.order is None else partial(asked, data.order, length, settings.seed),
    )
    if not order.steps_per_epoch:
        raise ConfigError(
            f"drop_last leaves nothing: the training set has {order.length} samples, and a batch {batch}",
            where="mh.Data(batch_size=…, drop_last=True)",
            fix="make the batch smaller, or leave drop_last out",
        )
    loader = Loader(
        Fetcher(data.train, seed=settings.seed, name="train", collate=data.collate),
        processes=settings.loader_workers,
        pin=is_asynchronous(world.device),
        say=world.notes.append,
    )
    return IndexedSource(loader, order, Cuts(cut))


def _check_may_move(dataset: Any, settings: Settings) -> None:
    """See that samples of a stream can go to another worker than they went to until now.

    Raises:
        ConfigError: they cannot.
    """
    if hasattr(dataset, "shard"):
        raise ConfigError(
            "the training set is a stream that is read in shards, and a shard stays with its worker for an epoch",
            where="balance",
            fix="leave balance out, or the dataset's shard(index, count): then every worker reads the entire stream",
        )
    if settings.loader_workers:
        raise ConfigError(
            "the training set is a stream that another process reads ahead, which does not hear of a new cut",
            where="balance",
            fix="set mh.Data(loader_workers=0), so that the worker reads the stream itself, or leave balance out",
        )
