"""Disks that fail: the operations of the real one, with a power cut, a full disk or a closed gate at a chosen call."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from manyhosts.snapshot.disk import Disk

Loses = Literal["nothing", "names", "names and removals"]


class PowerCut(BaseException):
    """Stands for a host that loses power: no Exception, so nothing on the way catches it."""


class CountingDisk(Disk):
    """Counts the calls that change the disk, and lets a test step in before each."""

    def __init__(self) -> None:
        self.calls = 0
        self.log: list[str] = []

    def about_to(self, operation: str, path: Path | str) -> None:
        self.calls += 1
        self.log.append(f"{operation} {Path(path).name}")

    def make_folder(self, path: Path) -> None:
        self.about_to("make", path)
        super().make_folder(path)

    def create(self, path: Path) -> BinaryIO:
        self.about_to("create", path)
        return super().create(path)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        self.about_to("write", file.name)
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self.about_to("sync", file.name)

    def sync_folder(self, path: Path) -> None:
        self.about_to("sync folder", path)

    def rename(self, source: Path, target: Path) -> None:
        self.about_to("rename", source)
        super().rename(source, target)

    def remove_file(self, path: Path) -> None:
        self.about_to("remove", path)
        super().remove_file(path)

    def remove_folder(self, path: Path) -> None:
        self.about_to("remove folder", path)
        super().remove_folder(path)


class FullDisk(CountingDisk):
    """Has no room from call number `full_from` on, until something is removed."""

    def __init__(self, full_from: int | None) -> None:
        super().__init__()
        self.full_from = full_from

    def about_to(self, operation: str, path: Path | str) -> None:
        super().about_to(operation, path)
        if operation.startswith("remove"):
            self.full_from = None
        needs_room = operation in ("make", "create", "write", "sync", "sync folder", "rename")
        if needs_room and self.full_from is not None and self.calls >= self.full_from:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class GatedDisk(CountingDisk):
    """Lets nothing through until the gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def about_to(self, operation: str, path: Path | str) -> None:
        if not self.gate.wait(timeout=120):
            raise TimeoutError("nobody opened the gate")
        super().about_to(operation, path)


@dataclass
class _Change:
    """A change to a name that is not safe yet, and how a power cut takes it back."""

    path: Path
    """Where the name is now; moves with the folders above it."""
    take_back: Callable[[Path], None]
    is_removal: bool = False


class CutDisk(CountingDisk):
    """Loses power right before call number `cut_at`, and then whatever was not synced.

    Content that was written and not synced comes back as half of it. What else is lost, unless its folder was synced,
    is said by `loses`: nothing; new names and renames; or these and removals. Newest first.
    """

    def __init__(self, grave: Path, cut_at: int | None, *, loses: Loses = "nothing") -> None:
        super().__init__()
        self.grave, self.cut_at, self.loses = grave, cut_at, loses
        self.unsafe_files: list[Path] = []
        self.unsafe_changes: list[_Change] = []

    def about_to(self, operation: str, path: Path | str) -> None:
        super().about_to(operation, path)
        if self.calls == self.cut_at:
            self.lose()
            raise PowerCut(self.log[-1])

    def lose(self) -> None:
        for path in self.unsafe_files:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        for change in reversed(self.unsafe_changes):
            if self.loses == "names and removals" or (self.loses == "names" and not change.is_removal):
                change.take_back(change.path)

    def make_folder(self, path: Path) -> None:
        was_there = path.exists()
        super().make_folder(path)
        if not was_there:
            self.unsafe_changes.append(_Change(path, lambda now: shutil.rmtree(now, ignore_errors=True)))

    def create(self, path: Path) -> BinaryIO:
        file = super().create(path)
        self.unsafe_files.append(path)
        self.unsafe_changes.append(_Change(path, lambda now: now.unlink(missing_ok=True)))
        return file

    def write(self, file: BinaryIO, data: memoryview) -> None:
        self.about_to("write", file.name)
        Disk.write(self, file, data[: len(data) // 2])
        self.about_to("write the rest of", file.name)
        Disk.write(self, file, data[len(data) // 2 :])

    def sync(self, file: BinaryIO) -> None:
        super().sync(file)
        self.unsafe_files.remove(Path(file.name))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self.unsafe_changes = [change for change in self.unsafe_changes if change.path.parent != path]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.unsafe_files = [_moved(path, source, target) for path in self.unsafe_files]
        for change in self.unsafe_changes:
            change.path = _moved(change.path, source, target)
        self.unsafe_changes.append(_Change(target, lambda now: self._rename_back(now, now.with_name(source.name))))

    def _rename_back(self, target: Path, source: Path) -> None:
        if target.exists():
            os.replace(target, source)
            for change in self.unsafe_changes:
                change.path = _moved(change.path, target, source)

    def remove_file(self, path: Path) -> None:
        self.about_to("remove", path)
        self._bury(path)

    def remove_folder(self, path: Path) -> None:
        if not path.exists():
            return
        for file in sorted(path.iterdir()):  # one by one, so that a cut may come in the middle
            self.remove_file(file)
        self.about_to("remove folder", path)
        self._bury(path)

    def _bury(self, path: Path) -> None:
        self.grave.mkdir(exist_ok=True)
        rest = self.grave / str(self.calls)
        os.replace(path, rest)

        def take_back(now: Path) -> None:
            if now.parent.exists():  # else the folder is gone for good, and what was in it with it
                os.replace(rest, now)

        self.unsafe_changes.append(_Change(path, take_back, is_removal=True))


def _moved(path: Path, source: Path, target: Path) -> Path:
    return target / path.relative_to(source) if path.is_relative_to(source) else path
