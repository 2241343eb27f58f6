"""A run whose newest snapshot is damaged names it and continues from the one before."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import Recipe, make_trainer
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import SnapshotError
from manyhosts.events import Event, StepDone
from manyhosts.records.manifest import FORMAT_VERSION
from manyhosts.records.samples import counted

FIRST_HALF = Recipe(duration="6 steps", dropout=0.2, trainer={"snapshots": mh.Snapshots(every="2 steps")})


def fit(run_dir: Path, duration: str) -> tuple[str, list[dict[str, object]]]:
    trainer = make_trainer(FIRST_HALF, run_dir)
    weights = trainer.fit(duration).weights_sha256
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return weights, lines


def newest(run_dir: Path) -> Path:
    return max((run_dir / "snapshots").glob("step-*"))


def flip_a_bit(snapshot: Path) -> None:
    [path] = snapshot.glob("tensors-*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(snapshot: Path) -> None:
    [path] = snapshot.glob("tensors-*")
    path.write_bytes(path.read_bytes()[:-100])


def lose_the_manifest(snapshot: Path) -> None:
    (snapshot / "manifest.json").unlink()


def come_from_the_future(snapshot: Path) -> None:
    manifest = snapshot / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 99'))


def nest_brackets(snapshot: Path) -> None:
    (snapshot / "manifest.json").write_text("[" * 100_000)


def be_of_another_model(snapshot: Path) -> None:
    other = snapshot.parents[2] / "other"
    images = torch.zeros(12, 3)
    trainer = mh.Trainer(
        model=lambda: nn.Linear(3, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=TensorDataset(images, torch.zeros(12, dtype=torch.int64)), batch_size=2),
        run_dir=other,
    )
    trainer.fit("6 steps")
    shutil.rmtree(snapshot)
    shutil.copytree(newest(other), snapshot)


DAMAGES: dict[Callable[[Path], None], str] = {
    flip_a_bit: "is damaged",
    truncate: "bytes",
    lose_the_manifest: "no manifest.json",
    come_from_the_future: "format 99",
    nest_brackets: "nested",
    be_of_another_model: "of another model",
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fit(tmp_path_factory.mktemp("whole"), "12 steps")[0]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_snapshot_is_named_and_the_one_before_taken(
    damage: Callable[[Path], None], undisturbed: str, tmp_path: Path
) -> None:
    fit(tmp_path / "run", "6 steps")
    assert newest(tmp_path / "run").name == "step-00000006"
    damage(newest(tmp_path / "run"))
    weights, lines = fit(tmp_path / "run", "12 steps")
    assert weights == undisturbed
    [skipped] = [line for line in lines if line["event"] == "skipped"]
    assert str(skipped["path"]).endswith("step-00000006")
    assert DAMAGES[damage] in str(skipped["reason"])
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 13))


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_run_ends_with_a_sentence_where_no_snapshot_fits(damage: Callable[[Path], None], tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(run, "2 steps")
    damage(newest(run))
    with pytest.raises(SnapshotError) as caught:
        make_trainer(FIRST_HALF, run).fit("4 steps")
    assert caught.value.exit_code == 2
    assert "step-00000002" in caught.value.what
    assert DAMAGES[damage] in caught.value.what
    assert caught.value.fix


def test_half_written_snapshot_is_passed_over(undisturbed: str, tmp_path: Path) -> None:
    fit(tmp_path / "run", "6 steps")
    half = tmp_path / "run" / "snapshots" / "step-00000007.0123456789ab.half"
    half.mkdir()
    (half / "tensors-00000-of-00001.safetensors").write_bytes(b"half-written")
    assert fit(tmp_path / "run", "12 steps")[0] == undisturbed


def test_full_disk_costs_the_snapshot_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the lines of `samples-0.jsonl` cannot be written, there is no snapshot that counts their steps."""
    full, write = threading.Event(), os.write

    def write_unless_full(descriptor: int, data: bytes) -> int:
        if full.is_set() and os.readlink(f"/proc/self/fd/{descriptor}").endswith("samples-0.jsonl"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    def fill_in_step_3_and_make_room_in_step_5(event: Event) -> None:
        if isinstance(event, StepDone):
            (full.clear if event.step == 5 else full.set if event.step == 3 else int)()

    monkeypatch.setattr(os, "write", write_unless_full)
    listeners = [fill_in_step_3_and_make_room_in_step_5]
    snapshots = mh.Snapshots(every="2 steps", keep=10)
    make_trainer(replace(FIRST_HALF, trainer={"snapshots": snapshots}), tmp_path, listeners=listeners).fit("8 steps")
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    reported = [(line["event"], line["step"]) for line in found if "step-" in line.get("path", "")]
    assert sorted(reported, key=lambda one: one[1]) == [
        ("snapshot", 2),
        ("skipped", 4),
        ("snapshot", 6),
        ("snapshot", 8),
    ]
    assert [path.name for path in sorted((tmp_path / "snapshots").iterdir())] == [
        f"step-{step:08d}" for step in (2, 6, 8)
    ]
    assert list(counted(tmp_path / "logs")) == list(range(1, 9)), "the lines waited until there was room"
