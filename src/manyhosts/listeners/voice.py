"""Who shows what rank 0 has to say: the terminal of this process, or the head of `manyhosts run`."""

from __future__ import annotations

import atexit
import sys
from typing import Protocol

from manyhosts.cluster.reports import Reporter
from manyhosts.listeners.terminal import Display, Fields


class Voice(Protocol):
    """A place to say things to the person who started the run."""

    def say(self, text: str) -> None:
        """Lines that stay."""

    def progress(self, fields: Fields) -> None:
        """What the live line shows from now on: see `terminal.live_line`."""

    def close(self) -> None:
        """Give the terminal back."""


class ToHead:
    """Sends everything to the head, which has the terminal: the output of a worker is a pipe."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def say(self, text: str) -> None:
        """Lines that stay."""
        self._reporter.send("say", text=text)

    def progress(self, fields: Fields) -> None:
        """What the live line shows from now on."""
        self._reporter.send("progress", **fields)

    def close(self) -> None:
        """Send what is left."""
        self._reporter.close()


class ToTerminal:
    """Shows everything on this process's own output."""

    def __init__(self, shown: Display) -> None:
        self._shown = shown
        atexit.register(shown.close)  # a script that fails leaves no live line

    def say(self, text: str) -> None:
        """Lines that stay."""
        self._shown.say(text)

    def progress(self, fields: Fields) -> None:
        """What the live line shows from now on; while there is one, the script's own prints go above it."""
        if fields.get("ended"):
            self._shown.close()
        else:
            self._shown.guard()
            self._shown.progress(fields)

    def close(self) -> None:
        """Give the terminal back."""
        self._shown.close()


def voice() -> Voice:
    """The head where an agent started this process, or else this process's output."""
    reporter = Reporter.from_environment()
    return ToHead(reporter) if reporter is not None else ToTerminal(Display(sys.stdout))
