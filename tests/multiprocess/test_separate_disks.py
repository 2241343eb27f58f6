"""Hosts that share no disk keep snapshots all the same: two of them each one whole, so that any one may be lost."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import Recipe, make_trainer, step_lines
from safetensors.torch import load_file

import manyhosts as mh
from manyhosts.cluster.place import Place
from manyhosts.communication import transfer
from manyhosts.communication.world import World
from manyhosts.records import run_directory
from manyhosts.records.manifest import Facts
from manyhosts.snapshot import writing
from manyhosts.snapshot.store import Store

pytestmark = pytest.mark.multiprocess
STATE = {"weights": torch.arange(6.0), "plain": {"step": 3}}


def facts(step: int) -> Facts:
    return Facts(step=step, epoch=0, position={}, strategy="single", model={})


def store_of(rank: int, folder: Path, per_host: int = 1) -> Store:
    place = replace(Place.from_environment(), node_rank=rank // per_host, local_rank=rank % per_host)
    return Store(folder / f"disk{rank // per_host}", keep=5, world=World(place), separate_disks=True)


def save(rank: int, folder: Path, steps: list[int], per_host: int) -> list[str]:
    store = store_of(rank, folder, per_host)
    for step in steps:
        state = {"weights": STATE["weights"] + step, "plain": {"step": step}}
        store.save(state, facts(step), own={"number": 10 + rank, "noise": torch.full((rank + 1,), float(rank))})
        store.wait()
    store._world.barrier()
    return sorted(path.name for path in (folder / f"disk{rank // per_host}").rglob("*"))


def load(rank: int, folder: Path, per_host: int) -> dict[str, Any]:
    store = store_of(rank, folder, per_host)
    loaded = store.latest()
    store._world.barrier()
    again = Store(folder / f"disk{rank // per_host}", keep=2).latest()
    assert loaded is not None
    return {
        "step": loaded.state["plain"]["step"],
        "first weight": loaded.state["weights"][0].item(),
        "owns": [(own["number"], own["noise"].tolist()) for own in loaded.owns],
        "whole alone": again is not None and again.state["plain"] == loaded.state["plain"],
    }


def flip_a_bit(folder: Path) -> None:
    [path] = folder.rglob("step-00000004/tensors-*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_two_hosts_keep_all_and_the_others_nothing(tmp_path: Path) -> None:
    written = run_ranks(4, save, tmp_path, [3], 1)
    assert "tensors-00000-of-00001.safetensors" in written[0]
    assert written[1] == written[0]
    assert written[2] == written[3] == []


OWN_BYTES = 1 << 20


def save_much(rank: int, folder: Path) -> tuple[int, bool]:
    """What this worker sends for a snapshot, in bytes, and whether what all workers keep is written as it was."""
    store = store_of(rank, folder)
    world, own = store._world, {"residual": torch.full((OWN_BYTES // 4,), float(rank))}
    before = world.bytes_sent
    store.save(STATE, facts(3), own=own if rank != 1 else None)
    store.wait()
    sent = world.bytes_sent - before
    world.barrier()
    if rank > 1:
        return sent, not (folder / f"disk{rank}").exists()
    owns = {each.stem: load_file(each)["residual"] for each in (folder / f"disk{rank}").rglob("own-*.safetensors")}
    kept = {f"own-{each:05d}": torch.full((OWN_BYTES // 4,), float(each)) for each in (0, 2, 3)}
    return sent, owns.keys() == kept.keys() and all(torch.equal(owns[name], kept[name]) for name in kept)


def test_what_a_worker_keeps_for_itself_is_sent_to_the_two_that_write_it(tmp_path: Path) -> None:
    found = run_ranks(4, save_much, tmp_path)
    assert all(is_right for _, is_right in found)
    in_own_bytes = [round(sent / OWN_BYTES, 1) for sent, _ in found]
    assert in_own_bytes == [1, 0, 2, 2], "rank 1 has nothing of its own"


def save_while_one_sends_nothing(rank: int, folder: Path) -> tuple[bool, list[str]]:
    """Whether a snapshot is still under way when all have continued, and what was written in the end."""
    goes_on, give = threading.Event(), transfer.give

    def give_late(*values: Any) -> None:
        assert goes_on.wait(30), "training waits for what is sent"
        give(*values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "give", give_late)
        store = store_of(rank, folder)
        store.save(STATE, facts(3), own={"number": 10 + rank})
        is_under_way = store.under_way is not None
        goes_on.set()
        store.wait()
    store._world.barrier()
    return is_under_way, sorted(path.name for path in (folder / f"disk{rank}").rglob("own-*"))


def test_training_goes_on_while_what_each_worker_keeps_is_on_its_way(tmp_path: Path) -> None:
    found = run_ranks(3, save_while_one_sends_nothing, tmp_path)
    assert [is_under_way for is_under_way, _ in found] == [True] * 3
    assert (
        found[0][1]
        == found[1][1]
        == [f"own-{rank:05d}.{kind}" for rank in range(3) for kind in ("json", "safetensors")]
    )


def save_while_one_is_lost(rank: int, folder: Path) -> list[tuple[str, str]]:
    """What became of a snapshot whose exchange worker 2 does not live to see."""
    store = store_of(rank, folder)

    def be_lost(*_: Any) -> None:
        store._world.abort()
        raise RuntimeError("gone")

    store._side_group()
    store._world.barrier()  # the connections are made everywhere, and then one is lost
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(writing, "send_own", be_lost)
        store.save(STATE, facts(3), own={"number": 10 + rank})
        store.wait()
    assert not [path for path in (folder / f"disk{rank}").rglob("*") if path.is_file()], "nothing half written stays"
    return [(type(news).__name__, getattr(news, "reason", "")) for news in store.finished()]


def test_snapshot_is_skipped_where_a_worker_is_lost_while_it_is_sent(tmp_path: Path) -> None:
    found = run_ranks(3, save_while_one_is_lost, tmp_path)
    assert found == [[("SnapshotSkipped", "the workers changed while it was being written")]] * 3


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_any_one_host_may_be_lost_and_their_number_may_change(lost: int, tmp_path: Path) -> None:
    run_ranks(3, save, tmp_path, [3, 4], 1)
    shutil.rmtree(tmp_path / f"disk{lost}", ignore_errors=True)  # the third has nothing
    for workers, per_host in ((2, 1), (4, 2)):
        for found in run_ranks(workers, load, tmp_path, per_host):
            assert (found["step"], found["first weight"]) == (4, 4.0)
            assert found["owns"] == [(10, [0.0]), (11, [1.0, 1.0]), (12, [2.0, 2.0, 2.0])]
            assert found["whole alone"], "each host has it now"


def test_copy_that_is_damaged_is_passed_over_for_the_other_one(tmp_path: Path) -> None:
    run_ranks(2, save, tmp_path, [3, 4], 1)
    flip_a_bit(tmp_path / "disk0")
    assert [found["step"] for found in run_ranks(2, load, tmp_path, 1)] == [4, 4]
    flip_a_bit(tmp_path / "disk0")
    flip_a_bit(tmp_path / "disk1")
    assert [found["step"] for found in run_ranks(2, load, tmp_path, 1)] == [3, 3]


def train(rank: int, folder: Path, steps: int, snapshots: mh.Snapshots | None = None) -> tuple[str, dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(run_directory.SEPARATE_DISKS, "1")
        patch.setenv("GROUP_RANK", str(rank))
        patch.setenv("LOCAL_RANK", "0")
        trainer = make_trainer(RECIPE, folder / f"disk{rank}", **({"snapshots": snapshots} if snapshots else {}))
        result = trainer.fit(f"{steps} steps")
        trainer.data.test = trainer.data.validation
        return result.weights_sha256, trainer.test()


RECIPE = Recipe(samples=150, batch=16, dropout=0.3, trainer={"snapshots": mh.Snapshots(every="5 steps")})


@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "behind"])
def test_run_whose_leader_has_another_disk_goes_on_with_its_records(is_empty: bool, tmp_path: Path) -> None:
    whole = run_ranks(2, train, tmp_path / "whole", 24)
    disk = tmp_path / "lost" / "disk0"
    if not is_empty:
        run_ranks(2, train, tmp_path / "lost", 6)
        shutil.copytree(disk, tmp_path / "before")
    run_ranks(2, train, tmp_path / "lost", 12)
    shutil.rmtree(disk)
    if not is_empty:
        shutil.copytree(tmp_path / "before", disk)  # it was away while the others continued
    lost = run_ranks(2, train, tmp_path / "lost", 24)
    assert lost == whole
    assert lost[0][1] == lost[1][1], "both test the best model, which the leader has found"
    for disk in ("disk0", "disk1"):
        assert [line["step"] for line in step_lines(tmp_path / "lost" / disk)] == list(range(1, 25))


def test_hosts_that_all_lost_their_disks_go_on_from_a_second_place(tmp_path: Path) -> None:
    snapshots = mh.Snapshots(every="5 steps", to=str(tmp_path / "second"))
    whole = run_ranks(2, train, tmp_path / "whole", 24)
    run_ranks(2, train, tmp_path / "lost", 12, snapshots)
    shutil.rmtree(tmp_path / "lost")
    lost = run_ranks(2, train, tmp_path / "lost", 24, snapshots)
    assert lost == whole
    for disk in ("disk0", "disk1"):
        assert [line["step"] for line in step_lines(tmp_path / "lost" / disk)] == list(range(1, 25))
