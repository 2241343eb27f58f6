"""A stream in shards: each sample of an epoch once, in the same batches, whoever reads and whoever goes meanwhile."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import IterableDataset

from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.data.cut import Cut, Cuts
from manyhosts.data.order import Position, bounds
from manyhosts.data.shards import ShardProgress
from manyhosts.data.steps import Step
from manyhosts.data.stream import Stream
from manyhosts.errors import DataError
from manyhosts.training.loop.numbers import named
from manyhosts.training.loop.source import ShardedSource, StreamSource

# Workers that are threads of this process. One runs at a time, for the generators of random numbers belong to all.


class Table:
    """What the workers of one group exchange over."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.turn = threading.Lock()
        self.rounds: dict[int, dict[int, Tensor]] = {}


class Seat(World):
    """One of those workers."""

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__(Place())
        self.place = replace(self.place, rank=rank, size=table.size)
        self.table, self.round = table, 0

    def stack(self, tensor: Tensor) -> Tensor:
        table, self.round = self.table, self.round + 1
        rows = table.rounds.setdefault(self.round, {})
        rows[self.rank] = tensor.clone()
        table.turn.release()
        try:
            table.barrier.wait()
        finally:
            table.turn.acquire()
        return torch.stack([rows[rank] for rank in range(self.size)])

    def all_reduce(self, tensor: Tensor, *_: Any) -> Tensor:
        return tensor.copy_(self.stack(tensor).sum(0))


def together(size: int, work: Callable[[World], Any]) -> list[Any]:
    """What `work` gives to each of `size` workers, by rank."""
    table = Table(size)

    def one(rank: int) -> Any:
        with table.turn:
            try:
                return work(Seat(table, rank))
            except BaseException:
                table.barrier.abort()
                raise

    with ThreadPoolExecutor(size) as threads:
        under_way = [threads.submit(one, rank) for rank in range(size)]
    errors = [error for each in under_way if (error := each.exception())]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [each.result() for each in under_way]


class Uneven(IterableDataset[Tensor]):
    """So many numbers, dealt to shards by a lottery and read with noise on them."""

    def __init__(self, count: int, lottery: int = 0) -> None:
        self.lottery, self.items = lottery, list(range(count))

    def shard(self, index: int, count: int) -> Uneven:
        found, drawn = copy.copy(self), random.Random(self.lottery)
        found.items = [item for item in self.items if drawn.randrange(count) == index]
        return found

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([item + 0.5 * random.random()]) for item in self.items)


class Knowing(Uneven):
    """The same, and each shard knows where it is."""

    at = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < len(self.items):
            self.at += 1
            READ.append(self.items[self.at - 1])
            yield torch.tensor([self.items[self.at - 1] + 0.5 * random.random()])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "of": self.items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["of"] == self.items, "this is the state of another shard"
        self.at = state["at"]


READ: list[int] = []
"""What was read of any `Knowing`, in order."""


@dataclass
class Run:
    """A run on workers that change."""

    dataset: IterableDataset[Tensor]
    batch: int
    drop_last: bool = False
    micro_batch: int | None = None
    level: bool = False
    virtual: int | None = None
    processes: int = 0
    position: Position = field(default_factory=Position)
    streams: Sequence[Mapping[str, Any]] = ({},)
    """By rank."""
    before: Sequence[Mapping[str, Any]] = ({},)
    """The same, before the last step."""

    def source(self, world: World) -> ShardedSource:
        parts = self.virtual or world.size
        cut = Cut(parts, *bounds(parts, world.size, world.rank), self.micro_batch, self.level)
        stream = Stream(
            self.dataset,
            batch=self.batch,
            seed=3,
            name="train",
            drop_last=self.drop_last,
            processes=self.processes,
        )
        return ShardedSource(stream, cut, world)

    def go(self, size: int, steps: int | None = None) -> list[list[Step]]:
        """So many steps of `size` workers, or those to the end of the epoch: of each step, the shares of all."""

        def read(world: World) -> list[Step]:
            found = []
            for step in self.source(world).steps(self.position, self.streams[world.rank]):
                found.append(step)
                if len(found) == steps or (steps is None and step.ends_epoch):
                    break
            return found

        by_rank = together(size, read)
        self.before = [own[-2].stream if len(own) > 1 else self.streams[rank] for rank, own in enumerate(by_rank)]
        self.streams = [own[-1].stream for own in by_rank]
        self.position = by_rank[0][-1].after
        return [list(each) for each in zip(*by_rank, strict=True)]

    def resume(self, size: int, *, lost: Sequence[int] = ()) -> None:
        """Be `size` workers that continue from a snapshot, in which those `lost` kept no states."""
        kept = [{**own, "states": {}} if own and rank in lost else own for rank, own in enumerate(self.streams)]
        self.streams = together(size, lambda world: self.source(world).of_snapshot(kept, world.rank, self.position))

    def survive(self, stay: Sequence[int], size: int, *, behind: int | None = None) -> None:
        """Be `size` workers, of which the first are those that `stay`. One may be `behind` by a step."""
        ahead = self.streams[next(rank for rank in stay if rank != behind)]

        def meet(world: World) -> Mapping[str, Any]:
            old = stay[world.rank] if world.rank < len(stay) else None
            if old is None:
                return self.source(world).met(ahead, {})
            if old == behind:
                return self.source(world).met(ahead, self.before[old])
            return self.source(world).met(self.streams[old], self.streams[old])

        self.streams = together(size, meet)


