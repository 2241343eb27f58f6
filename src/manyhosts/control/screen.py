"""Standard output and error of a process that must never wait for its reader.

A terminal that is stopped by Ctrl-S, or a pager that shows its first page, takes nothing. One thread alone writes; what
waits for it is bounded, and where it grows too long the oldest lines are dropped and counted. What the launcher
itself has to say stays.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO, cast

MOST_WAITING_BYTES = 8 << 20
"""What may wait to be read, about."""
STUCK_S = 30.0
"""So long a reader that takes nothing is waited for at the end."""
SLOW_S = 30.0
"""So long one that takes little gets everything at the end; then the last lines only, for as long again."""
LAST_BYTES = 64 << 10

_ENTRY_BYTES = 100
"""The cost of an entry of the queue in addition to its text."""
_PIECE_BYTES = select.PIPE_BUF
_AT_ONCE = 16 << 10
_ERASE = "\r\x1b[K"
_OWN = re.compile(r"(?:\r|\x1b\[[0-9;]*[A-Za-z])*manyhosts: ")
"""How a line of the launcher's own begins: a warning, or how many lines of a worker are missing."""


class Screen:
    """The two streams as `out` and `err`, for a display to write to. Nothing here waits but `close`, within limits.

    What goes to both is read in the order in which it was written. A text without a line break that begins with a
    carriage return is a state of a live line, and takes the place of one that still waits.
    """

    def __init__(self, out: TextIO, err: TextIO, *, logs: str | os.PathLike[str] = "") -> None:
        """`logs` is where lines that were dropped can be found."""
        self._logs = os.fspath(logs)
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Stream, str]] = deque()
        self._size = 0
        self._missed = 0
        """Lines that were dropped and not reported yet."""
        self._writing = False
        self._closing = False
        self._over = False
        self._taken = time.monotonic()
        """When the reader last took something."""
        self._thread: threading.Thread | None = None
        self._err = Stream(self, err)
        self.out, self.err = cast(TextIO, Stream(self, out)), cast(TextIO, self._err)

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, stream: Stream, text: str) -> None:
        """Have `text` written to `stream`, one of the two, when its turn comes. From any thread."""
        with self._changed:
            if self._over or stream.is_closed or not text:
                return
            is_live = text.startswith("\r") and "\n" not in text
            if is_live and self._waiting and self._waiting[-1][0] is stream and "\n" not in self._waiting[-1][1]:
                self._size -= len(self._waiting.pop()[1]) + _ENTRY_BYTES
            self._waiting.append((stream, text))
            self._size += len(text) + _ENTRY_BYTES
            if self._size > MOST_WAITING_BYTES:
                self._drop_to(MOST_WAITING_BYTES // 2)  # by half: one notice for many lines
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="screen", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, *, stuck_s: float | None = None) -> bool:
        """Have everything written. Returns whether it was: a reader that takes nothing or little is waited for a while.

        After that nothing is written any more. Safe to call twice.
        """
        stuck_s = STUCK_S if stuck_s is None else stuck_s
        began = time.monotonic()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            while (self._waiting or self._missed or self._writing) and not self._over:
                now = time.monotonic()
                if now - max(self._taken, began) > stuck_s or now - began > 2 * SLOW_S:
                    self._waiting.clear()
                    self._over = True
                    return False
                if now - began > SLOW_S and self._size > LAST_BYTES:
                    self._drop_to(LAST_BYTES)
                self._changed.wait(0.05)
            self._over = True
        return True

    def _drop_to(self, most: int) -> None:
        kept: list[tuple[Stream, str]] = []
        kept_size = 0
        while self._size > most and self._waiting:
            stream, text = self._waiting.popleft()
            size = len(text) + _ENTRY_BYTES
            self._size -= size
            if _OWN.match(text) and kept_size + size <= LAST_BYTES:
                kept.append((stream, text))
                kept_size += size
            else:
                self._missed += text.count("\n")
        self._waiting.extendleft(reversed(kept))
        self._size += kept_size

    def _write_all(self) -> None:
        while (piece := self._next()) is not None:
            stream, text = piece
            stream.write_through(text, self._note_taken)

    def _next(self) -> tuple[Stream, str] | None:
        """What is to be written now: what is next for one of the streams, as much as goes at once."""
        with self._changed:
            self._writing = False
            while not self._waiting and not self._missed:
                self._changed.notify_all()
                if self._closing:
                    return None
                self._changed.wait()
            self._writing = True
            if self._missed:
                return self._err, self._notice()
            stream, text = self._waiting.popleft()
            texts, length = [text], len(text)
            self._size -= len(text) + _ENTRY_BYTES
            while self._waiting and self._waiting[0][0] is stream and length < _AT_ONCE:
                text = self._waiting.popleft()[1]
                self._size -= len(text) + _ENTRY_BYTES
                texts.append(text)
                length += len(text)
            return stream, "".join(texts)

    def _notice(self) -> str:
        missed, self._missed = self._missed, 0
        lines = "1 line was" if missed == 1 else f"{missed} lines were"
        where = f"; the logs of all workers are in {self._logs}" if self._logs else ""
        erase = _ERASE if self.err.isatty() else ""
        return (
            f"{erase}manyhosts: {lines} not shown here, because what was printed before was not read in time{where}\n"
        )

    def _note_taken(self) -> None:
        self._taken = time.monotonic()


