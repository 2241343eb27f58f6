"""What some workers saved, each its parts, is read by others that hold other parts: all pairs of layouts."""

from __future__ import annotations

import hashlib
import json
import math
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch import Tensor

from manyhosts.communication.parts import TensorPart
from manyhosts.errors import SnapshotError
from manyhosts.records.manifest import Facts, Manifest, verify
from manyhosts.records.tensor_parts import Box, TensorRecord
from manyhosts.snapshot import tensors as tensor_files
from manyhosts.snapshot.disk import Disk
from manyhosts.snapshot.load import load
from manyhosts.snapshot.share import share_out

STATE = {
    "weight": torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5),
    "kernel": torch.arange(3 * 4 * 2, dtype=torch.bfloat16).reshape(3, 4, 2),
    "bias": torch.arange(2, dtype=torch.float64),
    "count": torch.tensor(3),
    "nothing": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True, True, False]),
}
Layout = list[dict[str, Box]]
"""By worker, the box of each tensor that it holds; a tensor of which it holds nothing is not named."""


def whole(workers: int) -> Layout:
    """Every worker holds everything, and each writes a share."""
    shares = share_out(STATE, workers, cut_above=16)
    return [{name: part.box for name, part in share.items()} for share in shares]


def rows(workers: int) -> Layout:
    """As FSDP2 cuts: along the first dimension in pieces that are rounded up, so that the last workers may go empty."""
    found: Layout = [{} for _ in range(workers)]
    for name, tensor in STATE.items():
        if tensor.dim() == 0 or not tensor.numel():
            found[0][name] = Box.whole(tuple(tensor.shape))
            continue
        size = math.ceil(tensor.shape[0] / workers)
        for worker, begin in enumerate(range(0, tensor.shape[0], size)):
            sides = (min(size, tensor.shape[0] - begin), *tensor.shape[1:])
            found[worker][name] = Box((begin, *[0] * (tensor.dim() - 1)), sides)
    return found


def grid(down: int, across: int) -> Layout:
    """Along the first dimension and the last one: FSDP2 over tensor parallelism."""
    found: Layout = [{} for _ in range(down * across)]
    for name, tensor in STATE.items():
        if tensor.dim() < 2 or not tensor.numel():
            found[-1][name] = Box.whole(tuple(tensor.shape))
            continue
        first, last = (
            [round(side * i / n) for i in range(n + 1)]
            for side, n in ((tensor.shape[0], down), (tensor.shape[-1], across))
        )
        for worker in range(down * across):
            row, column = divmod(worker, across)
            begin = (first[row], *[0] * (tensor.dim() - 2), last[column])
            end = (first[row + 1], *tensor.shape[1:-1], last[column + 1])
            box = Box(begin, tuple(b - a for a, b in zip(begin, end, strict=True)))
            if box.size:
                found[worker][name] = box
    return found


def stages(workers: int) -> Layout:
    """As a pipeline: each worker has other tensors."""
    return [
        {
            name: Box.whole(tuple(tensor.shape))
            for i, (name, tensor) in enumerate(STATE.items())
            if i % workers == worker
        }
        for worker in range(workers)
    ]


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "single": lambda: whole(1),
    "ddp-2": lambda: whole(2),
    "ddp-3": lambda: whole(3),
    "fsdp-2": lambda: rows(2),
    "fsdp-3": lambda: rows(3),
    "fsdp-8": lambda: rows(8),
    "fsdp-2-tensor-3": lambda: grid(2, 3),
    "pipeline-2": lambda: stages(2),
}


def cut(name: str, box: Box) -> Tensor:
    return STATE[name][box.within(Box.whole(tuple(STATE[name].shape)))]


def save(folder: Path, layout: Layout, change: Callable[[dict[str, TensorRecord]], None] = lambda _: None) -> Path:
    """A snapshot as workers of this layout write it."""
    folder.mkdir()
    records: dict[str, TensorRecord] = {}
    for worker, held in enumerate(layout):
        file = f"tensors-{worker:05d}-of-{len(layout):05d}.safetensors"
        parts = {
            name: TensorPart(cut(name, box).contiguous(), box.offset, tuple(STATE[name].shape))
            for name, box in held.items()
        }
        tensor_files.write(folder / file, parts, Disk())
        for name, part in parts.items():
            known = records.get(name)
            here = tensor_files.record_of(part, file)
            records[name] = (
                here if known is None else TensorRecord(here.dtype, here.shape, {**known.parts, **here.parts})
            )
    change(records)
    (folder / "state.json").write_text(json.dumps({name: {"$tensor": name} for name in STATE}))
    return seal(folder, records, len(layout))