def batch_of(shares: Sequence[Step]) -> tuple[int, int, list[float]]:
    """Epoch, shards and samples of a step, of which every worker gives its share."""
    [(epoch, shards, samples)] = {(step.epoch, step.shards, step.samples) for step in shares}
    pieces = [piece for step in shares for piece in step.pieces if piece.plan.weight]
    assert sum(piece.plan.weight for piece in pieces) == pytest.approx(1)
    numbers = np.concatenate([piece.plan.indices for piece in pieces])
    assert all(sorted(numbers) == sorted(step.taken) for step in shares), "every worker can name all samples"
    assert len(set(numbers)) == samples
    return epoch, shards, sorted(value for piece in pieces for value in piece.batch.flatten().tolist())


def undisturbed(run: Run, epoch: int, shards: int) -> list[list[float]]:
    """The batches of one epoch, read by as many workers as there are shards."""
    alone = replace(run, position=Position(epoch), streams=[{}] * shards, virtual=None)
    return [batch_of(shares)[2] for shares in alone.go(shards)]


@dataclass(frozen=True)
class Change:
    """After so many steps there are `workers`, and some know less than before."""

    steps: int
    workers: int
    snapshot: bool
    unlucky: int
    """Who is lost, or behind."""


@contextmanager
def dropped_all() -> Iterator[None]:
    """Where no shard has as much as its part of one batch, there is no step at all."""
    try:
        yield
    except DataError as error:
        if "gave no sample" not in str(error):
            raise


changes = st.builds(Change, st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 3))


@settings(max_examples=40)
@given(
    count=st.integers(1, 70),
    lottery=st.integers(0, 9),
    kind=st.sampled_from([Uneven, Knowing]),
    batch=st.integers(1, 9),
    drop_last=st.booleans(),
    micro_batch=st.sampled_from([None, 2]),
    level=st.booleans(),
    virtual=st.sampled_from([None, None, 4]),
    story=st.lists(changes, max_size=4),
    workers=st.integers(1, 4),
)
def test_every_sample_is_read_once_and_in_the_same_batch_whoever_reads(
    count: int,
    lottery: int,
    kind: type[Uneven],
    batch: int,
    drop_last: bool,
    micro_batch: int | None,
    level: bool,
    virtual: int | None,
    story: list[Change],
    workers: int,
) -> None:
    run = Run(kind(count, lottery), batch, drop_last, micro_batch, level, virtual, streams=[{}] * workers)
    batches: list[tuple[int, int, list[float]]] = []
    began = [min(virtual or workers, batch)]

    def go(steps: int | None = None) -> None:
        for shares in run.go(workers, steps):
            batches.append(batch_of(shares))
            assert not level or virtual or len({len(step.pieces) for step in shares}) == 1
            if shares[0].ends_epoch:
                began.append(min(virtual or workers, batch))

    with dropped_all() if drop_last else nullcontext():
        for change in story:
            go(change.steps)
            unlucky = change.unlucky % workers
            if change.snapshot:
                run.resume(change.workers, lost=[unlucky])
            elif change.unlucky == 3 or workers == 1:
                run.survive(range(min(workers, change.workers)), change.workers, behind=None)
            else:
                stay = [rank for rank in range(workers) if rank != unlucky][: change.workers]
                run.survive(stay, change.workers, behind=stay[-1] if len(stay) > 1 else None)
            if workers != change.workers and not run.position.sample:
                began[-1] = min(virtual or change.workers, batch)
            workers = change.workers
        go()
    complete = run.position.epoch if batches else 0
    for epoch in range(complete):
        found = [(shards, values) for each, shards, values in batches if each == epoch]
        assert {shards for shards, _ in found} == {began[epoch]}
        assert [values for _, values in found] == undisturbed(run, epoch, began[epoch])
        items = sorted(int(value) for _, values in found for value in values)
        assert items == list(range(count)) if not drop_last else len(set(items)) == len(items)


