"""Streams: datasets without an index, read in the order in which they come.

Every worker reads the whole stream and keeps its part of each global batch, so that a stream is cut like any other
dataset. One that offers `shard(index, count)` is read in shards instead, each worker its own. Going on from a snapshot
skips what was read, or uses the dataset's `state_dict` and `load_state_dict` where it has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from manyhands.data import randomness
from manyhands.data.fetch import Collate
from manyhands.data.order import Position, bounds
from manyhands.data.steps import Cut, LoadedPiece, PiecePlan, Step, plan_pieces
from manyhands.errors import DataError

_END = object()


class Stream:
    """The steps of an `IterableDataset`."""

    def __init__(  # what a map-style dataset spreads over Order, Fetcher and Loader
        self,
        dataset: IterableDataset[Any],
        *,
        batch: int,
        seed: int,
        name: str,
        collate: Collate | None = None,
        drop_last: bool = False,
        processes: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch = batch
        self.seed = seed
        self.name = name
        self.collate = collate or default_collate
        self.drop_last = drop_last
        self.processes = min(processes, 1)  # a second process would read the same samples once more
        self.sharded = hasattr(dataset, "shard")

    def steps(self, cut: Cut, position: Position, state: Mapping[str, Any]) -> Iterator[Step]:
        """Every step from `position` on; `state` is what the last step's `stream` held, empty at the beginning."""
        if not self.processes:
            return self._steps(cut, position, state)
        return iter(
            DataLoader(
                _Produced(self, cut, position, state), batch_size=None, num_workers=1, generator=torch.Generator()
            )
        )

    def _steps(self, cut: Cut, position: Position, state: Mapping[str, Any]) -> Iterator[Step]:
        epoch = position.epoch
        while True:
            empty = True
            for step in self._epoch(cut, Position(epoch, position.sample), state):
                yield step
                empty = False
            if empty and not position.sample:
                raise DataError(
                    f"the {self.name} stream gave no sample in epoch {epoch}",
                    where=type(self.dataset).__name__,
                    fix="let __iter__ begin anew each time it is called, and see that every worker's shard has samples",
                )
            epoch, position, state = epoch + 1, Position(epoch + 1), {}

    def _epoch(self, cut: Cut, position: Position, state: Mapping[str, Any]) -> Iterator[Step]:
        """The steps from `position` to the end of its epoch. Reads one step ahead, to know which one is the last."""
        if self.sharded:
            begin, end = bounds(self.batch, cut.parts, cut.first)
            shard = self.dataset.shard(cut.first, cut.parts)  # type: ignore[attr-defined]
            if not isinstance(shard, IterableDataset):
                raise DataError(
                    f"shard({cut.first}, {cut.parts}) gave {type(shard).__name__}, and not the dataset of one worker",
                    where="train set",
                    fix="let shard(index, count) return an IterableDataset of its own, which may be a copy of this one",
                )
            source = _Source(self, shard, position.epoch, state, cut.first, cut.parts)
            source.skip(int(state.get("read", 0)))
            own = end - begin
            cut = Cut(1, 0, 1, cut.micro_batch)
        else:
            source = _Source(self, self.dataset, position.epoch, state)
            source.skip(int(state.get("read", position.sample)))
            own = self.batch
        begin, samples = source.read, source.take(own)
        while samples and not (self.drop_last and len(samples) < own):
            left_at = source.state()
            following = source.take(own)
            ends = len(following) < (own if self.drop_last else 1)
            after = Position(position.epoch + 1) if ends else Position(position.epoch, begin + len(samples))
            pieces = [
                LoadedPiece(replace(plan, indices=plan.indices + begin), self._batch(samples, plan))
                for plan in plan_pieces(np.arange(len(samples)), cut)
            ]
            taken = np.arange(begin, begin + len(samples))
            yield Step(position.epoch, len(samples), after, ends, pieces, taken, {} if ends else left_at)
            begin, samples = begin + len(samples), following

    def _batch(self, samples: list[Any], plan: PiecePlan) -> Any:
        return self.collate([samples[row] for row in plan.indices.tolist()])


class _Source:
    """One pass over a stream. Shards take the addresses `first`, `first + stride`, … for their random numbers."""

    def __init__(
        self, stream: Stream, dataset: Any, epoch: int, state: Mapping[str, Any], first: int = 0, stride: int = 1
    ) -> None:
        self.seed, self.dataset, self.epoch, self.first, self.stride = stream.seed, dataset, epoch, first, stride
        self.read = 0
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        self.restored = "dataset" in state and hasattr(dataset, "load_state_dict")
        if self.restored:
            dataset.load_state_dict(state["dataset"])
        self.samples = iter(dataset)

    def skip(self, count: int) -> None:
        """Go to where `count` samples have been read; a restored dataset is there already."""
        if self.restored:
            self.read = count
        else:
            self.take(count)  # read, not jumped over: what it draws on the way (a shuffle buffer, say) must be the same

    def take(self, count: int) -> list[Any]:
        """The next `count` samples, or as many as are left, each drawn under its own seed."""
        taken: list[Any] = []
        with randomness.kept():
            while len(taken) < count:
                address = self.read * self.stride + self.first
                randomness.seed_all(self.seed, randomness.SAMPLE, self.epoch, address)
                sample = next(self.samples, _END)
                if sample is _END:
                    break
                taken.append(sample)
                self.read += 1
        return taken

    def state(self) -> dict[str, Any]:
        """What it takes to go on after the samples taken so far."""
        state: dict[str, Any] = {"read": self.read}
        if hasattr(self.dataset, "state_dict"):
            state["dataset"] = self.dataset.state_dict()
        return state


class _Produced(IterableDataset[Step]):
    """A stream's steps, made in a loader process."""

    def __init__(self, stream: Stream, cut: Cut, position: Position, state: Mapping[str, Any]) -> None:
        self.arguments = cut, position, state
        self.stream = stream

    def __iter__(self) -> Iterator[Step]:
        return self.stream._steps(*self.arguments)
