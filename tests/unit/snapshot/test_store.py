"""A folder of snapshots as the trainer uses it: saving beside training, continuing from the newest, keeping a few."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would, and it sets an environment variable that the test would seem to leave
from disks import CountingDisk, GatedDisk
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manyhosts.errors import SnapshotError
from manyhosts.events import SnapshotSaved
from manyhosts.records.manifest import FORMAT_VERSION, found_in
from manyhosts.snapshot import store as store_module
from manyhosts.snapshot.copy import CopySpace
from manyhosts.snapshot.fingerprint import fingerprint, weights_sha256
from manyhosts.snapshot.load import load, same_model
from manyhosts.snapshot.store import Facts, Store

CPU = torch.device("cpu")


def facts(step: int, model: nn.Module | None = None) -> Facts:
    names = fingerprint(model) if model else {}
    return Facts(step=step, epoch=1, position={"samples": 7 * step}, strategy="single", model=names, run={"seed": 3})


def state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((300,), float(step))}, "history": [(step, 0.5)], 3: None}


def save(store: Store, *steps: int) -> None:
    for step in steps:
        store.save(state(step), facts(step))
        store.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folder_without_snapshots_has_no_latest(tmp_path: Path) -> None:
    assert Store(tmp_path / "none", keep=3).latest() is None


def test_latest_is_the_newest_with_all_that_was_saved(tmp_path: Path) -> None:
    save(Store(tmp_path, keep=3), 9, 10, 100_000_000)
    loaded = Store(tmp_path, keep=3).latest()
    assert loaded is not None
    assert loaded.path.name == "step-100000000"
    assert loaded.facts == facts(100_000_000)
    assert torch.equal(loaded.state["model"]["weight"], torch.full((300,), 1e8))
    assert loaded.state["history"] == [(100_000_000, 0.5)]
    assert (list(loaded.owns), loaded.skipped) == ([{}], [])


def test_model_and_optimizer_go_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.arange(20.0).reshape(5, 4) + step).square().sum().backward()
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer, 3)
    store = Store(tmp_path, keep=1)
    store.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, facts(3, model))
    train(model, optimizer, 4)

    resumed, its_optimizer = make()
    loaded = store.latest(same_model(fingerprint(resumed)))
    assert loaded is not None
    resumed.load_state_dict(loaded.state["model"])
    its_optimizer.load_state_dict(loaded.state["optimizer"])
    train(resumed, its_optimizer, 4)
    assert weights_sha256(resumed) == weights_sha256(model)


def test_only_the_newest_few_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    save(store, 1, 2, 3, 4)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_step_that_is_saved_again_replaces_the_one_before(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    save(store, 1, 2)
    store.save({"second": True}, facts(2))
    store.wait()
    loaded = store.latest()
    assert loaded is not None
    assert loaded.state == {"second": True}
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_damaged_one_that_the_run_fell_back_behind_takes_no_place_of_a_whole_one(tmp_path: Path) -> None:
    save(Store(tmp_path, keep=9), 1, 2, 4)
    (tmp_path / "step-00000004" / "state.json").write_text("{}")
    store = Store(tmp_path, keep=2)
    loaded = store.latest()
    assert loaded is not None
    assert [skipped.path.name for skipped in loaded.skipped] == ["step-00000004"]
    save(store, 3)
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]  # 4 lies ahead and counts for nothing
    save(store, 5)
    assert names(tmp_path) == ["step-00000003", "step-00000005"]


def test_damaged_one_that_is_written_anew_is_as_good_as_any(tmp_path: Path) -> None:
    save(Store(tmp_path, keep=9), 1, 2)
    (tmp_path / "step-00000002" / "state.json").write_text("{}")
    store = Store(tmp_path, keep=2)
    store.latest()
    save(store, 2, 3)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_whole_ones_ahead_push_none_out(tmp_path: Path) -> None:
    save(Store(tmp_path, keep=9), 1, 2, 4, 5)
    save(Store(tmp_path, keep=2), 3)
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004", "step-00000005"]


def test_event_tells_what_was_saved_and_only_once(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    save(store, 5)
    [event] = store.finished()
    assert isinstance(event, SnapshotSaved)
    assert (event.step, event.path) == (5, tmp_path / "step-00000005")
    files = [path for path in event.path.iterdir() if path.name != "manifest.json"]
    assert event.bytes == sum(path.stat().st_size for path in files)
    assert 0 < event.stall_seconds <= event.seconds
    assert event.stall_seconds == pytest.approx(store.stalled_s)
    assert store.finished() == []


def test_training_goes_on_while_the_disk_is_slow(tmp_path: Path) -> None:
    disk = GatedDisk()
    store = Store(tmp_path, keep=2, disk=disk)
    weight, running = torch.zeros(1000), torch.zeros(1000)
    store.save({"weight": weight, "running": running}, facts(1), unchanged_until_update=[weight])
    running += 1  # the forward pass
    store.before_update()
    weight += 1
    assert store.finished() == []
    assert disk.calls == 0
    disk.gate.set()
    loaded = store.latest()
    assert loaded is not None
    assert not loaded.state["weight"].any()
    assert not loaded.state["running"].any()
    assert len(store.finished()) == 1


def test_update_waits_for_the_copy(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    weights = [torch.zeros(1 << 20) for _ in range(8)]
    for step in range(1, 8):
        store.save({"weights": weights}, facts(step), unchanged_until_update=weights)
        store.before_update()
        for weight in weights:
            weight.fill_(step)
        loaded = store.latest()
        assert loaded is not None
        assert all((weight == step - 1).all() for weight in loaded.state["weights"])


def test_only_what_is_said_not_to_change_is_copied_later() -> None:
    base = torch.zeros(8)
    weight, step, running = base[:4].view(2, 2), torch.tensor(0.0), torch.zeros(3)
    space, state = CopySpace(CPU), {"weight": weight, "step": step, "running": running}
    space.begin(state, []).finish()
    for tensor in state.values():
        tensor.fill_(1)
    copying = space.begin(state, [base.detach(), step])
    assert not copying.done.is_set()
    assert {name: copy.max() for name, copy in copying.copies.items()} == {"weight": 0, "step": 0, "running": 1}
    running.fill_(2)  # the forward pass
    copying.finish()
    assert copying.done.is_set()
    assert {name: copy.min() for name, copy in copying.copies.items()} == {"weight": 1, "step": 1, "running": 1}


def test_tensors_of_any_layout_are_copied_right() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    complex_ones = torch.tensor([1 + 2j, 3 - 4j]).conj()
    given = {"transposed": matrix.t(), "slice": matrix[:, ::2], "spread": torch.ones(1).expand(5), "conj": complex_ones}
    for unchanged in ([], list(given.values())):
        copying = CopySpace(CPU).begin(given, unchanged)
        copying.finish()
        assert all(torch.equal(copying.copies[name], value) for name, value in given.items())
        assert all(copy.is_contiguous() for copy in copying.copies.values())


def test_memory_of_the_copy_is_used_again() -> None:
    space = CopySpace(CPU)
    first = space.begin({"a": torch.zeros(4), "b": torch.zeros(2), "c": torch.zeros(1)}, [])
    places = {name: copy.data_ptr() for name, copy in first.copies.items()}
    second = space.begin({"a": torch.ones(4)}, [])
    assert set(second.copies) == {"a"}
    assert second.copies["a"].all()
    third = space.begin({"a": torch.zeros(4), "b": torch.zeros(3), "c": torch.zeros(1)}, [])
    assert third.copies["b"].shape == (3,)
    assert [third.copies[name].data_ptr() == places[name] for name in "ac"] == [True, True]


@given(
    states=st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9), max_size=6), min_size=1, max_size=6)
)
def test_memory_of_the_copy_is_never_more_than_the_largest_state(states: list[dict[str, int]]) -> None:
    space = CopySpace(CPU)
    for state in states:
        given = {name: torch.ones(size, dtype=torch.uint8) for name, size in state.items()}
        copying = space.begin(given, [])
        assert all(torch.equal(copying.copies[name], value) for name, value in given.items())
        held = sum(tensor.nbytes for tensor in space._space.values())
        assert held <= max(sum(each.values()) for each in states)


def test_fault_in_the_writing_thread_is_raised_where_training_sees_it(tmp_path: Path) -> None:
    class BrokenDisk(CountingDisk):
        def sync(self, file: Any) -> None:
            raise ZeroDivisionError("a fault put in on purpose")

    store = Store(tmp_path, keep=1, disk=BrokenDisk())
    store.save(state(1), facts(1))
    with pytest.raises(ZeroDivisionError):
        store.wait()
    assert names(tmp_path) == []


def test_value_that_cannot_be_kept_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "snapshots", keep=1)
    with pytest.raises(SnapshotError) as caught:
        store.save({"schedule": {"rule": print}}, facts(1))
    assert caught.value.where == "state['schedule']['rule']"
    assert not (tmp_path / "snapshots").exists()


def test_best_is_replaced_and_lies_outside_the_count_of_those_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "snapshots", keep=1)
    for step in (1, 2, 3):
        store.save_as(tmp_path / "best", state(step), facts(step))
    save(store, 3)
    assert names(tmp_path) == ["best", "snapshots"]
    assert load(tmp_path / "best").facts.step == 3


def test_manifest_is_readable_by_any_tool(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    store = Store(tmp_path, keep=1)
    store.save({"model": model.state_dict()}, facts(4, model), own={"residual": torch.ones(2)})
    store.wait()
    content = json.loads((tmp_path / "step-00000004" / "manifest.json").read_text())
    assert content["format_version"] == FORMAT_VERSION
    assert (content["step"], content["epoch"], content["position"]) == (4, 1, {"samples": 28})
    assert (content["world_size"], content["strategy"], content["run"]) == (1, "single", {"seed": 3})
    assert content["model"] == {"weight": "float32[2, 3]", "bias": "float32[2]"}
    assert sorted(content["files"]) == [
        "own-00000.json",
        "own-00000.safetensors",
        "state.json",
        "tensors-00000-of-00001.safetensors",
    ]


def test_half_written_ones_are_named_and_cleared_at_the_next_save(tmp_path: Path) -> None:
    save(Store(tmp_path, keep=3), 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000002.0123456789ab.half")
    store = Store(tmp_path, keep=3)
    loaded = store.latest()
    assert loaded is not None
    assert loaded.facts.step == 1
    assert [(skipped.step, skipped.reason) for skipped in loaded.skipped] == [
        (2, "half-written: the run ended before it was complete")
    ]
    save(store, 3)
    assert [found.path.name for found in found_in(tmp_path)] == ["step-00000003", "step-00000001"]


def test_run_that_died_before_its_first_snapshot_starts_anew(tmp_path: Path) -> None:
    (tmp_path / "step-00000002.0123456789ab.half").mkdir()
    assert Store(tmp_path, keep=3).latest() is None


def test_wait_for_a_snapshot_that_grows_is_said_to_be_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files = store_module.write_files

    def slowly(task: Any, *more: Any) -> Any:
        for number in range(1, 6):
            (task.half / "more").write_bytes(bytes(number))
            time.sleep(0.1)
        (task.half / "more").unlink()
        return write_files(task, *more)

    monkeypatch.setattr(store_module, "write_files", slowly)
    monkeypatch.setattr(store_module, "_LOOK_S", 0.05)
    said: list[int] = []
    store = Store(tmp_path, keep=1)
    store.meanwhile = lambda: said.append(1)
    store.save({"value": 1}, facts(1, {}))
    store.wait()
    assert 2 <= len(said) <= 6
