"""A state that lies on the disk: each of its values is read when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyhosts.errors import SnapshotError
from manyhosts.records.contents import unflatten
from manyhosts.records.manifest import fix_of
from manyhosts.snapshot.tensors import Asked

Read = Callable[[str], Any]
"""Gives the tensor of a name in memory of its own, or what reads it later."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries(Mapping[str, Any]):
    """The values of a mapping that was taken apart. Nothing is kept here: what is asked for twice is read twice."""

    text: Path
    """Where its plain values were read."""
    nodes: Mapping[str, Any]
    """Each value, taken apart, by its key."""
    open: Callable[[], Read]
    """Gives what reads tensors for one value; the files that it opens are closed when it goes."""

    @classmethod
    def in_file(cls, text: Path, open: Callable[[], Read]) -> Entries:
        """Those that the file `text` holds.

        Raises:
            SnapshotError: it cannot be read.
        """
        with readable(text):
            return cls(text, _by_key(json.loads(text.read_text(encoding="utf-8"))), open)

    def under(self, key: str) -> Entries:
        """Those of the mapping under `key`; none where it is not there."""
        return replace(self, nodes=_by_key(self.nodes.get(key, {})))

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
            return unflatten(node, Asked(self.open()))


def _by_key(nodes: dict[str, Any]) -> dict[Any, Any]:
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise SnapshotError(
            f"{path.name} cannot be read: {type(cause).__name__}: {cause}",
            where=str(path.parent),
            fix=fix_of(cause),
        ) from cause
