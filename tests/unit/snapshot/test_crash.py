"""A power cut or a full disk at every single call that a snapshot makes: what was whole before stays whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from disks import CountingDisk, CutDisk, FullDisk, Loses, PowerCut

from manyhosts.errors import SnapshotError
from manyhosts.events import SnapshotSaved, SnapshotSkipped
from manyhosts.records.manifest import found_in
from manyhosts.snapshot.disk import Disk
from manyhosts.snapshot.load import load
from manyhosts.snapshot.store import Facts, Store

Save = Callable[[Path, Disk, int], Store]


def save_step(run: Path, disk: Disk, step: int) -> Store:
    store = Store(run / "snapshots", keep=2, disk=disk)
    store.save({"weight": torch.full((5,), float(step))}, facts(step), own={"mine": step})
    return store


def save_best(run: Path, disk: Disk, step: int) -> Store:
    store = Store(run / "snapshots", keep=2, disk=disk)
    store.save_as(run / "best", {"weight": torch.full((5,), float(step))}, facts(step))
    return store


def facts(step: int) -> Facts:
    return Facts(step=step, epoch=0, position={}, strategy="single", model={})


def newest_step(run: Path) -> int:
    loaded = Store(run / "snapshots", keep=2).latest()
    assert loaded is not None
    assert (loaded.state["weight"] == loaded.facts.step).all()
    return loaded.facts.step


def best_step(run: Path) -> int:
    """Of the first that is whole: a crash while it is replaced may leave two."""
    for path in (run / "best.new", run / "best", run / "best.old"):
        try:
            loaded = load(path)
        except SnapshotError:
            continue
        assert (loaded.state["weight"] == loaded.facts.step).all()
        return loaded.facts.step
    raise AssertionError("no best that is whole")


def whole_steps(run: Path) -> list[int]:
    found = []
    for one in found_in(run / "snapshots"):
        try:
            load(one.path)
        except SnapshotError:
            continue
        if one.how != "half":
            found.append(one.step)
    return found


def calls_of_a_save(run: Path, save: Save, before: int) -> int:
    """How many calls the disk sees for one snapshot when there are `before` already."""
    disk = CutDisk(run / "grave", None)
    prepare(run, save, before)
    save(run, disk, before + 1).wait()
    return disk.calls


def prepare(run: Path, save: Save, count: int) -> None:
    run.mkdir()
    for step in range(1, count + 1):
        save(run, Disk(), step).wait()


@pytest.mark.parametrize("loses", get_args(Loses))
def test_power_cut_at_any_call_leaves_the_earlier_snapshots_whole(tmp_path: Path, loses: Loses) -> None:
    calls = calls_of_a_save(tmp_path / "count", save_step, before=2)
    assert calls > 30
    for cut_at in range(1, calls + 1):
        run = tmp_path / f"cut-{cut_at}"
        prepare(run, save_step, 2)
        disk = CutDisk(run / "grave", cut_at, loses=loses)
        with pytest.raises(PowerCut):
            save_step(run, disk, 3).wait()
        whole = whole_steps(run)
        assert whole[:1] == [newest_step(run)], disk.log[-1]
        assert set(whole) >= ({2, 3} if whole[0] == 3 else {1, 2}), disk.log[-1]
        if loses == "nothing":  # what was removed half-way does not pass for a whole one, not even for a damaged one
            assert len(whole) == len([found for found in found_in(run / "snapshots") if found.how != "half"])

        store = save_step(run, Disk(), 4)
        store.wait()
        assert newest_step(run) == 4
        assert not [found for found in found_in(run / "snapshots") if found.how], disk.log[-1]


@pytest.mark.parametrize("save", [save_step, save_best], ids=["step", "best"])
def test_what_was_told_as_saved_outlives_a_power_cut(tmp_path: Path, save: Save) -> None:
    prepare(tmp_path / "run", save, 1)
    disk = CutDisk(tmp_path / "grave", None, loses="names and removals")
    save(tmp_path / "run", disk, 2).wait()
    disk.lose()
    assert (newest_step if save is save_step else best_step)(tmp_path / "run") == 2


@pytest.mark.parametrize("loses", get_args(Loses))
@pytest.mark.parametrize("save", [save_step, save_best], ids=["step", "best"])
def test_power_cut_while_one_replaces_another_leaves_a_whole_one(tmp_path: Path, save: Save, loses: Loses) -> None:
    def again(run: Path, disk: Disk, step: int) -> Store:
        """A second snapshot of step 1, or another best."""
        return save(run, disk, step if save is save_best else 1)

    step_of = best_step if save is save_best else newest_step
    nameless = 0
    calls = calls_of_a_save(tmp_path / "count", again, before=1)
    for cut_at in range(1, calls + 1):
        run = tmp_path / f"cut-{cut_at}"
        prepare(run, again, 1)
        disk = CutDisk(run / "grave", cut_at, loses=loses)
        with pytest.raises(PowerCut):
            again(run, disk, 2).wait()
        survivor = step_of(run)
        assert survivor in (1, 2), disk.log[-1]
        nameless += not (run / "best" if save is save_best else run / "snapshots" / "step-00000001").exists()
        second = CutDisk(run / "grave-2", 9, loses=loses)  # and once more, early in the next try
        with pytest.raises(PowerCut):
            again(run, second, 3).wait()
        assert step_of(run) >= survivor, disk.log[-1]
        again(run, Disk(), 4).wait()
        assert step_of(run) == (4 if save is save_best else 1)
        where = run if save is save_best else run / "snapshots"
        assert not [found for found in found_in(where) if found.how], disk.log[-1]
    if loses == "nothing":
        assert nameless == 1  # between two renames: whoever looks for the name alone finds it at all other times


def test_power_cut_at_any_call_of_a_second_replacement_leaves_a_whole_one(tmp_path: Path) -> None:
    """The first replacement was cut between its renames; the second is cut anywhere."""
    counting = CutDisk(tmp_path / "grave", None)
    prepare(tmp_path / "count", save_best, 1)
    save_best(tmp_path / "count", counting, 2).wait()
    renames = [place for place, call in enumerate(counting.log, start=1) if call.startswith("rename best")]
    for first_cut in [place + 1 for place in renames]:
        for second_cut in range(1, counting.calls + 8):
            run = tmp_path / f"cut-{first_cut}-{second_cut}"
            prepare(run, save_best, 1)
            with pytest.raises(PowerCut):
                save_best(run, CutDisk(run / "grave", first_cut), 2).wait()
            survivor = best_step(run)
            try:
                save_best(run, CutDisk(run / "grave-2", second_cut), 3).wait()
            except PowerCut:
                assert best_step(run) >= survivor
            else:
                assert best_step(run) == 3


def test_full_disk_at_any_call_costs_one_snapshot_and_nothing_else(tmp_path: Path) -> None:
    counting = FullDisk(None)
    prepare(tmp_path / "count", save_step, 2)
    save_step(tmp_path / "count", counting, 3).wait()
    outcomes = set()
    for full_from in range(1, counting.calls + 1):
        run = tmp_path / f"full-{full_from}"
        prepare(run, save_step, 2)
        disk = FullDisk(full_from)
        store = save_step(run, disk, 3)
        store.wait()
        [event] = store.finished()
        outcomes.add(type(event))
        if isinstance(event, SnapshotSkipped):
            assert event.reason.startswith("No space left on device: "), disk.log
            assert (event.step, event.path.name) == (3, "step-00000003")
        assert set(whole_steps(run)) >= {2}, disk.log
        assert newest_step(run) >= 2
        assert not [found for found in found_in(run / "snapshots") if found.how == "half"], disk.log

        disk.full_from = None  # somebody makes room
        store.save({"weight": torch.full((5,), 4.0)}, facts(4))
        store.wait()
        assert [type(event) for event in store.finished()] == [SnapshotSaved]
        assert newest_step(run) == 4
    assert outcomes == {SnapshotSaved, SnapshotSkipped}  # what only fails to clear away older ones is no failure


def test_disk_that_cannot_be_written_at_all_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "snapshots").write_text("a file where the folder should be")
    store = save_step(tmp_path, Disk(), 1)
    store.wait()
    [event] = store.finished()
    assert isinstance(event, SnapshotSkipped)
    assert event.reason.startswith(("File exists: ", "Not a directory: "))


def test_counting_disk_sees_every_way_to_the_disk(tmp_path: Path) -> None:
    """The tests above are as good as this: nothing is renamed, written or removed past the seam."""
    disk = CountingDisk()
    prepare(tmp_path / "run", save_step, 2)
    save_step(tmp_path / "run", disk, 3).wait()
    kinds = {call.rpartition(" ")[0] for call in disk.log}
    assert kinds == {"make", "create", "write", "sync", "sync folder", "rename", "remove", "remove folder"}
    assert sum(call.startswith("create ") for call in disk.log) == sum(
        call.startswith("sync ") and not call.startswith("sync folder") for call in disk.log
    )
