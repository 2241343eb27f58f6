"""The lines that a worker prints, and the file that keeps them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path

_LONGEST_LINE_BYTES = 1 << 20


class Lines:
    """Cuts bytes into lines of text.

    Of a line that was overwritten by carriage returns (a progress bar), the last state counts, as on a terminal.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown_part = ""

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that `chunk` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [_text(line) for line in lines]

    def partial_line(self) -> list[str]:
        """The newest state of a progress bar under way, if it has another one than last time."""
        bar, sign, _ = self._rest.rpartition(b"\r")
        newest = _text(bar or self._rest) if sign else ""
        if newest == self._shown_part:
            return []
        self._shown_part = newest
        return [newest] if newest.strip() else []

    def end(self) -> list[str]:
        """What came after the last line break."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


class Log:
    """`PATH`, and `PATH.1` for what was in it when it was full. Never raises: a full disk must not stop training.

    Lines of the two streams are never mixed, as long as they have less than 1 MiB. Of a progress bar under way, which
    has no line break yet, `flush_partial_line` writes what there is.
    """

    def __init__(self, path: Path, limit_bytes: int, on_gap: Callable[[str], None]) -> None:
        """Append to the file. `limit_bytes`: how large it may grow; 0: no limit.

        `on_gap` is called once, with the reason, when something could not be written.
        """
        self.path, self._limit, self._on_gap = path, limit_bytes, on_gap
        self._rest = {"out": b"", "err": b""}
        """The beginning of a line that has not ended yet."""
        self._size = 0
        self._file: io.FileIO | None = None
        self._has_gaps = False
        with contextlib.suppress(OSError):  # the next write tries again, and reports it
            self._open()

    def write(self, stream: str, chunk: bytes) -> None:
        """Keep what the worker has written to `stream`."""
        complete, sign, rest = chunk.rpartition(b"\n")
        if sign:
            self._keep(self._rest[stream] + complete + sign)
            self._rest[stream] = rest
        else:
            self._rest[stream] += rest
        if len(self._rest[stream]) > _LONGEST_LINE_BYTES:
            self._give_rest(stream)

    def note(self, text: str) -> None:
        """Keep lines that belong to the worker and that it has not written itself: its traceback."""
        if text:
            self._keep(text.encode(errors="replace") + b"\n")

    def flush_partial_line(self) -> None:
        """Keep what a progress bar under way has written so far."""
        for stream, rest in self._rest.items():
            if b"\r" in rest:
                self._give_rest(stream)

    def end(self, stream: str) -> None:
        """Keep what came after the last line break of a stream that has ended."""
        self._give_rest(stream)

    def close(self) -> None:
        """Nothing more is kept. Safe to call twice."""
        for stream in self._rest:
            self._give_rest(stream)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_rest(self, stream: str) -> None:
        rest, self._rest[stream] = self._rest[stream], b""
        self._keep(rest)

    def _open(self) -> None:
        self._file = io.FileIO(self.path, "a")
        self._size = os.fstat(self._file.fileno()).st_size

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        try:
            if self._limit and self._size and self._size + len(data) > self._limit:
                self._begin_anew()
            if self._file is None:
                self._open()
            assert self._file is not None, "it was opened"
            written = self._file.write(data) or 0
            self._size += written
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the disk took what it had room for
        except OSError as error:
            if not self._has_gaps:
                self._has_gaps = True
                self._on_gap(error.strerror or str(error))

    def _begin_anew(self) -> None:
        """The file is full: it takes the place of the one before it."""
        if self._file is not None:
            self._file.close()
            self._file = None
        with contextlib.suppress(OSError):  # then it grows beyond its size: lines count for more
            self.path.replace(f"{self.path}.1")
