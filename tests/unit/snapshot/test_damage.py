"""Snapshots that are not what they were: each kind of damage is named, and the one before is taken."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhosts.errors import SnapshotError
from manyhosts.records.manifest import FORMAT_VERSION, verify
from manyhosts.snapshot.fingerprint import fingerprint
from manyhosts.snapshot.load import load, same_model
from manyhosts.snapshot.store import Facts, Store

MODEL = nn.Linear(3, 2)
TENSORS = "tensors-00000-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with whole snapshots of steps 1 and 2."""
    store = Store(tmp_path, keep=3)
    for step in (1, 2):
        store.save({"model": MODEL.state_dict(), "rate": 0.5}, facts(step), own={"residual": torch.zeros(2)})
    store.wait()
    return tmp_path


def facts(step: int) -> Facts:
    return Facts(step=step, epoch=0, position={"samples": 8}, strategy="single", model=fingerprint(MODEL))


def flip(path: Path, byte: int = -1, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def of_newer_format(path: Path) -> None:
    path.write_text(path.read_text().replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 99'))


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    (TENSORS, flip, f"{TENSORS} is damaged: its sha256 is "),
    ("state.json", flip, "state.json is damaged: its sha256 is "),
    ("own-00000.safetensors", flip, "own-00000.safetensors is damaged: its sha256 is "),
    (TENSORS, cut, f"{TENSORS} has "),
    (TENSORS, Path.unlink, f"{TENSORS} is missing"),
    ("manifest.json", Path.unlink, "it has no manifest.json"),
    ("manifest.json", cut, "manifest.json is damaged: "),
    ("manifest.json", of_newer_format, f"it has format 99, and this manyhosts reads formats up to {FORMAT_VERSION}"),
    ("manifest.json", lambda path: path.write_text("[]"), "manifest.json is damaged: "),
    ("manifest.json", lambda path: path.write_bytes(b"\xff\xfe"), "manifest.json cannot be read: "),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES, ids=[words for _, _, words in DAMAGES])
def test_damaged_one_is_named_and_passed_over(
    folder: Path, name: str, damage: Callable[[Path], None], words: str
) -> None:
    damage(folder / "step-00000002" / name)
    loaded = Store(folder, keep=3).latest()
    assert loaded is not None
    assert loaded.facts.step == 1
    [skipped] = loaded.skipped
    assert (skipped.step, skipped.path) == (2, folder / "step-00000002")
    assert skipped.reason.startswith(words)


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES, ids=[words for _, _, words in DAMAGES])
def test_where_none_is_whole_all_are_named_with_a_remedy(
    folder: Path, name: str, damage: Callable[[Path], None], words: str
) -> None:
    for step in (1, 2):
        damage(folder / f"step-0000000{step}" / name)
    with pytest.raises(SnapshotError) as caught:
        Store(folder, keep=3).latest()
    assert f"step-00000002: {words}" in caught.value.what
    assert f"step-00000001: {words}" in caught.value.what
    assert caught.value.where == str(folder)
    assert "--run-dir" in caught.value.fix
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", [TENSORS, "state.json", "manifest.json", "own-00000.json"])
def test_no_flipped_bit_goes_unnoticed(folder: Path, name: str) -> None:
    path = folder / "step-00000002" / name
    whole = path.read_bytes()
    unnoticed = []
    # Of each byte the lowest bit, which turns a digit into its neighbour, and another one, in turn.
    for byte, bit in [(place, bit) for place in range(len(whole)) for bit in (0, 1 + place % 7)]:
        path.write_bytes(whole)
        flip(path, byte, bit)
        try:
            verify(path.parent)
        except SnapshotError:
            continue
        unnoticed.append((byte, bit))
    assert unnoticed == []


def test_snapshot_of_another_model_is_named_with_both_shapes(folder: Path) -> None:
    with pytest.raises(SnapshotError) as caught:
        Store(folder, keep=3).latest(same_model(fingerprint(nn.Linear(4, 2))))
    words = "its weight is float32 of shape (2, 3), this model's is float32 of shape (2, 4)"
    assert f"step-00000002: it is of another model: {words}" in caught.value.what


def test_newer_one_of_another_model_is_passed_over(folder: Path) -> None:
    store = Store(folder, keep=3)
    other = nn.Linear(5, 5)
    store.save({}, Facts(step=3, epoch=0, position={}, strategy="single", model=fingerprint(other)))
    loaded = store.latest(same_model(fingerprint(MODEL)))
    assert loaded is not None
    assert loaded.facts.step == 2
    assert "another model" in loaded.skipped[0].reason


def test_file_that_the_manifest_does_not_name_changes_nothing(folder: Path) -> None:
    shutil.copy(folder / "step-00000001" / TENSORS, folder / "step-00000002" / "tensors-00007-of-00008.safetensors")
    assert load(folder / "step-00000002").facts.step == 2


def test_folders_with_other_names_are_no_snapshots(folder: Path) -> None:
    for name in ("step-2", "step-00000009.txt", "stepping", "step-00000009.copy"):
        (folder / name).mkdir()
    (folder / "step-00000008").write_text("a file, not a folder")
    loaded = Store(folder, keep=3).latest()
    assert loaded is not None
    assert (loaded.facts.step, loaded.skipped) == (2, [])
