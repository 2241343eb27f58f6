"""From an object store to a disk that has nothing as new: the snapshot that a run continues from, and its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from manyhosts.errors import SnapshotError
from manyhosts.records.atomic_file import write_atomically
from manyhosts.records.manifest import NAME, Found, Manifest, read_files, verify
from manyhosts.snapshot.commit import put_in_place
from manyhosts.snapshot.disk import Disk
from manyhosts.snapshot.load import Fits
from manyhosts.snapshot.objects.location import ObjectStoreLocation


@dataclass(slots=True)
class Brought:
    """What became of it."""

    found: Found | None = None
    """What is on the disk now; None where there was nothing newer that can be used."""
    passed_over: list[str] = field(default_factory=list)
    """Newer ones that cannot be used, each with its address and reason."""


def bring_newer(location: ObjectStoreLocation, folder: Path, fits: Fits, *, than: int, disk: Disk) -> Brought:
    """Bring the newest snapshot that is complete, fits, and is of a later step than `than`, into `folder`.

    Raises:
        OSError: the store, or the disk, would not have it.
    """
    brought = Brought()
    for found in location.found():
        if found.how or found.step <= than:
            continue
        try:
            manifest = read_files(location.files(found))
            if reason := fits(manifest):
                raise SnapshotError(reason)
            _copy(location, found, manifest, folder / found.name, disk)
        except SnapshotError as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # else it is gone, and a list had not heard of it
                brought.passed_over.append(f"{location.files(found).where}: {error.what}")
        else:
            brought.found = found
            return brought
    return brought


def bring_best(location: ObjectStoreLocation, path: Path, fits: Fits, disk: Disk) -> None:
    """Bring the best model that was copied last, where there is one that is complete, and later than that of the disk.

    Raises:
        OSError: the store, or the disk, would not have it.
    """
    here = -1.0
    with suppress(SnapshotError):
        here = verify(path).time
    complete: list[tuple[float, Found, Manifest]] = []
    for found in location.found():
        if found.step < 0 and not found.how:
            with suppress(SnapshotError):
                manifest = read_files(location.files(found))
                if not fits(manifest) and manifest.time > here:
                    complete.append((manifest.time, found, manifest))
    for _, found, manifest in sorted(complete, key=lambda each: -each[0]):
        with suppress(SnapshotError):
            _copy(location, found, manifest, path, disk)
            return


def bring_records(location: ObjectStoreLocation, found: Found, records: Mapping[str, Path]) -> Sequence[str]:
    """Bring what of the run's record is not on the disk. Returns the names of what is incomplete in the store."""
    missing = []
    for name, path in records.items():
        if path.exists() and path.stat().st_size:
            continue
        content = location.record(found, name)
        if content is None:
            missing.append(name)
        else:
            write_atomically(path, content)
    return missing


def _copy(location: ObjectStoreLocation, found: Found, manifest: Manifest, path: Path, disk: Disk) -> None:
    """Copy a snapshot to `path`: completely, every byte compared with its hash, or not at all."""
    half = path.with_name(f"{path.name}.{found.path.name.rpartition('.')[2]}.half")
    disk.remove_folder(half)
    disk.make_folder(half)
    try:
        files = location.files(found)
        for name in manifest.files:
            disk.write_file(half / name, files.pieces(name))
        disk.write_file(half / NAME, [manifest.to_text().encode()])
        verify(half)
    except FileNotFoundError as gone:
        disk.remove_folder(half)
        raise SnapshotError("a file of it is missing") from gone
    except BaseException:
        with suppress(OSError):
            disk.remove_folder(half)
        raise
    put_in_place(half, path, disk)
