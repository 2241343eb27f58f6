"""Tensors in safetensors files: written by us, piece by piece with the hash made on the way, and read by the library.

The library writes a file in one call, from one more copy in memory, and does not say when it is on the disk. The format
is eight bytes with the length of a JSON header, the header, and the bytes of the tensors without gaps:
https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyhosts.errors import SnapshotError
from manyhosts.records.manifest import FileRecord
from manyhosts.snapshot.disk import Disk

_PIECE_BYTES = 8 << 20
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def can_keep(dtype: torch.dtype) -> bool:
    """Whether the format has a word for `dtype`."""
    return dtype in _CODES


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def write(path: Path, tensors: Mapping[str, Tensor], disk: Disk) -> FileRecord:
    """Write contiguous CPU tensors as a new file, on the disk when this returns.

    Raises:
        OSError: the disk would not have it.
    """
    return _write_hashed(path, _pieces(tensors), disk)


def write_text(path: Path, text: str, disk: Disk) -> FileRecord:
    """Write a new text file, likewise."""
    return _write_hashed(path, [text.encode()], disk)


def _write_hashed(path: Path, pieces: Iterable[memoryview | bytes], disk: Disk) -> FileRecord:
    digest, size = hashlib.sha256(), 0

    def hashed() -> Iterator[memoryview | bytes]:
        nonlocal size
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            yield piece

    disk.write_file(path, hashed())
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview | bytes]:
    # The widest first, so that every tensor begins where its dtype may be read in place.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in order:
        tensor = tensors[name]
        end = begin + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        view = bytes_of(tensors[name])
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class Asked(dict[str, Tensor]):
    """Of a file's tensors those that were asked for: each is read when it is, once."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file: Any = None

    def __missing__(self, name: str) -> Tensor:
        """The tensor of this name, in memory of its own: the file may be removed while it is in use.

        Raises:
            SnapshotError: it cannot be read.
        """
        with _readable(self._path):
            self._file = self._file or safe_open(self._path, framework="pt")
            self[name] = self._file.get_tensor(name).clone()
        return self[name]


def read(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, likewise.

    Raises:
        SnapshotError: it is no safetensors file.
    """
    with _readable(path), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no dict


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as cause:
        raise SnapshotError(
            f"{path.name} cannot be read: {cause}", where=str(path.parent), fix="delete the folder"
        ) from cause
