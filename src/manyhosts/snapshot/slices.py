"""Tensors of a snapshot by name, in full or a block of one, out of whichever files hold parts of it.

A block is read part by part: no more memory is taken than it needs, however large the tensor is, and no file is opened
that holds nothing of it. So what was saved by some workers, each its parts, is read by others that hold other parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhosts.records.tensor_parts import Box, TensorRecord
from manyhosts.snapshot.tensors import TensorFile, dtype_of


@dataclass(frozen=True, eq=False, slots=True)
class StoredTensor:
    """A tensor of a snapshot that is not read yet."""

    name: str
    reader: TensorReader

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the full tensor."""
        return self.reader.records[self.name].shape

    def full(self) -> Tensor:
        """See `TensorReader.full`."""
        return self.reader.full(self.name)

    def block(self, box: Box) -> Tensor:
        """See `TensorReader.block`."""
        return self.reader.block(self.name, box)

    def numpy(self) -> Any:
        """What was a numpy array."""
        return self.reader.array(self.name)


class Ahead:
    """Blocks of tensors that were read before they are asked for, each kept until it was given as often as expected."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, Box], Tensor] = {}
        self.times: Counter[tuple[str, Box]] = Counter()
        """How often each will be asked for."""

    def take(self, name: str, box: Box) -> Tensor | None:
        """That block, in memory of its own; None where it was not read ahead, or was given already."""
        block = self.blocks.get((name, box))
        if block is None:
            return None
        self.times[name, box] -= 1
        return block.clone() if self.times[name, box] > 0 else self.blocks.pop((name, box))

    def clear(self) -> None:
        """Keep nothing: what is asked for from now on is read from the disk."""
        self.blocks.clear()


class TensorReader:
    """Reads tensors of the snapshot in one folder, as `records` say where they are. Files stay open while it lives."""

    def __init__(self, folder: Path, records: Mapping[str, TensorRecord], ahead: Ahead | None = None) -> None:
        """`ahead`: blocks that were read already."""
        self.records = records
        self._folder = folder
        self._ahead = ahead or Ahead()
        self._files: dict[str, TensorFile] = {}

    def full(self, name: str) -> Tensor:
        """A tensor, in memory of its own.

        Raises:
            KeyError: there is none of that name.
            SnapshotError: it cannot be read.
        """
        return self.block(name, Box.full(self.records[name].shape))

    def stored(self, name: str) -> StoredTensor:
        """A tensor that is read when it is asked for it."""
        return StoredTensor(name, self)

    def array(self, name: str) -> Any:
        """What was a numpy array."""
        return self.full(name).numpy()

    def block(self, name: str, box: Box) -> Tensor:
        """The elements of a tensor that are in `box`, of the shape of `box`, in memory of its own.

        Raises:
            KeyError: there is no tensor of that name.
            ValueError: `box` reaches beyond it.
            SnapshotError: it cannot be read.
        """
        record = self.records[name]
        if not _holds(Box.full(record.shape), box):
            raise ValueError(f"[{box}] reaches beyond {name}, whose shape is {record.shape}")
        if (found := self._ahead.take(name, box)) is not None:
            return found
        for file, part in record.parts.items():
            if part == box:
                return self._file(file).read(name)
        block = torch.empty(box.shape, dtype=dtype_of(record.dtype))
        for file, part in record.parts.items():
            if (common := part.overlap(box)) is not None:
                block[common.within(box)] = self._file(file).read(name, common.within(part))
        return block

    def _file(self, name: str) -> TensorFile:
        return self._files.setdefault(name, TensorFile(self._folder / name))


class RequestedBlocks(TensorReader):
    """Reads nothing: notes which blocks it is asked for, and gives tensors without values."""

    def __init__(self, records: Mapping[str, TensorRecord]) -> None:
        super().__init__(Path(), records)
        self.times: Counter[tuple[str, Box]] = Counter()

    def block(self, name: str, box: Box) -> Tensor:
        """Note that this block is wanted again; on the meta device, of the shape of `box`."""
        self.times[name, box] += 1
        return torch.empty(box.shape, dtype=dtype_of(self.records[name].dtype), device="meta")

    def array(self, name: str) -> None:
        """Note that all of it is."""
        self.full(name)


def _holds(outer: Box, box: Box) -> bool:
    if len(outer.shape) != len(box.shape):
        return False
    return all(
        0 <= begin <= begin + side <= end for begin, side, end in zip(box.offset, box.shape, outer.shape, strict=True)
    )
