"""Where the words of a run appear: the workers' lines, progress, and what the launcher itself has to say."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from manyhosts.records import plain_text

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Workers paint what they have to say for a terminal; a file is to have none of it."""


class Display(Protocol):
    """A terminal, a file, or a test."""

    def line(self, text: str, prefix: str, is_error: bool) -> None:
        """Show lines of a worker's output. `prefix` names the worker, before each; empty for the only one."""

    def progress(self, fields: Mapping[str, Any]) -> None:
        """Show how far training is; each call replaces the one before."""

    def say(self, text: str) -> None:
        """Show lines about the run, permanently."""

    def warn(self, text: str) -> None:
        """Show lines of the launcher's own, which are not part of what the script prints; on stderr."""

    def close(self) -> None:
        """Leave the terminal as it was found."""


class PlainDisplay:
    """Prints lines and no progress. Once its reader is gone, it continues in silence."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out, self._err = out, err

    def line(self, text: str, prefix: str, is_error: bool) -> None:
        """Print it."""
        self._print(
            self._err if is_error else self._out, prefix + (text.replace("\n", "\n" + prefix) if prefix else text)
        )

    def progress(self, fields: Mapping[str, Any]) -> None:
        """Print nothing: lines cannot be replaced here."""

    def say(self, text: str) -> None:
        """Print `text`."""
        self._print(self._out, _COLOURS.sub("", plain_text.lines(text)))

    def warn(self, text: str) -> None:
        """Print `text` on stderr."""
        self._print(self._err, _COLOURS.sub("", plain_text.lines(text)))

    def close(self) -> None:
        """Nothing to undo."""

    def _print(self, stream: TextIO, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a pipe that was closed, a terminal that is gone
            stream.write(text + "\n")
            stream.flush()
