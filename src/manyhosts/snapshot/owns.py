"""What each worker gave a snapshot as its own: read from the disk when it is asked for, value by value.

Where workers step alone, each has a model and an optimizer of its own, and takes up no other's: read at once by all,
they would fill every worker's memory with the models of all.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from manyhosts.errors import SnapshotError
from manyhosts.snapshot import tensors as tensor_files
from manyhosts.snapshot.flatten import unflatten


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
            SnapshotError: it cannot be read; of its tensors this is told when they are asked for.
        """
        if isinstance(rank, slice):
            return [self[each] for each in range(self.workers)[rank]]
        rank = range(self.workers)[rank]
        text, tensors = self.folder / f"own-{rank:05d}.json", self.folder / f"own-{rank:05d}.safetensors"
        if text.name not in self.files:
            return {}
        with readable(text):
            nodes = json.loads(text.read_text(encoding="utf-8"))
            return Own(text, tensors, _entries(_entries(nodes).get(self.key, {}) if self.key else nodes))


@dataclass(frozen=True, slots=True)
class Own(Mapping[str, Any]):
    """What one worker gave: each value is read when it is asked for."""

    text: Path
    tensors: Path
    nodes: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes)

    def __getitem__(self, key: str) -> Any:
        """The value under `key`, with tensors of its own.

        Raises:
            KeyError: there is none.
            SnapshotError: it cannot be read.
        """
        node = self.nodes[key]
        with readable(self.text):
            return unflatten(node, tensor_files.Asked(self.tensors))


def _entries(nodes: dict[str, Any]) -> dict[str, Any]:
    """Of a dict that was taken apart, the nodes of its values by their keys."""
    if nodes.keys() != {"$dict"}:
        return nodes
    return {unflatten(key, {}): node for key, node in nodes["$dict"]}


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Within, the file at `path` is read, and what was kept in it put together.

    Raises:
        SnapshotError: that failed.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
        raise SnapshotError(
            f"{path.name} cannot be read: {type(cause).__name__}: {cause}",
            where=str(path.parent),
            fix="delete the folder",
        ) from cause
