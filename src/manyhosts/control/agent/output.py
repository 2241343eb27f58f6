"""A worker's output: cut into lines that are never mixed, and kept in its log."""

from __future__ import annotations

_LONGEST_LINE_BYTES = 1 << 20


class Lines:
    """Cuts bytes into lines of text.

    Of a line that was overwritten by carriage returns (a progress bar), the last state counts, as on a terminal.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._glimpsed = ""

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that `chunk` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [_text(line) for line in lines]

    def glimpse(self) -> list[str]:
        """The newest state of a progress bar under way, if it has another one than last time."""
        bar, sign, _ = self._rest.rpartition(b"\r")
        newest = _text(bar or self._rest) if sign else ""
        if newest == self._glimpsed:
            return []
        self._glimpsed = newest
        return [newest] if newest.strip() else []

    def end(self) -> list[str]:
        """What came after the last line break."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
