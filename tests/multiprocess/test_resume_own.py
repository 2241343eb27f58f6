"""A resume of workers that step alone: each reads what it takes up, checks its share, and ends with the same bits."""

from __future__ import annotations

import shutil
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import Recipe, events, make_trainer
from safetensors import safe_open
from safetensors.torch import load_file

import manyhosts as mh
from manyhosts.records.manifest import InFolder
from manyhosts.snapshot import tensors

pytestmark = pytest.mark.multiprocess

KINDS = {
    "local-sgd": mh.LocalSGD(sync_every=5, sync_warmup=2),
    "diloco": mh.DiLoCo(sync_every=4, fragments=2, overlap_steps=1),
}


def trainer_of(kind: str, folder: Path) -> mh.Trainer:
    settings = {"strategy": KINDS[kind], "snapshots": mh.Snapshots(every="4 steps", keep=10)}
    return make_trainer(Recipe(samples=122, batch=20, accuracy=False, trainer=settings), folder / kind)


def train(_rank: int, folder: Path) -> dict[str, str]:
    """A whole run of each kind, whose weights it returns, and one that ends between two exchanges."""
    for kind in KINDS:
        trainer_of(kind, folder / "parts").fit("9 steps")
    return {kind: trainer_of(kind, folder / "whole").fit("12 steps").weights_sha256 for kind in KINDS}


@dataclass
class Readings:
    """What a worker reads of snapshots."""

    tensors: Counter[str] = field(default_factory=Counter)
    """Bytes of tensors, by file."""
    hashed: Counter[str] = field(default_factory=Counter)
    """How often a file was read to be checked."""
    alive: int = 0
    """Bytes of what one worker alone had, read and still in memory."""
    most: int = 0

    def took(self, file: str, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors[file] += tensor.nbytes
        if file.startswith("own-"):
            self.alive += tensor.nbytes
            self.most = max(self.most, self.alive)
            weakref.finalize(tensor, self.let_go, tensor.nbytes)
        return tensor

    def let_go(self, size: int) -> None:
        self.alive -= size


class Watched:
    """A file of tensors that tells what is copied out of it."""

    def __init__(self, readings: Readings, path: Path, framework: str) -> None:
        self.readings, self.name, self.file = readings, Path(path).name, safe_open(path, framework=framework)

    def keys(self) -> list[str]:
        return list(self.file.keys())

    def metadata(self) -> dict[str, str]:
        return dict(self.file.metadata())

    def get_slice(self, name: str) -> Any:
        return self.file.get_slice(name)  # asked for its shape alone: nothing here is cut

    def get_tensor(self, name: str) -> Any:
        tensor = self.file.get_tensor(name)

        class Copied:
            def clone(_) -> torch.Tensor:
                return self.readings.took(self.name, tensor.clone())

        return Copied()


def resume(_rank: int, folders: list[Path]) -> dict[tuple[str, str], tuple[str, Readings]]:
    """By folder and kind: the weights at the end, and what was read up to the first step."""
    found = {}
    pieces = InFolder.pieces
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            for kind in KINDS:
                readings = Readings()

                def reported(files: InFolder, name: str, readings: Readings = readings) -> Iterator[bytes]:
                    readings.hashed[name] += 1
                    return pieces(files, name)

                patch.setattr(tensors, "safe_open", lambda path, framework, r=readings: Watched(r, path, framework))
                patch.setattr(InFolder, "pieces", reported)
                weights = trainer_of(kind, folder).fit("12 steps").weights_sha256
                found[folder.name, kind] = (weights, replace(readings))
    return found


def own_bytes(snapshot: Path) -> dict[str, int]:
    """How many bytes of tensors each worker alone had."""
    return {
        path.name: sum(tensor.nbytes for tensor in load_file(path).values())
        for path in sorted(snapshot.glob("own-*.safetensors"))
    }


def copy_of(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder / "parts", folder / name))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_worker_reads_its_own_part_checks_its_share_and_ends_with_the_same_bits(
    workers: int, tmp_path: Path
) -> None:
    [whole, *_] = run_ranks(workers, train, tmp_path)
    again, damaged = copy_of(tmp_path, "again"), copy_of(tmp_path, "damaged")
    for kind in KINDS:
        flip_a_bit(damaged / kind / "snapshots" / "step-00000009" / f"own-{workers - 1:05d}.safetensors")
    answers = run_ranks(workers, resume, [again, damaged])
    for kind in KINDS:
        sizes = own_bytes(again / kind / "snapshots" / "step-00000009")
        assert len(sizes) == workers
        checked: Counter[str] = Counter()
        for rank, answer in enumerate(answers):
            weights, readings = answer["again", kind]
            assert weights == whole[kind]
            own = f"own-{rank:05d}.safetensors"
            assert {name: size for name, size in readings.tensors.items() if name in sizes} == {own: sizes[own]}
            assert 0 < readings.most <= sizes[own]
            checked += readings.hashed
        assert {name: checked[name] for name in sizes} == dict.fromkeys(sizes, 1), "each by one, on one disk"
        assert (checked["state.json"], checked["own-00000.json"]) == (2 * workers, workers + 1), (
            "hashed, and held against it"
        )
        assert {answer["damaged", kind][0] for answer in answers} == {whole[kind]}, "from the one before"
        [skipped] = events(damaged / kind, "skipped")
        assert f"own-{workers - 1:05d}.safetensors is damaged" in skipped["reason"]


@pytest.mark.parametrize(("before", "now"), [(2, 3), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_other_number_of_workers_reads_one_part_at_a_time_and_only_where_it_is_needed(
    before: int, now: int, tmp_path: Path
) -> None:
    run_ranks(before, train, tmp_path)
    answers = run_ranks(now, resume, [copy_of(tmp_path, "again")])
    for kind in KINDS:
        sizes = own_bytes(tmp_path / "again" / kind / "snapshots" / "step-00000009")
        assert len({answer["again", kind][0] for answer in answers}) == 1
        checked = sum((answer["again", kind][1].hashed for answer in answers), Counter[str]())
        assert checked["own-00000.safetensors"] == 1, "by one"
        for rank, answer in enumerate(answers):
            readings = answer["again", kind][1]
            read = {name for name in readings.tensors if name in sizes}
            formers = list(range(rank, before, now)) or [rank % before]
            needed = {f"own-{former:05d}.safetensors" for former in formers} if kind == "diloco" else set()
            assert read == needed, "local-sgd continues from the mean, which all share"
            assert readings.most <= max(sizes.values())
