"""The display of a run: one live line at the bottom of a terminal, everything else above it; plain lines elsewhere.

The live line is redrawn in one write, over itself, so that it never flickers. The owner of the terminal owns the
display: the process of a script that runs alone, or the head of `manyhosts run`, which workers send what to show.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

from manyhosts.listeners.figures import amount, clock, number, rate
from manyhosts.listeners.paint import bare, fitted, paint, writable
from manyhosts.records import plain_text

Fields = Mapping[str, Any]

_PLAIN_EVERY_S = 10.0
_ERASE = "\r\x1b[K"
_RATE, _STEP = 7, 3
"""How soon learning rate and step give way on a narrow terminal: higher ranks go first."""
_LONGEST_BAR, _SHORTEST_BAR = 20, 6


class Display:
    """Shows lines that stay and, on a terminal, one that lives. Safe to call from any thread; never raises.

    `NO_COLOR` and `TERM=dumb` are honoured. A stream that is closed at the other end is left alone.
    """

    def __init__(self, stream: TextIO, errors: TextIO | None = None) -> None:
        """On `stream`. Lines that workers wrote to stderr go to `errors`, where that is given."""
        self._stream = stream
        self._errors = errors or stream
        self._lock = threading.RLock()
        self._live = _is_terminal(stream)
        self._coloured = self._live and not os.environ.get("NO_COLOR")
        self._drawn = ""
        self._line_is_open = False
        """The script has written a line's beginning, which the live line must not be drawn over."""
        self._next_plain = 0.0
        self._guarded: list[tuple[str, TextIO]] = []

    def line(self, text: str, prefix: str = "", is_error: bool = False) -> None:
        """Lines that a worker wrote, without the end of the last. `prefix` is before each."""
        prefix = paint(prefix, "yellow" if is_error else "cyan") if self._coloured else prefix
        text = prefix + text.replace("\n", "\n" + prefix) if prefix else text
        self._above(writable(text, self._stream.encoding), to_errors=is_error)

    def say(self, text: str) -> None:
        """Lines of our own that stay. Paint in them is taken off where it would not show."""
        self._next_plain = time.monotonic() + _PLAIN_EVERY_S
        text = plain_text.lines(text)
        self._above(self._fit(fitted(text, _columns(self._stream)) if self._live else text))

    def warn(self, text: str) -> None:
        """Lines of the launcher's own that stay, on stderr."""
        text = plain_text.lines(text)
        self._above(self._fit(fitted(text, _columns(self._stream)) if self._live else text), to_errors=True)

    def progress(self, fields: Fields) -> None:
        """Show how far the run is: see `live_line` for the fields. `ended` takes the live line away."""
        with self._lock:
            if fields.get("ended"):
                self._take_down()
            elif self._live:
                self._drawn = self._fit(live_line(fields, _columns(self._stream) - len("^C") - 1))
                if not self._line_is_open:
                    self._write(self._stream, f"\r{self._drawn}\x1b[K")
            elif "awaited" not in fields and time.monotonic() >= self._next_plain:
                if self._next_plain:
                    self._write(self._stream, self._fit(live_line(fields, 120, with_bar=False)) + "\n")
                self._next_plain = time.monotonic() + _PLAIN_EVERY_S

    def guard(self) -> None:
        """Let what this process prints on the terminal appear above the live line, from now until `close`."""
        with self._lock:
            if not self._live or self._guarded:
                return
            for name in ("stdout", "stderr"):
                original = getattr(sys, name)
                if _is_terminal(original):
                    self._guarded.append((name, original))
                    setattr(sys, name, _Guarded(original, self))

    def close(self) -> None:
        """Take the live line away and give the terminal back. Safe to call twice."""
        with self._lock:
            self._take_down()
            for name, original in self._guarded:
                if isinstance(getattr(sys, name), _Guarded):
                    setattr(sys, name, original)
            self._guarded.clear()

    def write_guarded(self, stream: TextIO, text: str) -> int:
        """Write what the script prints, just as it is, with the live line out of its way."""
        with self._lock:
            if self._drawn and not self._line_is_open:
                self._write(self._stream, _ERASE)
            count = stream.write(text)
            if text:
                self._line_is_open = not text.endswith("\n")
            if self._drawn and not self._line_is_open:
                stream.flush()
                self._write(self._stream, self._drawn)
            return count

    def _above(self, text: str, to_errors: bool = False) -> None:
        with self._lock:
            stream = self._errors if to_errors else self._stream
            if self._live and self._drawn and not self._line_is_open:
                if stream is self._stream:
                    self._write(stream, f"{_ERASE}{text}\n{self._drawn}")
                    return
                self._write(self._stream, _ERASE)
                self._write(stream, text + "\n")
                self._write(self._stream, self._drawn)
                return
            self._write(stream, ("\n" if self._line_is_open else "") + text + "\n")
            self._line_is_open = False

    def _take_down(self) -> None:
        if self._drawn and not self._line_is_open:
            self._write(self._stream, _ERASE)
        self._drawn = ""

    def _fit(self, text: str) -> str:
        return writable(text if self._coloured else bare(text), self._stream.encoding)

    def _write(self, stream: TextIO, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader went away; the run does not depend on it
            stream.write(text)
            stream.flush()


class _Guarded:
    """Replaces `sys.stdout` or `sys.stderr` while a live line is on the terminal."""

    def __init__(self, stream: TextIO, owner: Display) -> None:
        self._stream, self._owner = stream, owner

    def write(self, text: str) -> int:
        return self._owner.write_guarded(self._stream, text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def live_line(fields: Fields, width: int, with_bar: bool = True) -> str:
    """The line for `epoch` (from 1), `epochs`, `step`, `total_steps`, `loss`, `lr`, `samples_per_second`,
    `seconds_left`, `waiting` (the share of the last steps that continued waiting for other workers), `fraction` (of the
    run, 0 to 1) and `restarts`, in at most `width` columns. What is not known is left out. Before there is anything to
    know: `awaited`, for so many `seconds`.
    """
    if "awaited" in fields:
        return paint(f"{fields['awaited']}  {clock(fields['seconds'])}"[:width], "dim")
    epoch, epochs, step, total = (fields.get(name) for name in ("epoch", "epochs", "step", "total_steps"))
    parts: list[tuple[int, str]] = []  # how soon a narrow terminal drops it, and the text
    if epoch is not None:
        of_all = f"{epoch:>{len(str(epochs))}}/{epochs}" if epochs else f"{epoch}"
        parts.append((0, paint(f"epoch {of_all}", "bold")))
    bar_at = len(parts)
    if step is not None:
        parts.append((_STEP, f"step {step}/{total}" if total else f"step {step}"))
    parts += _figures(fields)
    parts += _troubles(fields)
    if fields.get("seconds_left") is not None:
        parts.append((2, paint(f"{clock(fields['seconds_left'])} left", "dim")))
    if _width(parts) > width:
        parts = [part for part in parts if part[0] != _RATE]
    if _width(parts) > width and total:
        parts = [(rank, text.removesuffix(f"/{total}") if rank == _STEP else text) for rank, text in parts]
    while len(parts) > 1 and _width(parts) > width:
        parts.remove(max(parts))
    room = width - _width(parts) - 2
    if with_bar and fields.get("fraction") is not None and room >= _SHORTEST_BAR:
        parts.insert(min(bar_at, len(parts)), (0, _progress_bar(fields["fraction"], min(room, _LONGEST_BAR))))
    return "  ".join(text for _, text in parts)


def _figures(fields: Fields) -> list[tuple[int, str]]:
    """Loss, learning rate and speed, as far as they are known."""
    parts = []
    if fields.get("loss") is not None:
        parts.append((1, f"loss {number(fields['loss'])}"))
    if fields.get("lr") is not None:
        parts.append((_RATE, f"lr {number(fields['lr'])}"))
    if fields.get("samples_per_second"):
        parts.append((4, rate(fields["samples_per_second"])))
    return parts


def _troubles(fields: Fields) -> list[tuple[int, str]]:
    """What holds the run up, where anything does."""
    parts = []
    if fields.get("waiting", 0.0) >= 0.01:
        parts.append((6, paint(f"{fields['waiting']:.0%} waiting", "dim")))
    if fields.get("restarts"):
        parts.append((5, paint(amount(fields["restarts"], "restart"), "yellow")))
    return parts


def _progress_bar(fraction: float, width: int) -> str:
    halves = round(min(max(fraction, 0.0), 1.0) * width * 2)
    done = "━" * (halves // 2) + "╸" * (halves % 2)
    return paint(done, "cyan") + paint("─" * (width - len(done)), "dim")


def _width(parts: list[tuple[int, str]]) -> int:
    return sum(len(bare(text)) for _, text in parts) + 2 * (len(parts) - 1)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
