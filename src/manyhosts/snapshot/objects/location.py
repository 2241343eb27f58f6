"""How snapshots lie in an object store: nothing is ever written over, and the manifest makes one complete.

    <address>/step-00000400.<token>/state.json, tensors-…   the files of the snapshot, as on the disk
                                    metrics.jsonl.gz, …     the record of the run up to there; .end.gz: to its end
                                    manifest.json           written last: with it the snapshot is complete
    <address>/best.<token>/…

The token is of the content, so two snapshots of one step do not mix, and an upload that broke off continues where it
was. A reader needs no list that is up to date: a manifest that can be read names every file with its size and hash.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manyhosts.errors import SnapshotError
from manyhosts.records.manifest import NAME, Found, Manifest, read, verify
from manyhosts.snapshot.objects.client import Client, StoreTrouble

_FOLDER = re.compile(r"(?:step-(?P<step>\d{8,})|best)\.[0-9a-f]{12}")


_END = ".end.gz"


class Replaced(Exception):
    """The snapshot on the disk is another one by now: there is no use in copying this one."""


@dataclass(frozen=True, slots=True)
class InStore:
    """The files of one snapshot in a store."""

    client: Client
    folder: str

    @property
    def where(self) -> str:
        """The address of the folder."""
        return f"{self.client.address}/{self.folder}"

    def size(self, name: str) -> int:
        """How many bytes the file has."""
        return self.client.size(f"{self.folder}/{name}")

    def pieces(self, name: str) -> Iterator[bytes]:
        """Its content, piece by piece."""
        return self.client.pieces(f"{self.folder}/{name}")


class ObjectStoreLocation:
    """The snapshots below one address of an object store."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.where = client.address

    def found(self) -> list[Found]:
        """Every snapshot that the store's list knows; one without a manifest is half-written."""
        matches = [match for name in self.client.folders() if (match := _FOLDER.fullmatch(name))]
        listed = []
        for match in matches:
            sizes = self.client.sizes(match[0])
            if sizes:
                how: Literal["", "half"] = "" if NAME in sizes else "half"
                listed.append(Found(path=Path(match[0]), step=int(match["step"] or -1), how=how))
        return sorted(listed, key=lambda found: (-found.step, found.how, found.path.name))

    def files(self, found: Found) -> InStore:
        """The files of one of them."""
        return InStore(self.client, found.path.name)

    def total_bytes(self, found: Found) -> int:
        """What it takes in the store."""
        return sum(self.client.sizes(found.path.name).values())

    def changed(self, found: Found) -> float | None:
        """When it was written to last."""
        folder = found.path.name
        times = [self.client.changed(f"{folder}/{name}") for name in self.client.sizes(folder)]
        return None if None in times else max((time for time in times if time is not None), default=None)

    def remove(self, found: Found) -> None:
        """Remove it, the manifest first."""
        folder = found.path.name
        self.client.remove(f"{folder}/{NAME}")  # asked for whatever the list says: without it, it is no snapshot
        for name in self.client.sizes(folder):
            self.client.remove(f"{folder}/{name}")
        self.client.remove_folder(folder)

    def name_of(self, name: str, manifest: Manifest) -> str:
        """The folder of the snapshot `name` (`best`, `step-00000400`) with this manifest."""
        return f"{name}.{hashlib.sha256(manifest.to_text().encode()).hexdigest()[:12]}"

    def add(self, path: Path, records: Mapping[str, Path]) -> tuple[Found, Manifest] | None:
        """Copy the complete snapshot in the folder `path` here, with `records`, name → file; None where it is here.

        Every byte is compared with its hash before it leaves the disk, and every size when it has arrived.

        Raises:
            SnapshotError: it is damaged.
            Replaced: it is not there any more, or was replaced while it was read.
            OSError: the store, or the disk, would not have it.
        """
        plain = path.name.partition(".")[0]
        try:
            manifest = read(path)
            folder = self.name_of(plain, manifest)
            if self._has(f"{folder}/{NAME}"):
                return None
            verify(path)
            self._put(path, folder, manifest, records)
            still_there = (path / NAME).read_bytes() == manifest.to_text().encode()
        except (FileNotFoundError, SnapshotError) as trouble:
            if not (path / NAME).exists():
                raise Replaced from trouble
            if isinstance(trouble, FileNotFoundError):
                raise StoreTrouble(f"there is no {self.where} any more") from trouble
            raise
        if not still_there:
            raise Replaced
        self._seal(folder, manifest)
        return Found(path=Path(folder), step=-1 if plain == "best" else manifest.facts.step, how=""), manifest

    def _put(self, path: Path, folder: str, manifest: Manifest, records: Mapping[str, Path]) -> None:
        for name, file in manifest.files.items():
            if not self._has(f"{folder}/{name}", file.bytes):
                self.client.put_file(f"{folder}/{name}", path / name)
        self._put_records(folder, records, ".gz")

    def _put_records(self, folder: str, records: Mapping[str, Path], ending: str) -> None:
        for name, record in records.items():
            if record.exists():
                self.client.put(f"{folder}/{name}{ending}", gzip.compress(record.read_bytes(), 6, mtime=0))

    def add_end(self, path: Path, records: Mapping[str, Path]) -> None:
        """Put `records`, as they are at the end of the run, next to the copy of the snapshot in `path`, if it is here.

        Raises:
            SnapshotError: the one on the disk cannot be read.
            OSError: the store, or the disk, would not have it.
        """
        folder = self.name_of(path.name.partition(".")[0], read(path))
        if self._has(f"{folder}/{NAME}"):
            self._put_records(folder, records, _END)

    def _seal(self, folder: str, manifest: Manifest) -> None:
        for name, file in manifest.files.items():
            if not self._has(f"{folder}/{name}", file.bytes):
                raise StoreTrouble(f"{name} has not arrived there completely")
        self.client.put(f"{folder}/{NAME}", manifest.to_text().encode())

    def _has(self, name: str, size: int | None = None) -> bool:
        """Whether there is such an object, and of that size: asked of itself, for a list may be out of date."""
        try:
            found = self.client.size(name)
        except FileNotFoundError:
            return False
        return size is None or found == size

    def record(self, found: Found, name: str) -> bytes | None:
        """The file `name` of the run's record, as it was at the end, or when the snapshot was copied; None for none."""
        for ending in (_END, ".gz"):
            with suppress(FileNotFoundError, gzip.BadGzipFile, EOFError, zlib.error):
                return gzip.decompress(self.client.read(f"{found.path.name}/{name}{ending}"))
        return None
