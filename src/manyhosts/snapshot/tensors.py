"""Tensors in safetensors files: written by us, piece by piece with the hash made on the way, and read by the library.

The library writes a file in one call, from one more copy in memory, and does not say when it is on the disk. The format
is eight bytes with the length of a JSON header, the header, and the bytes of the tensors without gaps:
https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyhosts.communication.parts import TensorPart
from manyhosts.errors import SnapshotError
from manyhosts.records.contents import CODES, PLACES
from manyhosts.records.manifest import FileRecord, fix_of
from manyhosts.records.tensor_parts import TensorRecord
from manyhosts.snapshot.disk import Disk

_PIECE_BYTES = 8 << 20
_CODES = {getattr(torch, name): code for name, (code, _) in CODES.items()}


def can_keep(dtype: torch.dtype) -> bool:
    """Whether the format has a word for `dtype`."""
    return dtype in _CODES


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """`torch.float32` for `float32`.

    Raises:
        KeyError: the format has no word for it.
    """
    CODES[name]
    found: torch.dtype = getattr(torch, name)
    return found


def write(path: Path, tensors: Mapping[str, Tensor | TensorPart], disk: Disk) -> FileRecord:
    """Write contiguous CPU tensors, or parts of some, as a new file, on the disk when this returns.

    Raises:
        OSError: the disk would not have it.
    """
    return _write_hashed(path, _pieces({name: _part(each) for name, each in tensors.items()}), disk)


def _part(given: Tensor | TensorPart) -> TensorPart:
    return TensorPart.all_of(given) if isinstance(given, Tensor) else given


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


def _pieces(parts: Mapping[str, TensorPart]) -> Iterator[memoryview | bytes]:
    # The widest first, so that every tensor begins where its dtype may be read in place.
    order = sorted(parts, key=lambda name: (-parts[name].local.element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **_places(parts)}}
    begin = 0
    for name in order:
        tensor = parts[name].local
        end = begin + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        view = bytes_of(parts[name].local)
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]


def _places(parts: Mapping[str, TensorPart]) -> dict[str, str]:
    """Where each tensor of a file begins in the full one, as PyTorch's reader of such files wants it: of all or none.

    It takes a tensor to be as large as its parts reach, so ours says the shape, too.
    """
    if all(part.is_all for part in parts.values()):
        return {}
    places = {
        name: {"saved_offsets": list(part.offset), "shape": list(part.shape)} for name, part in sorted(parts.items())
    }
    return {PLACES: json.dumps(places, separators=(",", ":"))}


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def record_of(part: TensorPart, file: str) -> TensorRecord:
    """What a snapshot says of a tensor where `file` holds this of it."""
    return TensorRecord(dtype_name(part.local.dtype), part.shape, {file: part.box})


class TensorFile:
    """One file, opened when something of it is first asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def read(self, name: str, place: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor of this name, or what is at `place` in it, in memory of its own: the file may go meanwhile.

        Raises:
            SnapshotError: it cannot be read.
        """
        with _readable(self._path):
            file = self._opened()
            found: Tensor = file.get_tensor(name) if place is None else file.get_slice(name)[place]
            return found.clone()

    def _opened(self) -> Any:
        self._file = self._file or safe_open(self._path, framework="pt")
        return self._file


class Asked(dict[str, Any]):
    """Of many tensors those that were asked for: each is read when it is, once."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, name: str) -> Any:
        self[name] = self._read(name)
        return self[name]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as cause:
        raise SnapshotError(
            f"{path.name} cannot be read: {cause}", where=str(path.parent), fix=fix_of(cause)
        ) from cause
