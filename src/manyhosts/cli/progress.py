"""What is being done, on a terminal."""

from __future__ import annotations

from typing import TextIO


class Progress:
    """One line that says what is being done, on a terminal; it is gone when the result comes."""

    def __init__(self, stream: TextIO, *, silent: bool) -> None:
        self._stream, self._shown = stream, not silent and stream.isatty()

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._shown:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()

    def doing(self, text: str) -> None:
        """Replace the line by what happens."""
        self.show(f"{text} …")

    def close(self) -> None:
        """Take the line away."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
