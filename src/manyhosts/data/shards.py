"""Streams that are read in shards: who reads which of them, and how far each has been read.

An epoch is read in as many shards as a batch has parts when it begins, one for each worker or virtual worker, and in so
many to its end, also when the workers change. Shard s gives the s-th part of each global batch until it is at its
end, so which samples a step has does not depend on who reads them. The parts that there are later share the
shards, neighbours to one part; the samples of a part's shards are one sequence.

A sample's number in its epoch, under which its random numbers are drawn, is its place in its shard times the number of
shards, plus that of the shard.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from manyhosts.data.cut import Cut
from manyhosts.data.first_samples import are_alike, numbers_of
from manyhosts.data.one_pass import Pass
from manyhosts.data.order import Indices, bounds
from manyhosts.data.steps import LoadedPiece, PiecePlan, plan_pieces
from manyhosts.data.stream import Stream
from manyhosts.errors import DataError

States = Mapping[str, Mapping[str, Any]]
"""By the number of their shard: `{"read": …, "next": …}`, what distinguishes the sample that comes after so many.

Datasets that say where they are have that under `"dataset"`.
"""


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """How far the shards of one epoch have been read, in their order: known to every worker."""

    read: Sequence[int]
    left: Sequence[bool]
    """Whether there is more of it."""
    states: States = field(default_factory=dict)
    """Of the shards of which this worker knows one, perhaps from before."""

    @classmethod
    def at_beginning(cls, shards: int) -> ShardProgress:
        """That of an epoch of which nothing has been read."""
        return cls([0] * shards, [True] * shards)

    @classmethod
    def of(cls, stream: Mapping[str, Any], sample: int) -> ShardProgress:
        """What `to_stream` gave. A stream that was not read in shards, `sample` samples of it, is one shard."""
        if "left" in stream:
            return cls(stream["read"], stream["left"], stream["states"])
        read = int(stream.get("read", sample))
        return cls([read], [True], {"0": stream} if {"dataset", "next"} & stream.keys() else {})

    @classmethod
    def of_all(cls, kept: Sequence[Mapping[str, Any]], sample: int) -> ShardProgress:
        """What a snapshot says of `sample` samples, in which each worker has `kept` what it knew."""
        first = next((dict(each) for each in kept if each), {})
        if "shards" in first and "left" not in first:  # each worker once kept its own shard's place, and no other
            rows = [dict(row) for row in kept[: first["shards"]]]
            states = {str(shard): row for shard, row in enumerate(rows) if "dataset" in row}
            return cls([row.get("read", 0) for row in rows], [not row["exhausted"] for row in rows], states)
        return cls.of(first, sample).knowing(each.get("states", {}) for each in kept)

    def to_stream(self) -> dict[str, Any]:
        """In plain values, as a step's `stream`."""
        return {
            "shards": len(self.read),
            "read": list(self.read),
            "left": list(self.left),
            "states": dict(self.states),
        }

    def after(self, given: Sequence[int], left: Sequence[bool], states: States) -> ShardProgress:
        """That after a step to which each shard has given so many samples."""
        return ShardProgress([old + new for old, new in zip(self.read, given, strict=True)], left, states)

    def knowing(self, others: Iterable[States]) -> ShardProgress:
        """With what others know of this epoch's shards: of each the latest state that is not ahead of this standing."""
        found = dict(self.states)
        for states in others:
            for shard, state in states.items():
                newest = found.get(shard, {"read": -1})["read"]
                if newest < state["read"] <= self.read[int(shard)]:
                    found[shard] = state
        return replace(self, states=found)

    def taken(self, given: Sequence[int]) -> Indices:
        """The numbers of the samples of a step to which each shard gives so many."""
        found = zip(self.read, given, strict=True)
        return np.concatenate([_numbers(shard, len(given), *each) for shard, each in enumerate(found)])


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker has read of one global batch."""

    epoch: int
    given: Mapping[int, int]
    """How many samples each of its shards gives."""
    left: Sequence[int]
    """Those of its shards of which there is more."""
    pieces: list[LoadedPiece]
    """Their weights are yet to be known: they depend on what the others have read."""
    states: States
    elsewhere: Sequence[int] = ()
    """Those of its shards that were opened again, and give another sample now than would have come before."""


class ShardReader:
    """Reads a worker's share of each global batch."""

    def __init__(self, stream: Stream, cut: Cut) -> None:
        """`cut`: which parts of a batch the worker computes."""
        self.stream, self.cut = stream, cut
        self.shards = min(cut.parts, stream.batch)
        """In how many an epoch is read that begins now; of a small batch not every part has a sample."""

    def shares(self, epoch: int, progress: ShardProgress) -> Iterator[Share]:
        """This worker's share of each step from there on, without end. An epoch of which it has nothing has one, empty.

        Raises:
            DataError: the stream cannot be read in these shards, or is not the one it was.
        """
        return self.stream.ahead(partial(self._shares, epoch, progress))

    def ghost(self, epoch: int, shards: int) -> LoadedPiece:
        """Some sample, for a worker that has none and must show the model one all the same."""
        for shard in (number % shards for number in range(self.cut.first, self.cut.first + shards)):
            samples = self._begin(self._dataset(shard, shards), epoch, shard, shards).take(1)
            if samples:
                plan = PiecePlan(self.cut.first, 0, np.zeros(1, dtype=np.int64), 0.0)
                return self.stream.piece(epoch, samples, plan, plan.indices)
        raise self.stream.no_sample(epoch)

    def _shares(self, epoch: int, progress: ShardProgress) -> Iterator[Share]:
        while True:
            parts = self._open(epoch, progress)
            more = True
            while more:
                share = self._share(epoch, parts, len(progress.read))
                yield share
                more = bool(share.left)
            epoch, progress = epoch + 1, ShardProgress.at_beginning(self.shards)

    def _share(self, epoch: int, parts: Mapping[int, Sequence[_Shard]], shards: int) -> Share:
        """The next samples of each part's shards, of which there are `shards` over all workers."""
        given, states, pieces = {}, {}, []
        elsewhere = [shard.number for own in parts.values() for shard in own if shard.is_elsewhere]
        for part, own in parts.items():
            samples: list[Any] = []
            numbers = []
            for shard in own:
                begin, taken = shard.read, shard.step()
                samples += taken
                given[shard.number] = len(taken)
                numbers.append(_numbers(shard.number, shards, begin, len(taken)))
                if shard.state is not None:
                    states[str(shard.number)] = shard.state
            for plan in plan_pieces(np.arange(len(samples)), Cut(1, 0, 1, self.cut.micro_batch)):
                named = np.concatenate(numbers)[plan.indices]
                pieces.append(self.stream.piece(epoch, samples, replace(plan, part=part), named))
        left = [shard.number for own in parts.values() for shard in own if shard.ahead]
        return Share(epoch, given, left, pieces, states, elsewhere)

    def _open(self, epoch: int, progress: ShardProgress) -> dict[int, list[_Shard]]:
        """The shards of which there is more, by the part that they belong to, each at its place."""
        shards, batch = len(progress.read), self.stream.batch
        if shards > batch:
            raise DataError(
                f"this epoch is read in {shards} shards, which cannot all have a part of a batch of {batch}",
                where="train set",
                fix=f"take a batch of at least {shards} samples until the epoch is over",
            )
        parts: dict[int, list[_Shard]] = {}
        seen: list[Any] = []
        for part in range(self.cut.first, self.cut.last):
            parts[part] = []
            for shard in range(*bounds(shards, self.cut.parts, part)):
                if progress.left[shard]:
                    seen.append(self._dataset(shard, shards, seen))
                    state = progress.states.get(str(shard))
                    begun = self._begin(seen[-1], epoch, shard, shards, state)
                    parts[part].append(_Shard(self.stream, begun, shard, shards, progress.read[shard], state or {}))
        return parts

    def _begin(self, dataset: Any, epoch: int, shard: int, shards: int, state: Mapping[str, Any] | None = None) -> Pass:
        return Pass(dataset, seed=self.stream.seed, epoch=epoch, first=shard, stride=shards, state=state)

    def _dataset(self, shard: int, shards: int, others: Sequence[Any] = ()) -> Any:
        """The dataset of one shard, and none of the `others` that are read next to it."""
        made = shard_of(self.stream.dataset, shard, shards)
        if not isinstance(made, IterableDataset) or any(made is other for other in others):
            what = "the same dataset again" if isinstance(made, IterableDataset) else type(made).__name__
            raise DataError(
                f"shard({shard}, {shards}) gave {what}, and not a dataset of that shard alone",
                where="train set",
                fix="let shard(index, count) return an IterableDataset of its own, which may be a copy of this one",
            )
        return made


