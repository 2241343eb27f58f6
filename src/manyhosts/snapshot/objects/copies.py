"""Copies complete snapshots from the disk to an object store, one at a time, on a thread, during training.

What is offered takes the place of the one before it that still waits: a network slower than the snapshots come leaves
some out, and the newest is what counts. A copy that fails costs this copy and nothing else: it is said, the snapshot
stays on the disk, and the next one is tried.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from manyhosts.errors import ManyhostsError, SnapshotError
from manyhosts.events import Note, SnapshotCopied
from manyhosts.records.atomic_file import write_atomically
from manyhosts.records.manifest import NAME, Found, Manifest, read_files, verify
from manyhosts.snapshot.commit import put_in_place
from manyhosts.snapshot.disk import Disk
from manyhosts.snapshot.load import Fits
from manyhosts.snapshot.objects.client import sentence
from manyhosts.snapshot.objects.location import ObjectStoreLocation, Replaced
from manyhosts.snapshot.prune import older


class Copier:
    """Copies what it is offered to the location that `reach` gives, where the newest `keep` stay."""

    def __init__(
        self, reach: Callable[[], ObjectStoreLocation], address: str, *, keep: int, records: Mapping[str, Path]
    ) -> None:
        """`records`: name → file of the run's record that goes along with each snapshot."""
        self._reach, self._address, self._keep, self._records = reach, address, keep, records
        self._location: ObjectStoreLocation | None = None
        self._lock = threading.Lock()
        self._waiting: dict[str, Path] = {}  # at most one step, and one best
        self._under_way: Path | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._news: deque[SnapshotCopied | Note] = deque()
        self._crash: BaseException | None = None
        self._has_told_of_old_ones = False

    def offer(self, path: Path) -> None:
        """Copy the complete snapshot in the folder `path`, soon. Never waits."""
        with self._lock:
            self._waiting["best" if path.name == "best" else "step"] = path
            if self._idle.is_set():
                self._idle.clear()
                threading.Thread(target=self._run, name="manyhosts-copy", daemon=True).start()

    def holds(self, path: Path) -> bool:
        """Whether `path` is being copied or waits for it: it is not to be removed."""
        with self._lock:
            return path == self._under_way or path in self._waiting.values()

    def finished(self) -> list[SnapshotCopied | Note]:
        """What became of the copies that ended since the last call. Never waits."""
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise crash
        return [self._news.popleft() for _ in range(len(self._news))]

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is left to copy, `seconds` at most. Whether nothing is."""
        return self._idle.wait(seconds)

    # What follows runs on the copying thread.

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._under_way = None
                    self._idle.set()
                    return
                self._under_way = self._waiting.pop(next(iter(self._waiting)))  # in turn, so that none waits for ever
                path = self._under_way
            try:
                self._copy(path)
            except BaseException as crash:  # a fault of ours: raised again where training sees it
                self._crash = crash

    def _copy(self, path: Path) -> None:
        begin = time.perf_counter()
        try:
            if self._location is None:
                self._location = self._reach()
            added = self._location.add(path, self._records)
        except Replaced:
            return  # the one in its place has been offered, too
        except (OSError, ManyhostsError) as trouble:
            why = trouble.what if isinstance(trouble, ManyhostsError) else sentence(trouble)
            kind = "snapshot" if isinstance(trouble, SnapshotError) else "copy"
            self._say(path, f"{path.name} is not copied to {self._address}: {why}; {_REST[kind]}")
            return
        if added is None:
            return
        found, manifest = added
        self._news.append(
            SnapshotCopied(
                step=manifest.facts.step,
                address=self._location.files(found).where,
                bytes=manifest.bytes,
                seconds=time.perf_counter() - begin,
                time=time.time(),
            )
        )
        self._remove_older(self._location, found, manifest, path)

    def _remove_older(self, location: ObjectStoreLocation, newest: Found, manifest: Manifest, path: Path) -> None:
        try:
            for found in older(location.found(), keep=self._keep, newest=newest, step=manifest.facts.step):
                location.remove(found)
        except OSError as trouble:  # the copy is complete all the same; the next one tries again
            if not self._has_told_of_old_ones:
                self._has_told_of_old_ones = True
                self._say(path, f"older snapshots cannot be removed from {self._address}: {sentence(trouble)}")

    def _say(self, path: Path, text: str) -> None:
        step = -1
        with suppress(ValueError):
            step = int(path.name.removeprefix("step-"))
        self._news.append(Note(text=text, step=max(step, 0), time=time.time()))


_REST = {
    "copy": "it stays on the disk, and the next one is tried",
    "snapshot": "the next one is tried",
}


# From an object store to a disk that has nothing as new: the snapshot that a run continues from, and its record.


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
            _copy_back(location, found, manifest, folder / found.name, disk)
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
            _copy_back(location, found, manifest, path, disk)
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


def _copy_back(location: ObjectStoreLocation, found: Found, manifest: Manifest, path: Path, disk: Disk) -> None:
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