def test_what_shards_know_of_themselves_is_found_by_whoever_reads_them_next() -> None:
    """4 workers change places, or 2 others take a snapshot up: nothing is read again but what was ahead."""
    for way in ("snapshot", "survivors"):
        run = Run(Knowing(200), 16, streams=[{}] * 4)
        run.go(4, 5)
        if way == "snapshot":
            run.resume(2)
        else:
            run.survive([3, 2, 1, 0], 4)
        READ.clear()
        run.go(len(run.streams), 1)
        assert len(READ) == 2 * 16, "a step and the look ahead, not the 80 before"


def test_shard_whose_state_is_lost_is_read_again_and_no_other() -> None:
    run = Run(Knowing(200), 16, streams=[{}] * 4)
    run.go(4, 5)
    run.survive([0, 1, 3], 4)
    READ.clear()
    run.go(4, 1)
    assert len(READ) == 2 * 16 + 20
    assert set(READ[:24]).isdisjoint(READ[24:])


def test_worker_that_was_behind_reads_on_from_what_it_knew_itself() -> None:
    run = Run(Knowing(200), 16, streams=[{}] * 4)
    run.go(4, 5)
    run.survive([0, 1, 2, 3], 4, behind=1)
    READ.clear()
    run.go(4, 1)
    assert len(READ) == 2 * 16 + 4, "the step that it had not done, too"


def test_no_two_samples_of_an_epoch_draw_the_same_random_numbers() -> None:
    run = Run(Uneven(40), 8, streams=[{}] * 4)
    noise = [value % 1 for shares in run.go(4) for value in batch_of(shares)[2]]
    assert len({round(each, 4) for each in noise}) == 40


def test_loader_processes_read_the_same() -> None:
    run = Run(Uneven(50), 6, streams=[{}] * 2)
    run.go(2, 4)
    run.resume(1)
    ahead = replace(run, processes=1)
    assert [batch_of(shares) for shares in ahead.go(1)] == [batch_of(shares) for shares in run.go(1)]


def test_epochs_that_begin_later_have_as_many_shards_as_there_are_workers_then() -> None:
    run = Run(Uneven(40), 8, streams=[{}] * 4)
    run.go(4, 1)
    run.resume(2)
    assert [shares[0].shards for shares in run.go(2)][-1] == 4
    assert run.go(2, 1)[0][0].shards == 2


def test_stream_that_was_read_whole_goes_on_in_shards_with_the_next_epoch() -> None:
    run = Run(Uneven(40), 8, position=Position(0, 16), streams=[{"read": 16}])
    run.streams = together(2, lambda world: run.source(world).of_snapshot([{"read": 16}] * 3, world.rank, run.position))
    items = [int(value) for shares in run.go(2) for value in batch_of(shares)[2]]
    assert items == list(range(16, 40))
    assert run.go(2, 1)[0][0].shards == 2


def test_snapshot_in_which_each_worker_kept_its_own_place_alone_is_read() -> None:
    whole = Run(Knowing(90), 9, streams=[{}] * 3)
    whole.go(3, 9)
    old = []
    for rank, stream in enumerate(whole.streams):
        place = {"read": stream["read"][rank], "dataset": stream["states"].get(str(rank), {}).get("dataset")}
        old.append({**(place if stream["left"][rank] else {}), "shards": 3, "exhausted": not stream["left"][rank]})
    assert any(own["exhausted"] for own in old), "one shard is over"
    assert not all(own["exhausted"] for own in old)
    again = replace(whole)
    again.streams = together(2, lambda world: again.source(world).of_snapshot(old, world.rank, again.position))
    whole.resume(2)
    assert [batch_of(step) for step in again.go(2)] == [batch_of(step) for step in whole.go(2)]


def test_epoch_that_was_begun_in_shards_cannot_go_on_without_them() -> None:
    run = Run(Uneven(40), 8, streams=[{}] * 2)
    run.go(2, 2)
    whole = StreamSource(Stream(Uneven(40), batch=8, seed=3, name="train"), Cuts(Cut(1, 0, 1, None)))
    with pytest.raises(DataError, match="read a part of its stream in shards, and now there are none"):
        whole.of_snapshot(run.streams, 0, run.position)


