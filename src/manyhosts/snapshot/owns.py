"""What each worker gave a snapshot as its own: read from the disk when it is asked for, value by value.

Where workers step alone, each has a model and an optimizer of its own, and takes up no other's: read at once by all,
they would fill every worker's memory with the models of all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from manyhosts.snapshot.entries import Entries
from manyhosts.snapshot.tensors import TensorFile


@dataclass(frozen=True, slots=True)
class Owns(Sequence[Mapping[str, Any]]):
    """By rank, what each of the workers that saved a snapshot gave as its own; empty for one that gave nothing.

    With a worker its plain values are read; the tensors of one of its values when that value is asked for. Nothing is
    kept here, so what is asked for twice is read twice.
    """

    folder: Path
    files: Collection[str]
    """Of the snapshot."""
    workers: int
    """How many saved it."""
    key: str = ""
    """Of what each gave, only the mapping under this key; empty: all of it."""

    def under(self, key: str) -> Owns:
        """Of what each gave, the mapping under `key`."""
        return replace(self, key=key)

    def __len__(self) -> int:
        return self.workers

    @overload
    def __getitem__(self, rank: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, rank: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        """What the worker of this rank gave.

        Raises:
            SnapshotError: it cannot be read; of its tensors this is reported when they are asked for.
        """
        if isinstance(rank, slice):
            return [self[each] for each in range(self.workers)[rank]]
        rank = range(self.workers)[rank]
        text, tensors = self.folder / f"own-{rank:05d}.json", self.folder / f"own-{rank:05d}.safetensors"
        if text.name not in self.files:
            return {}
        own = Entries.in_file(text, lambda: TensorFile(tensors).read)
        return own.under(self.key) if self.key else own