class Stream(io.TextIOBase):
    """What a display writes to in place of the stream itself."""

    def __init__(self, screen: Screen, stream: TextIO) -> None:
        self._screen, self._stream = screen, stream
        self._is_terminal = _asked(stream.isatty, False)
        self._number = _asked(stream.fileno, -1)
        self.is_closed = False
        """Whether its reader is gone."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain value in the parent
        """How its text becomes bytes."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return bool(self._is_terminal)

    def fileno(self) -> int:
        """Its file descriptor.

        Raises:
            OSError: there is none.
        """
        if self._number < 0:
            raise io.UnsupportedOperation("fileno")
        return self._number

    def write(self, text: str) -> int:
        """Have `text` written when its turn comes."""
        self._screen.put(self, text)
        return len(text)

    def flush(self) -> None:
        """Nothing: the thread that writes keeps nothing back."""

    def write_through(self, text: str, on_taken: Callable[[], None]) -> None:
        """Write `text` at once and wait until the reader has taken it; `on_taken` is called after each piece."""
        try:
            self._stream.flush()  # what was written before there was a screen
            if self._number < 0:
                self._stream.write(text)
                self._stream.flush()
                on_taken()
                return
            data = memoryview(self._encoded(text))
            while data:
                try:
                    data = data[os.write(self._number, data[:_PIECE_BYTES]) :]
                except BlockingIOError:  # a process that shares the terminal (ssh) may make it non-blocking
                    waiting = select.poll()
                    waiting.register(self._number, select.POLLOUT)
                    waiting.poll(1000)
                    continue
                on_taken()
        except (OSError, ValueError) as error:
            # The reader went away; the run does not depend on it. A disk that is full may have room again.
            self.is_closed = getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT, errno.EIO)

    def _encoded(self, text: str) -> bytes:
        try:
            return text.encode(self.encoding, getattr(self._stream, "errors", None) or "strict")
        except UnicodeEncodeError:
            return text.encode(self.encoding, "replace")


def say_last(stream: TextIO, text: str) -> None:
    """Print `text` before a process ends, and wait for its reader for some seconds at most."""
    screen = Screen(stream, stream)
    screen.out.write(text)
    screen.close(stuck_s=min(STUCK_S, 5.0))


def _asked(ask: Callable[[], int], otherwise: int) -> int:
    try:
        return ask()
    except (AttributeError, OSError, ValueError):
        return otherwise