def seal(folder: Path, records: Mapping[str, TensorRecord], workers: int) -> Path:
    facts = Facts(step=1, epoch=0, position={}, strategy="any", model={})
    files = {
        path.name: tensor_files.FileRecord(
            bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest()
        )
        for path in sorted(folder.iterdir())
        if path.name != "manifest.json"
    }
    manifest = Manifest(facts=facts, world_size=workers, files=files, tensors=records, time=0.0)
    (folder / "manifest.json").write_text(manifest.to_text())
    return folder


@pytest.mark.parametrize("writers", LAYOUTS)
def test_every_layout_is_read_by_every_other_to_the_same_bits(writers: str, tmp_path: Path) -> None:
    loaded = load(save(tmp_path / "step-00000001", LAYOUTS[writers]()))
    for name, tensor in STATE.items():
        assert torch.equal(loaded.state[name], tensor)
        assert loaded.state[name].dtype == tensor.dtype
    for readers in LAYOUTS:
        for held in LAYOUTS[readers]():
            reader = loaded.tensors()
            for name, box in held.items():
                assert torch.equal(reader.block(name, box), cut(name, box)), (writers, readers, name, str(box))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", LAYOUTS)
def test_pytorchs_own_reader_of_such_files_finds_the_same(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "step-00000001", LAYOUTS[name]())
    found = {key: torch.zeros_like(tensor) for key, tensor in STATE.items() if tensor.numel()}
    reader = distributed_checkpoint.HuggingFaceStorageReader(str(folder))
    distributed_checkpoint.load(found, storage_reader=reader, no_dist=True)
    assert all(torch.equal(found[key], STATE[key]) for key in found)


def test_a_block_takes_the_memory_of_the_block_and_opens_the_files_that_hold_it(tmp_path: Path) -> None:
    """A block of one part in four: the files of the other three may be gone."""
    folder = save(tmp_path / "step-00000001", rows(4))
    loaded = load(folder)
    for path in folder.glob("tensors-*"):
        if not path.name.startswith("tensors-00001"):
            path.unlink()
    box = Box((2, 1), (2, 3))
    assert torch.equal(loaded.tensors().block("weight", box), cut("weight", box))
    with pytest.raises(SnapshotError, match="cannot be read"):
        loaded.tensors().whole("weight")


def test_a_snapshot_is_checked_in_the_memory_of_a_few_pieces(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    large = torch.zeros(16 << 20)  # 64 MiB
    record = tensor_files.write(folder / "tensors-00000-of-00001.safetensors", {"large": large}, Disk())
    (folder / "state.json").write_text('{"large": {"$tensor": "large"}}')
    seal(
        folder,
        {"large": TensorRecord("float32", (16 << 20,), {"tensors-00000-of-00001.safetensors": Box((0,), (16 << 20,))})},
        1,
    )
    tracemalloc.start()
    try:
        verify(folder)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < record.bytes / 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda records: records.pop("bias"), "the files hold other parts of bias than the manifest says"),
        (lambda records: records["weight"].parts.popitem(), "weight is not whole: 15 of its 35 elements are missing"),
        (
            lambda records: records.update(
                bias=TensorRecord("float64", (2,), {"tensors-00000-of-00002.safetensors": Box((0,), (2,))})
            ),
            "the files hold other parts of bias than the manifest says",
        ),
    ],
)
def test_snapshot_whose_parts_are_not_as_it_says_is_damaged(
    change: Callable[[dict[str, TensorRecord]], None], words: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "step-00000001", rows(2), change)
    with pytest.raises(SnapshotError) as caught:
        load(folder)
    assert caught.value.what == words


def test_tensor_that_no_value_names_or_no_file_holds_is_damage(tmp_path: Path) -> None:
    folder = save(tmp_path / "step-00000001", rows(2))
    loaded = load(folder)
    for text, words in (
        ('{"weight": {"$tensor": "weight"}}', "only the files hold bias"),
        (json.dumps({name: {"$tensor": name} for name in [*STATE, "another"]}), "only state.json names another"),
    ):
        (folder / "state.json").write_text(text)
        seal(folder, loaded.records, 2)
        with pytest.raises(SnapshotError, match=words):
            load(folder)


def test_block_beyond_the_tensor_is_refused(tmp_path: Path) -> None:
    reader = load(save(tmp_path / "step-00000001", rows(2))).tensors()
    for box in (Box((6, 0), (2, 5)), Box((-1, 0), (2, 5)), Box((0,), (7,))):
        with pytest.raises(ValueError, match="reaches beyond weight"):
            reader.block("weight", box)
