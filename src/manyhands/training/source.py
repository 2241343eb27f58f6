"""Where a run's steps come from: a dataset with an index, or a stream, cut for this worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch.utils.data import IterableDataset

from manyhands.communication.world import World
from manyhands.config.settings import Settings
from manyhands.data.data import Data
from manyhands.data.fetch import Fetcher
from manyhands.data.order import Order, Position
from manyhands.data.steps import Cut, Loader, Step
from manyhands.data.stream import Stream
from manyhands.errors import ConfigError, DataError


class Source(Protocol):
    """The steps of the training set."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps that an epoch has; None for a stream."""

    def steps(self, position: Position, stream: Mapping[str, Any]) -> Iterator[Step]:
        """Every step from `position` on; `stream` is what the last step's `stream` held on this worker."""

    def epochs(self, position: Position) -> float:
        """Epochs done at `position`; whole numbers only for a stream."""


@dataclass(frozen=True, slots=True)
class IndexedSource:
    """Steps of a map-style dataset."""

    loader: Loader
    order: Order
    cut: Cut

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps that an epoch has."""
        return self.order.steps_per_epoch

    def steps(self, position: Position, stream: Mapping[str, Any]) -> Iterator[Step]:
        """Every step from `position` on."""
        return self.loader.steps(self.order, self.cut, position)

    def epochs(self, position: Position) -> float:
        """Epochs done, with the fraction of the one under way."""
        return position.epoch + position.sample / self.order.used


@dataclass(frozen=True, slots=True)
class StreamSource:
    """Steps of a stream that every worker reads whole."""

    stream: Stream
    cut: Cut
    steps_per_epoch: int | None = None

    def steps(self, position: Position, stream: Mapping[str, Any]) -> Iterator[Step]:
        """Every step from `position` on."""
        return self.stream.steps(self.cut, position, stream)

    def epochs(self, position: Position) -> float:
        """Epochs done, whole ones."""
        return float(position.epoch)


@dataclass(frozen=True, slots=True)
class ShardedSource:
    """Steps of a stream of which every worker reads its own shard.

    Nobody knows beforehand how long a shard is, so before each step the workers tell each other how many samples they
    have; the epoch is over when all shards are. Costs one exchange of three numbers per step.
    """

    stream: Stream
    cut: Cut
    world: World
    steps_per_epoch: int | None = None

    def steps(self, position: Position, stream: Mapping[str, Any]) -> Iterator[Step]:
        """Every step from `position` on.

        Raises:
            DataError: the run was begun with another number of workers, so with other shards.
        """
        shards = stream.get("shards", self.cut.parts)
        if position.sample and shards != self.cut.parts:
            raise DataError(
                f"this run read its stream in {shards} shards and cannot go on in {self.cut.parts} within an epoch",
                where="train set",
                fix=f"go on with {shards} workers, or leave out `shard` so that every worker reads the whole stream",
            )
        if stream.get("exhausted"):  # its shard was at its end before those of others were
            return self._agreed(position, self.stream.steps(self.cut, Position(position.epoch + 1), {}))
        return self._agreed(position, self.stream.steps(self.cut, position, stream))

    def _agreed(self, position: Position, own: Iterator[Step]) -> Iterator[Step]:
        world = self.world
        held: Step | None = None
        epoch, sample = position.epoch, position.sample
        ended = False
        while True:
            held = held or next(own)
            step = held if held.epoch == epoch else None
            ended = step is None or step.ends_epoch
            mine = torch.tensor(
                [step.samples if step else 0, len(step.pieces) if step else 0, not ended],
                dtype=torch.int64,
                device=world.device,
            )
            counts = world.stack(mine).cpu()
            total, most_pieces, going_on = int(counts[:, 0].sum()), int(counts[:, 1].max()), bool(counts[:, 2].any())
            pieces = [
                replace(piece, plan=replace(piece.plan, weight=len(piece.plan.indices) / total))
                for piece in (step.pieces if step else [])
            ]
            if self.cut.level:
                # A worker whose shard is at its end shows the model a sample that counts for nothing.
                ghost = pieces[-1] if pieces else held.pieces[-1]
                ghost = replace(ghost, plan=replace(ghost.plan, weight=0.0))
                pieces += [ghost] * (most_pieces - len(pieces))
            sample += total
            after = Position(epoch, sample) if going_on else Position(epoch + 1)
            kept = {**(step.stream if step else {}), "shards": self.cut.parts, "exhausted": ended} if going_on else {}
            taken = step.taken if step else held.taken[:0]
            yield Step(epoch, total, after, not going_on, pieces, taken, kept)
            if step is not None:
                held = None
            if not going_on:
                epoch, sample = epoch + 1, 0

    def epochs(self, position: Position) -> float:
        """Epochs done, whole ones."""
        return float(position.epoch)


def make_source(data: Data, settings: Settings, *, batch: int, cut: Cut, world: World) -> Source:
    """The source for what `data` holds.

    Raises:
        ConfigError: there is no training set.
    """
    if data.train is None:
        raise ConfigError("there is no training set", where="mh.Data(train=…)", fix="give one, or call test() only")
    if isinstance(data.train, IterableDataset):
        stream = Stream(
            data.train,
            batch=batch,
            seed=settings.seed,
            name="train",
            collate=data.collate,
            drop_last=settings.drop_last,
            processes=1 if settings.loader_workers == "auto" else settings.loader_workers,
        )
        # A shard is what one worker reads; with virtual workers what is read must not depend on how many there are.
        stream.sharded = stream.sharded and settings.virtual_workers is None
        return ShardedSource(stream, cut, world) if stream.sharded and cut.parts > 1 else StreamSource(stream, cut)
    order = Order(
        len(cast(Any, data.train)),
        batch=batch,
        seed=settings.seed,
        shuffle=settings.shuffle,
        drop_last=settings.drop_last,
    )
    if not order.steps_per_epoch:
        raise ConfigError(
            f"drop_last leaves nothing: the training set has {order.length} samples, and a batch {batch}",
            where="mh.Data(batch_size=…, drop_last=True)",
            fix="make the batch smaller, or leave drop_last out",
        )
    fetcher = Fetcher(data.train, seed=settings.seed, name="train", collate=data.collate)
    loader = Loader(fetcher, processes=settings.loader_workers, pin=world.device.type == "cuda", say=world.notes.append)
    return IndexedSource(loader, order, cut)