def test_small_batch_in_an_epoch_of_many_shards_is_an_error() -> None:
    run = Run(Uneven(40), 8, streams=[{}] * 4)
    run.go(4, 2)
    run.resume(2)
    run.batch = 3
    with pytest.raises(DataError, match="4 shards, which cannot all have a part of a batch of 3"):
        run.go(2, 1)


class Itself(Uneven):
    def shard(self, index: int, count: int) -> Uneven:
        return self


def test_shards_that_are_one_and_the_same_dataset_are_an_error() -> None:
    run = Run(Uneven(40), 8, streams=[{}] * 2)
    run.go(2, 2)
    run.resume(1)
    run.dataset = Itself(40)
    with pytest.raises(DataError, match="gave the same dataset again"):
        run.go(1, 1)


class Shrinking(Uneven):
    def __iter__(self) -> Iterator[Tensor]:
        del self.items[len(self.items) // 4 :]
        return super().__iter__()


def test_shard_that_ends_before_the_place_where_it_was_left_is_an_error() -> None:
    run = Run(Uneven(40), 8, streams=[{}] * 2)
    run.go(2, 3)
    run.dataset = Shrinking(40)
    with pytest.raises(DataError, match="there were more"):
        run.go(2, 1)


class Astray(Knowing):
    """Goes where its state does not lead to."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"] + 1


class Reordered(Uneven):
    """Another order each time that it is made."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.items.reverse()


@pytest.mark.parametrize("other", [Astray(80), Reordered(80)], ids=["load_state_dict", "__iter__"])
@pytest.mark.parametrize("way", ["snapshot", "other number", "survivors", "loader process"])
def test_shard_that_goes_on_elsewhere_is_said_by_all_once(other: Uneven, way: str) -> None:
    run = Run(Knowing(80) if isinstance(other, Astray) else Uneven(80), 8, streams=[{}] * 2)
    run.go(2, 3)
    if way == "survivors":
        run.survive([0, 1], 3)
    elif way != "snapshot":
        run.resume(3 if way == "other number" else 1)
    run.dataset, run.processes = other, int(way == "loader process")
    first, second = run.go(len(run.streams), 2)
    [said] = {step.said for step in first}
    assert (
        "shard 0 of 2 of the train stream does not continue where it was (nor does 1 other): after 12 samples" in said
    )
    assert [step.said for step in second] == [""] * len(second)


@pytest.mark.parametrize("kind", [Uneven, Knowing])
def test_shard_that_goes_on_where_it_was_needs_no_word(kind: type[Uneven]) -> None:
    """Also from what was known of it before the last step, by a snapshot of before, or where it was read whole."""
    run = Run(kind(200), 16, streams=[{}] * 4)
    run.go(4, 5)
    said = []
    for size in (2, 4, 3):
        run.resume(size)
        said += [step.said for step in run.go(size, 1)[0]]
    run.survive([0, 1, 2], 3, behind=1)
    said += [step.said for step in run.go(3, 1)[0]]
    before = [
        {**own, "states": {key: without_next(each) for key, each in own["states"].items()}} for own in run.streams
    ]
    run.streams = before
    run.resume(2)
    said += [step.said for step in run.go(2, 1)[0]]
    whole = Stream(kind(40), batch=8, seed=3, name="train")
    first = next(whole.steps(Cuts(Cut(1, 0, 1, None)), Position(), {}))
    run = Run(kind(40), 8, position=first.after, streams=[first.stream])
    run.resume(2)
    said += [step.said for step in run.go(2, 1)[0]]
    assert set(said) == {""}


def without_next(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "next"}


def test_state_that_is_ahead_of_where_all_go_on_is_of_no_use() -> None:
    states = [{"0": {"read": read, "dataset": read}} for read in (4, 7, 8)]
    assert ShardProgress([7, 7], [True, True]).knowing(states).states == states[1]
    assert ShardProgress([3, 7], [True, True]).knowing(states).states == {}


def test_samples_of_a_bad_step_are_named_by_shard_and_place() -> None:
    assert named(np.array([0, 3, 6, 4, 7]), 3) == "samples [0, 1, 2] of shard 0, [1, 2] of shard 1, of 3 shards"
    assert named(np.array([0, 2, 4, 1]), 2, most=3) == "samples [0, 1, 2] of shard 0, …, of 2 shards"
    assert named(np.array([5, 6]), 0) == named(np.array([5, 6]), 1) == "samples [5, 6]"
