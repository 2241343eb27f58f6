"""What some workers saved, each its parts, is read by others that hold other parts: all pairs of layouts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch import Tensor

from manyhosts.communication.parts import TensorPart
from manyhosts.errors import SnapshotError
from manyhosts.records import manifest
from manyhosts.records.manifest import Facts, InFolder, Manifest, verify
from manyhosts.records.tensor_parts import Box, TensorRecord
from manyhosts.snapshot import tensors as tensor_files
from manyhosts.snapshot.condition import look
from manyhosts.snapshot.disk import Disk
from manyhosts.snapshot.load import load
from manyhosts.snapshot.location import Folder
from manyhosts.snapshot.writing import share_out

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
            found[0][name] = Box.full(tuple(tensor.shape))
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
            found[-1][name] = Box.full(tuple(tensor.shape))
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
        {name: Box.full(tuple(tensor.shape)) for i, (name, tensor) in enumerate(STATE.items()) if i % workers == worker}
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
    return STATE[name][box.within(Box.full(tuple(STATE[name].shape)))]


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
    text = Manifest(facts=facts, world_size=workers, files=files, tensors=records, time=0.0).to_text()
    (folder / "manifest.json").write_text(text)
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
        loaded.tensors().full("weight")


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
        (lambda records: records["weight"].parts.popitem(), "weight is incomplete: 15 of its 35 elements are missing"),
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


def rewritten(folder: Path, name: str, text: str | bytes) -> None:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


FIRST = "tensors-00000-of-00002.safetensors"


def longer_header(folder: Path) -> None:
    content = (folder / FIRST).read_bytes()
    rewritten(folder, FIRST, struct.pack("<Q", len(content)) + content[8:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: rewritten(folder, "state.json", '{"a": {"$tensor": "weight"}}'), "only the files hold bias"),
        (
            lambda folder: rewritten(folder, "state.json", json.dumps({n: {"$tensor": n} for n in [*STATE, "other"]})),
            "only state.json names other",
        ),
        (lambda folder: rewritten(folder, "state.json", '{"a": '), "state.json cannot be read"),
        (lambda folder: rewritten(folder, "state.json", '{"a": {"$pickle": 1}}'), "unknown tag"),
        (lambda folder: (folder / "state.json").unlink(), "does not name state.json"),
        (lambda folder: (folder / FIRST).unlink(), "the files hold other parts of"),
        (lambda folder: rewritten(folder, FIRST, b"no such file"), f"{FIRST} ends within its header"),
        (longer_header, f"{FIRST} ends within its header"),
        (lambda folder: rewritten(folder, FIRST, (folder / FIRST).read_bytes()[:-4]), "bytes, and it has"),
        (lambda folder: rewritten(folder, "own-00001.json", '{"a": {"$tensor": "a"}}'), "only own-00001.json names a"),
    ],
)
def test_what_is_as_its_hash_says_and_cannot_be_read_is_damaged_for_run_and_command_line_alike(
    change: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "step-00000001", rows(2))
    records = load(folder).records
    change(folder)
    seal(folder, records, 2)
    with pytest.raises(SnapshotError) as refused:
        load(folder)
    assert words in refused.value.what
    [looked_at] = look(Folder(tmp_path))
    assert (looked_at.kind, looked_at.reason) == ("damaged", refused.value.what)


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_together_readers_compare_every_byte_once(
    readers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looks at headers and plain values as well, which are a fifth of it at most, and finds what is damaged."""
    monkeypatch.setattr(manifest, "_FIRST_BYTES", 1 << 10)
    names = [f"weight{number}" for number in range(12)]
    parts = [
        {name: torch.randn(9_000 + 10 * worker) for name in names[worker::3]} for worker in range(3)
    ]  # as three workers wrote it
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    records: dict[str, TensorRecord] = {}
    for worker, held in enumerate(parts):
        file = f"tensors-{worker:05d}-of-00003.safetensors"
        tensor_files.write(folder / file, held, Disk())
        records |= {name: tensor_files.record_of(TensorPart.all_of(each), file) for name, each in held.items()}
    (folder / "state.json").write_text(json.dumps({name: {"$tensor": name} for name in names}))
    seal(folder, records, 3)
    counted = 0
    pieces = InFolder.pieces

    def counting(self: InFolder, name: str) -> Iterator[bytes]:
        nonlocal counted
        for piece in pieces(self, name):
            counted += len(piece)
            yield piece

    monkeypatch.setattr(InFolder, "pieces", counting)
    for rank in range(readers):
        load(folder, rank=rank, checkers=readers)
    whole = sum(each.stat().st_size for each in folder.iterdir())
    assert whole * 0.99 < counted < 1.2 * whole
    for damaged in [each for each in folder.iterdir() if each.name.startswith("tensors-")]:
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found = []
        for rank in range(readers):
            with contextlib.suppress(SnapshotError):
                load(folder, rank=rank, checkers=readers)
                found.append(rank)
        assert len(found) == readers - 1, "one of them sees it"
        damaged.write_bytes(content)


def test_block_beyond_the_tensor_is_refused(tmp_path: Path) -> None:
    reader = load(save(tmp_path / "step-00000001", rows(2))).tensors()
    for box in (Box((6, 0), (2, 5)), Box((-1, 0), (2, 5)), Box((0,), (7,))):
        with pytest.raises(ValueError, match="reaches beyond weight"):
            reader.block("weight", box)
