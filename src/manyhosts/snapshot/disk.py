"""Every touch of the disk that writing a snapshot makes, one method each: the seam where tests let a disk fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


class Disk:
    """The real one. Nothing here is finished before it would survive a power cut."""

    def make_folder(self, path: Path) -> None:
        """Make `path` and what leads to it. No error where it is there already."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        """Open a new, empty file for writing, unbuffered: each `write` is one call to the system."""
        return path.open("wb", buffering=0)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        """Append all of `data`."""
        while data:
            data = data[file.write(data) :]

    def sync(self, file: BinaryIO) -> None:
        """Wait until the content of `file` is on the disk."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in `path` are on the disk: a file may outlive a power cut without its name."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Give `source` its new name, in one stroke. `target` must not be a folder with something in it."""
        os.replace(source, target)

    def remove_file(self, path: Path) -> None:
        """Remove one file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove a folder with all that is in it. No error where it is gone already."""
        with suppress(FileNotFoundError):
            shutil.rmtree(path)

    def write_file(self, path: Path, pieces: Iterable[memoryview | bytes]) -> None:
        """A complete file, on the disk when this returns."""
        with self.create(path) as file:
            for piece in pieces:
                self.write(file, memoryview(piece))
            self.sync(file)
