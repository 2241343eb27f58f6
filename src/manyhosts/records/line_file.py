"""A file of JSON lines that grows at its end: cheap to add to, readable after a crash, cut back when a run resumes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from manyhosts.records.background_writer import BackgroundWriter
from manyhosts.records.json_text import parsed

Line = dict[str, Any]
T = TypeVar("T")

_LOG = logging.getLogger("manyhosts")
_EVERY_S = 0.4  # a line is with the operating system within a second, also while the machine is busy
_MOST_UNWRITTEN_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 16


class LineFile(Generic[T]):
    """Adds items to `path`, one line each as `encode` writes them, from a thread.

    A line is written at once or, where the disk is full, when there is room again: meanwhile up to 64 MiB wait.
    """

    def __init__(self, path: Path, encode: Callable[[T], str]) -> None:
        """Make `path` if need be, and take away the last line if a crash tore it."""
        self.path = path
        self._encode = encode
        self._lock = threading.RLock()
        self._unwritten = bytearray()
        self._trouble: OSError | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._open()
        self._background_writer: BackgroundWriter[T] = BackgroundWriter(
            self._add, every_s=_EVERY_S, name=f"writes {path.name}"
        )
        self.add = self._background_writer.put
        """Add one item. It is on its way within a second; `flush` to be sure of it."""

    def hand_over(self) -> None:
        """Have every line with the operating system, which keeps it whatever becomes of this process."""
        self._background_writer.flush()

    def flush(self) -> None:
        """Have every line on the disk, safe from a power cut too, before this returns.

        Raises:
            OSError: the disk does not take them.
        """
        self._background_writer.flush()
        with self._lock:
            if self._trouble is not None:
                raise self._trouble
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Write what is left and close the file. Safe to call twice."""
        self._background_writer.close()
        with self._lock:
            if self._descriptor >= 0:  # closed once only: the number may belong to another file by now
                os.close(self._descriptor)
                self._descriptor = -1

    def tail(self, until: Callable[[Line], bool]) -> list[tuple[int, Line]]:
        """The last lines, each with the place where it starts: from the newest that `until` holds for, to the end."""
        self._background_writer.flush()
        found: list[tuple[int, Line]] = []
        for start, line in _backwards(self.path):
            found.append((start, line))
            if until(line):
                break
        return found[::-1]

    def replace_tail(self, start: int, lines: list[Line]) -> None:
        """Put `lines` in the place of all that is from byte `start` on, completely or not at all."""
        self._background_writer.flush()
        with self._lock:
            half = self.path.with_name(f".{self.path.name}.half")
            with self.path.open("rb") as old, half.open("wb") as new:
                shutil.copyfileobj(old, new)
                new.truncate(start)
                new.seek(start)
                new.write("".join(json.dumps(line) + "\n" for line in lines).encode())
                new.flush()
                os.fsync(new.fileno())
            os.replace(half, self.path)
            os.close(self._descriptor)
            self._descriptor = self._open()

    def _open(self) -> int:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(descriptor, _end_of_last_complete_line(descriptor))
        return descriptor

    def _add(self, items: list[T]) -> None:
        encode = self._encode
        text = "".join([encode(item) for item in items])
        with self._lock:
            if len(self._unwritten) < _MOST_UNWRITTEN_BYTES:
                self._unwritten += text.encode()
            try:
                while self._unwritten:
                    del self._unwritten[: os.write(self._descriptor, self._unwritten)]
            except OSError as trouble:
                if self._trouble is None:
                    _LOG.warning(
                        "cannot write %s: %s. Training continues; its lines wait.", self.path, trouble.strerror
                    )
                self._trouble = trouble
            else:
                self._trouble = None


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file that may still be growing; none where there is no file, without a half-written last one."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in file:
            line = parsed_line(text)
            if line is not None:
                yield line


def read_from_end(path: Path) -> Iterator[Line]:
    """The same lines, the last one first."""
    return (line for _, line in _backwards(path))


def parsed_line(text: bytes) -> Line | None:
    """The object that a line holds; None where it is half-written, or holds none."""
    if not text.endswith(b"\n"):
        return None
    try:
        line = parsed(text)
    except ValueError:
        return None  # a disk that was full, or a host that lost power, can leave zeros in the middle
    return line if isinstance(line, dict) else None


def _backwards(path: Path) -> Iterator[tuple[int, Line]]:
    """The lines of `path` from the last to the first, each with the place where it starts."""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        rest = b""
        while start > 0:
            size = min(_BLOCK_BYTES, start)
            start -= size
            file.seek(start)
            block = file.read(size) + rest
            pieces = block.splitlines(keepends=True)
            rest = pieces.pop(0) if start > 0 else b""  # may continue in the block before
            place = start + len(block)
            for text in reversed(pieces):
                place -= len(text)
                line = parsed_line(text)
                if line is not None:
                    yield place, line


def _end_of_last_complete_line(descriptor: int) -> int:
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
