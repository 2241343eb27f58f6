"""Follows a file of JSON lines while another process adds to it, cuts it back or puts another in its place."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from manyhosts.records.line_file import Line, parsed_line

_MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class News:
    """What one look has found."""

    lines: list[Line]
    began_again: bool
    """Whether the file is another one than before, or shorter: everything that was read earlier counts no more."""
    more: bool
    """Whether there is more to read at once."""


@dataclass(slots=True)
class Follower:
    """Reads what is new in `path` each time that it is asked; a half-written last line waits until it is complete.

    The file stays open, so that the number by which the system knows it is not given to the next one.
    """

    path: Path
    decode: Callable[[Line], Line]
    _descriptor: int = field(default=-1, init=False)
    _place: int = field(default=0, init=False)

    def look(self) -> News:
        """What is new. Of a long file a part at a time, so that a display can show how far it is."""
        began_again = self._open_present()
        if self._descriptor < 0:
            return News([], began_again, more=False)
        block = os.pread(self._descriptor, _MOST_BYTES, self._place)
        complete = block.rfind(b"\n") + 1
        if not complete and len(block) == _MOST_BYTES:  # no line of ours is so long
            self._place += len(block)
            return News([], began_again, more=True)
        self._place += complete
        lines = [line for text in block[:complete].splitlines(keepends=True) if (line := parsed_line(text)) is not None]
        return News([self.decode(line) for line in lines], began_again, more=len(block) == _MOST_BYTES)

    def close(self) -> None:
        """Let go of the file. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_present(self) -> bool:
        """Have the file open that has the name now. Returns whether what was read before counts no more."""
        try:
            now = os.stat(self.path)
        except OSError:
            return False  # not there yet, or not at this moment: what was read stays
        if self._descriptor >= 0:
            opened = os.fstat(self._descriptor)
            if (opened.st_dev, opened.st_ino) == (now.st_dev, now.st_ino) and opened.st_size >= self._place:
                return False
            self.close()
        had_read, self._place = self._place > 0, 0
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1
        return had_read
