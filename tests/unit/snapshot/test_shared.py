"""Several workers that write one snapshot together; here threads of one process stand for the workers."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import CountingDisk, FullDisk
from hypothesis import example, given
from hypothesis import strategies as st

from manyhosts.communication.parts import TensorPart
from manyhosts.errors import SnapshotError
from manyhosts.events import SnapshotSaved, SnapshotSkipped
from manyhosts.records.manifest import found_in
from manyhosts.records.tensor_parts import Box, flaw
from manyhosts.snapshot.commit import Part, hear, report_part
from manyhosts.snapshot.disk import Disk
from manyhosts.snapshot.load import everything_fits, newest
from manyhosts.snapshot.store import Facts, Store
from manyhosts.snapshot.writing import share_out


class WorkerGroup:
    """Workers on threads that can agree as those of a real `World` do."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.words: dict[int, Any] = {}

    def exchange(self, rank: int, word: Any) -> dict[int, Any]:
        self.words[rank] = word
        self.barrier.wait()
        heard = dict(self.words)
        self.barrier.wait()
        return heard

    def run(self, work: Callable[[Worker], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(work, [Worker(self, rank) for rank in range(self.size)]))


class Worker:
    """One of a worker group: what the store asks of a world."""

    def __init__(self, worker_group: WorkerGroup, rank: int) -> None:
        self.worker_group, self.rank, self.size = worker_group, rank, worker_group.size
        self.is_rank_0, self.is_shared = rank == 0, True
        self.device = torch.device("cpu")

    def agree(self, value: float) -> float:
        return self.worker_group.exchange(self.rank, value)[0]

    def any(self, flag: bool) -> bool:
        return any(self.worker_group.exchange(self.rank, float(flag)).values())

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        heard = self.worker_group.exchange(self.rank, tensor)
        return [heard[rank] for rank in range(self.size)]


def state(step: int) -> dict[str, Any]:
    return {"step": step, "tensors": [torch.full((index,), float(step)) for index in range(1, 12)]}


def facts(step: int) -> Facts:
    return Facts(step=step, epoch=0, position={}, strategy="ddp", model={})


def come_to_the_save(world: Worker) -> None:
    """What a worker still does that dies before its thread has written anything."""
    world.any(False)
    world.agree(0)


def save(world: Any, folder: Path, step: int, disk: Disk | None = None, patience_s: float = 20) -> Store:
    store = Store(folder, keep=2, world=world, disk=disk, patience_s=patience_s)
    store.save(state(step), facts(step), own={"rank": world.rank, "residual": torch.full((2,), float(world.rank))})
    store.wait()
    return store


@pytest.mark.parametrize("writers", [1, 2, 3])
@pytest.mark.parametrize("readers", [1, 2, 4])
def test_what_some_workers_saved_another_number_reads(tmp_path: Path, writers: int, readers: int) -> None:
    stores = WorkerGroup(writers).run(lambda world: save(world, tmp_path, 5))
    assert [[type(event) for event in store.finished()] for store in stores] == [[SnapshotSaved], *[[]] * (writers - 1)]
    for loaded in WorkerGroup(readers).run(lambda world: Store(tmp_path, keep=2, world=world).latest()):
        assert loaded.facts == facts(5)
        assert loaded.manifest.world_size == writers
        assert loaded.state["step"] == 5
        assert all(torch.equal(one, two) for one, two in zip(loaded.state["tensors"], state(5)["tensors"], strict=True))
        assert [own["rank"] for own in loaded.owns] == list(range(writers))
        assert [own["residual"].tolist() for own in loaded.owns] == [[rank, rank] for rank in range(writers)]


def test_every_worker_writes_its_share_and_the_folder_holds_no_more(tmp_path: Path) -> None:
    WorkerGroup(2).run(lambda world: save(world, tmp_path, 5))
    assert sorted(path.name for path in (tmp_path / "step-00000005").iterdir()) == [
        "manifest.json",
        "own-00000.json",
        "own-00000.safetensors",
        "own-00001.json",
        "own-00001.safetensors",
        "state.json",
        "tensors-00000-of-00002.safetensors",
        "tensors-00001-of-00002.safetensors",
    ]


@example(shapes=[[2, 3], [3, 2]], workers=3, cut_above=1)
@given(
    shapes=st.lists(st.lists(st.integers(0, 30), max_size=2), max_size=30),
    workers=st.integers(1, 9),
    cut_above=st.sampled_from([1, 100, 1 << 20]),
)
def test_each_element_has_one_writer_and_no_worker_has_much_more_than_another(
    shapes: list[list[int]], workers: int, cut_above: int
) -> None:
    tensors = {str(index): torch.empty(shape, dtype=torch.uint8) for index, shape in enumerate(shapes)}
    shares = share_out(tensors, workers, cut_above=cut_above)
    for name, tensor in tensors.items():
        boxes = [share[name].box for share in shares if name in share]
        assert flaw(tuple(tensor.shape), boxes) == ""
        assert len(boxes) <= 1 or tensor.nbytes > cut_above
    parts = [part.local.nbytes for share in shares for part in share.values()]
    loads = [sum(part.local.nbytes for part in share.values()) for share in shares]
    assert max(loads) - min(loads) <= max(parts, default=0)


def test_tensor_larger_than_an_equal_share_is_cut_in_rows() -> None:
    tensors = {"large": torch.arange(90.0).reshape(30, 3), "small": torch.zeros(3)}
    first, second, third = share_out(tensors, 3, cut_above=8)
    assert [share["large"].box for share in (first, second, third)] == [
        Box((0, 0), (10, 3)),
        Box((10, 0), (10, 3)),
        Box((20, 0), (10, 3)),
    ]
    assert first["large"].local.data_ptr() == tensors["large"].data_ptr()
    assert [share["large"].is_all for share in share_out(tensors, 1, cut_above=8)] == [True]


def test_one_large_tensor_is_outweighed_by_many_small_ones() -> None:
    sizes = {"small-1": 1, "large": 10} | {f"small-{index}": 1 for index in range(2, 11)}
    tensors = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    assert [len(share) for share in share_out(tensors, 2)] == [1, 10]


def cut(worker: Worker, tensor: torch.Tensor) -> TensorPart:
    """What this worker holds of a tensor that is cut along its first dimension; of some nothing."""
    size = -(-tensor.shape[0] // worker.size)
    local = tensor[worker.rank * size : (worker.rank + 1) * size]
    return TensorPart(local, (worker.rank * size, *[0] * (tensor.dim() - 1)), tuple(tensor.shape))


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_what_each_worker_holds_a_part_of_is_saved_from_where_it_is(tmp_path: Path, writers: int) -> None:
    weights = {"wide": torch.arange(10.0).reshape(5, 2), "short": torch.arange(2.0), "alike": torch.ones(3)}

    def work(world: Any) -> Store:
        held = {name: cut(world, tensor) for name, tensor in weights.items() if name != "alike"}
        store = Store(tmp_path, keep=2, world=world)
        store.save({"model": {**held, "alike": weights["alike"]}}, facts(1))
        store.wait()
        return store

    [event] = WorkerGroup(writers).run(work)[0].finished()
    assert isinstance(event, SnapshotSaved)
    loaded = Store(tmp_path, keep=2).latest()
    assert loaded is not None
    assert all(torch.equal(loaded.state["model"][name], tensor) for name, tensor in weights.items())
    assert len(loaded.records["model.wide"].parts) == min(writers, -(-5 // -(-5 // writers)))


def test_tensor_that_outweighs_all_others_is_written_by_several_and_read_whole(tmp_path: Path) -> None:
    large = torch.arange(3 * (1 << 18), dtype=torch.float32).reshape(-1, 3)  # 3 MiB
    state = {"large": large, "turned": large.t(), "small": torch.ones(5)}

    def work(world: Any) -> Store:
        store = Store(tmp_path, keep=2, world=world)
        store.save(state, facts(1), unchanged_until_update=[large])
        store.before_update()
        store.wait()
        return store

    [event] = WorkerGroup(4).run(work)[0].finished()
    assert isinstance(event, SnapshotSaved)
    sizes = [path.stat().st_size for path in (tmp_path / "step-00000001").glob("tensors-*")]
    assert max(sizes) < large.nbytes
    for loaded in WorkerGroup(2).run(lambda world: Store(tmp_path, keep=2, world=world).latest()):
        assert all(torch.equal(loaded.state[name], tensor) for name, tensor in state.items())
        assert len(loaded.records["large"].parts) > 1


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (lambda rank: {"a": torch.zeros(2 + rank)}, "the workers do not hold the same state: a is "),
        (lambda rank: {f"of-{rank}": torch.zeros(2)}, "the workers do not hold the same state: of-"),
        (
            lambda rank: {"a": TensorPart(torch.zeros(1 + rank), (rank,), (4,))},
            "the workers do not hold all of the state: a is incomplete: 1 of its 4 elements are missing",
        ),
        (
            lambda rank: {"a": TensorPart(torch.zeros(3), (rank,), (4,))},
            "the workers do not hold all of the state: a is incomplete: parts of it overlap",
        ),
    ],
    ids=["other shapes", "other names", "a gap", "an overlap"],
)
def test_parts_that_are_not_just_the_state_make_no_snapshot(
    tmp_path: Path, mine: Callable[[int], dict[str, Any]], words: str
) -> None:
    def work(world: Any) -> Store:
        store = Store(tmp_path, keep=2, world=world)
        filled = {f"fill-{index}": torch.zeros(3) for index in range(3)}
        store.save({**filled, **mine(world.rank)}, facts(1))
        store.wait()
        return store

    [event] = WorkerGroup(2).run(work)[0].finished()
    assert isinstance(event, SnapshotSkipped)
    assert event.reason.startswith(words)
    assert found_in(tmp_path) == []


@pytest.mark.parametrize("sick", [0, 1, 2])
def test_full_disk_of_one_worker_is_told_by_the_leader_and_the_next_one_succeeds(tmp_path: Path, sick: int) -> None:
    WorkerGroup(3).run(lambda world: save(world, tmp_path, 1))
    disks = [FullDisk(4 if rank == sick else None) for rank in range(3)]
    stores = WorkerGroup(3).run(lambda world: save(world, tmp_path, 2, disks[world.rank]))
    [event] = stores[0].finished()
    assert isinstance(event, SnapshotSkipped)
    assert "No space left on device" in event.reason
    assert (f"worker {sick}" in event.reason) == (sick > 0)
    loaded = Store(tmp_path, keep=2).latest()
    assert loaded is not None
    assert loaded.facts.step == 1

    WorkerGroup(3).run(lambda world: save(world, tmp_path, 3))
    assert [found.path.name for found in found_in(tmp_path)] == ["step-00000003", "step-00000001"]


def test_worker_that_cannot_even_say_that_it_failed_holds_nobody_up(tmp_path: Path) -> None:
    class FullAtFirst(CountingDisk):
        def about_to(self, operation: str, path: Path | str) -> None:
            if "step-00000001." in str(path):
                time.sleep(0.1)  # so that the next save begins before this one has failed
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            super().about_to(operation, path)

    def work(world: Worker) -> Store:
        disk = FullAtFirst() if world.rank == 1 else Disk()
        store = Store(tmp_path, keep=2, world=world, disk=disk)  # patient for ten minutes
        store.save(state(1), facts(1))
        store.save(state(2), facts(2))
        store.wait()
        return store

    leader, sick = WorkerGroup(2).run(work)
    skipped, saved = leader.finished()
    assert skipped.reason == "another worker could not write its part, nor say why"
    assert (saved.step, type(saved)) == (2, SnapshotSaved)
    assert sick.finished()[0].reason.startswith("No space left on device: step-00000001.")


def test_worker_that_never_writes_is_named(tmp_path: Path) -> None:
    def work(world: Worker) -> Store:
        if world.rank == 1:
            come_to_the_save(world)
            return Store(tmp_path, keep=2)
        return save(world, tmp_path, 1, patience_s=0.1)

    leader, _ = WorkerGroup(2).run(work)
    [event] = leader.finished()
    assert isinstance(event, SnapshotSkipped)
    assert event.reason == "no part came from worker 1 in 0.1 s"
    assert list(tmp_path.iterdir()) == []


def test_snapshot_is_given_up_at_once_when_the_workers_change(tmp_path: Path) -> None:
    def work(world: Worker) -> Store | None:
        if world.rank == 1:
            come_to_the_save(world)
            return None
        store = Store(tmp_path, keep=2, world=world)  # patient for ten minutes
        store.save(state(1), facts(1))
        store.abandon()
        store.wait()
        return store

    leader, _ = WorkerGroup(2).run(work)
    [event] = leader.finished()
    assert isinstance(event, SnapshotSkipped)
    assert event.reason == "the workers changed while it was being written"


def test_parts_of_an_earlier_try_do_not_get_into_a_snapshot(tmp_path: Path) -> None:
    """A try that was cut short leaves a part record of the same step and rank behind."""
    stale = tmp_path / "step-00000001.0123456789ab.half"
    stale.mkdir()
    report_part(stale, 1, Part(), Disk())

    def work(world: Worker) -> Store:
        if world.rank == 1:
            come_to_the_save(world)
            return Store(tmp_path, keep=2)
        return save(world, tmp_path, 1, patience_s=0.1)

    [event] = WorkerGroup(2).run(work)[0].finished()
    assert isinstance(event, SnapshotSkipped)


def test_what_one_worker_cannot_read_none_of_them_takes(tmp_path: Path) -> None:
    """Hosts may see a shared folder at different moments, or have a bad disk each."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        for step in (1, 2):
            WorkerGroup(1).run(lambda world, folder=folder, step=step: save(world, folder, step))
    (folders[1] / "step-00000002" / "state.json").write_text("{}")
    one, two = WorkerGroup(2).run(lambda world: Store(folders[world.rank], keep=2, world=world).latest())
    assert (one.facts.step, two.facts.step) == (1, 1)
    assert two.skipped[0].reason.startswith("state.json has ")
    assert one.skipped[0].reason == f"{two.skipped[0].reason} (found by worker 1)"


@pytest.mark.parametrize("apart", [False, True])
def test_what_one_worker_alone_remembers_is_checked_once_on_each_disk(apart: bool, tmp_path: Path) -> None:
    """On one disk by the worker that takes it up; where hosts have disks of their own each looks at all of its own."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for step in (1, 2):
        WorkerGroup(2).run(lambda world, step=step: save(world, folders[0], step))
    shutil.copytree(folders[0], folders[1])
    path = folders[1] / "step-00000002" / "own-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    seen = folders if apart else [folders[1]] * 2

    def look(world: Any) -> Any:
        return newest(seen[world.rank], everything_fits, world, sharers=[world.rank] if apart else None)

    found = WorkerGroup(2).run(look)
    assert [loaded.facts.step for loaded in found] == [1, 1]
    [one], [two] = (loaded.skipped for loaded in found)
    assert "own-00000.safetensors is damaged" in one.reason
    assert "own-00000.safetensors is damaged" in two.reason


def test_no_worker_is_left_waiting_when_none_fits(tmp_path: Path) -> None:
    WorkerGroup(2).run(lambda world: save(world, tmp_path, 1))

    def work(world: Worker) -> str:
        with pytest.raises(SnapshotError) as caught:
            Store(tmp_path, keep=2, world=world).latest(lambda manifest: "it is of last year")
        return caught.value.what

    assert all("step-00000001: it is of last year" in what for what in WorkerGroup(2).run(work))


def test_failure_of_a_worker_is_heard_before_the_others_are_done(tmp_path: Path) -> None:
    report_part(tmp_path, 2, Part(failure="its disk caught fire"), Disk())
    with pytest.raises(SnapshotError, match="worker 2 could not write its part: its disk caught fire"):
        hear(tmp_path, range(3), patience_s=1e9, gave_up=str)


def test_full_disk_that_takes_only_an_empty_file_still_says_who_failed(tmp_path: Path) -> None:
    class NoRoomForBytes(CountingDisk):
        def write(self, file: Any, data: memoryview) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    report_part(tmp_path, 1, Part(failure="No space left on device"), NoRoomForBytes())
    with pytest.raises(SnapshotError, match="worker 1 could not write its part: No space left on device"):
        hear(tmp_path, [1], patience_s=60, gave_up=str)


def test_a_save_waits_for_the_one_before_it(tmp_path: Path) -> None:
    """Never two at once: the order of the calls to the disk shows it."""

    class SlowDisk(CountingDisk):
        def sync(self, file: Any) -> None:
            time.sleep(0.01)
            super().sync(file)

    disk = SlowDisk()
    store = Store(tmp_path, keep=9, disk=disk)
    for step in (1, 2, 3):
        store.save(state(step), facts(step))
    store.wait()
    made = [place for place, call in enumerate(disk.log) if call.startswith("make step-")]
    named = [place for place, call in enumerate(disk.log) if call.startswith("rename step-")]
    assert sorted(made + named) == [place for pair in zip(made, named, strict=True) for place in pair]
    assert [event.step for event in store.finished()] == [1, 2, 3]