def shard_of(dataset: Any, index: int, count: int) -> Any:
    """What `dataset.shard` gives for shard `index` of `count`, by name where its parameters are those of Hugging Face.

    Its `shard(num_shards, index)` has them the other way round.
    """
    try:
        names = set(inspect.signature(dataset.shard).parameters)
    except (TypeError, ValueError):  # written in C, or no function
        names = set()
    if "num_shards" in names:
        return dataset.shard(num_shards=count, index=index)
    return dataset.shard(index=index, count=count) if {"index", "count"} <= names else dataset.shard(index, count)


class _Shard:
    """A shard that is being read, a step ahead: only so is it known which step is its last."""

    def __init__(
        self, stream: Stream, source: Pass, number: int, shards: int, read: int, known: Mapping[str, Any]
    ) -> None:
        """`known`: what `state` was after so many samples of it, or fewer; may be empty."""
        begin, end = bounds(stream.batch, shards, number)
        self.source, self.number, self.drop_last = source, number, stream.drop_last
        self.most = end - begin
        """Samples that it gives to a step, while it can."""
        self.read = read
        """Samples that it has given."""
        self.state: Mapping[str, Any] | None = None
        """What it takes to open it again after those; None at its end."""
        known_at = int(known.get("read", read))
        source.skip_to(known_at)
        first = source.take(1) if known_at < read else []
        full = source.skip_to(read)
        self.ahead: list[Any] = self._next()
        if read and not (full and self.ahead):
            raise DataError(
                f"shard {number} of {shards} of the {stream.name} stream ends after {source.read} samples, "
                f"and when {read} had been read of it there were more",
                where=type(source.dataset).__name__,
                fix="let it give the same samples each time that an epoch is read, and load_state_dict go where it was",
            )
        expected = known.get("next") or []  # snapshots of before have none
        self.is_elsewhere = bool(expected) and not are_alike(_numbers_of_one(first or self.ahead), expected[:2])
        """Whether it has given nothing yet, and begins with another sample than came after `known`."""

    def step(self) -> list[Any]:
        """What it gives to the next step: nothing when it is at its end."""
        samples, self.state, self.is_elsewhere = self.ahead, None, False
        if samples:
            state = self.source.state()
            self.read += len(samples)
            self.ahead = self._next()
            self.state = {**state, "next": _numbers_of_one(self.ahead)} if self.ahead else None
        return samples

    def _next(self) -> list[Any]:
        samples = self.source.take(self.most)
        return [] if self.drop_last and len(samples) < self.most else samples


def _numbers_of_one(samples: Sequence[Any]) -> list[float]:
    """What distinguishes the first of them, without the room for others: snapshots keep it of each shard."""
    return numbers_of(samples[:1])[:2]


def _numbers(shard: int, shards: int, read: int, count: int) -> Indices:
    """The numbers of the `count` samples that come after the first `read` of a shard; shape `(count,)`."""
    return np.arange(read, read + count, dtype=np.int64) * shards + shard
