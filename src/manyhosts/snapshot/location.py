"""A place with snapshots in it: what lies there, wherever that is. No torch here: the command line looks, too.

`Folder` is one on a disk; `objects.location.ObjectStoreLocation` is one in an object store.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from manyhosts.errors import SnapshotError
from manyhosts.records.chosen_run import no_run
from manyhosts.records.manifest import Files, Found, InFolder, found_in
from manyhosts.snapshot.commit import discard
from manyhosts.snapshot.disk import Disk


class SnapshotLocation(Protocol):
    """What can be asked of such a place."""

    where: str
    """The folder or address, for a person."""

    def found(self) -> list[Found]:
        """Every snapshot, complete or not, newest step first and `best` last.

        Raises:
            SnapshotError: there is no such place.
        """

    def files(self, found: Found) -> Files:
        """The files of one of them."""

    def total_bytes(self, found: Found) -> int:
        """What it takes, whatever is wrong with it.

        Raises:
            FileNotFoundError: it is gone meanwhile.
        """

    def changed(self, found: Found) -> float | None:
        """When it was written to last, in seconds since the Unix epoch; None where it is not known."""

    def remove(self, found: Found) -> None:
        """Remove it, so that whatever comes between, no one takes what is left for a complete one.

        Raises:
            OSError: it could not be removed.
        """


class Folder:
    """A run directory, its folder of snapshots, or one snapshot itself."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._path = path

    def found(self) -> list[Found]:
        """Every snapshot, complete or not.

        Raises:
            SnapshotError: there is no such folder.
        """
        path = self._path
        if not path.is_dir():
            missing = no_run(path.absolute(), "")
            raise SnapshotError(missing.what, where=self.where, fix=missing.fix)
        inside = [*found_in(path / "snapshots"), *found_in(path)]
        return inside or [each for each in found_in(path.absolute().parent) if each.path.name == path.absolute().name]

    def files(self, found: Found) -> Files:
        """The files of one of them."""
        return InFolder(found.path)

    def total_bytes(self, found: Found) -> int:
        """What it takes on the disk."""
        return sum(path.stat().st_size for path in found.path.iterdir() if path.is_file())

    def changed(self, found: Found) -> float | None:
        """When it was written to last."""
        return max(path.stat().st_mtime for path in (found.path, *found.path.iterdir()))

    def remove(self, found: Found) -> None:
        """Remove it from the disk."""
        discard(found.path, Disk())
