"""What is awaited before a run's first word: on a terminal, a line that says so and counts the seconds.

An import of torch takes seconds, a host that does not answer takes longer; a terminal that stays empty meanwhile looks
the same in both cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from manyhosts.control.display import Display

_TICK_S = 1.0
_NAMED = 3
"""Hosts that are named; of more, their number is told."""


class Beginning:
    """The live line until there is something better to show."""

    def __init__(self, display: Display, after: Callable[[float, Callable[[], None]], object]) -> None:
        """`after` calls back after so many seconds."""
        self._display, self._after = display, after
        self._began = time.monotonic()
        self._awaited = ""
        self._over = False

    def await_hosts(self, missing: Sequence[str], count: int) -> None:
        """The agents of `missing` hosts, of `count`, have yet to answer."""
        named = ", ".join(missing) if len(missing) <= _NAMED else f"{len(missing)} of {count} hosts"
        self._show(f"waiting for {named}" if count > 1 else "starting")

    def await_workers(self, count: int) -> None:
        """All hosts are here; `count` workers start, and the script is imported."""
        self._show("starting the script" if count == 1 else f"starting {count} workers")

    def end(self) -> None:
        """There was a first word."""
        if not self._over:
            self._over = True
            self._display.progress({"ended": True})

    def _show(self, awaited: str) -> None:
        ticks = bool(self._awaited)
        self._awaited = awaited
        if not ticks:
            self._tick()

    def _tick(self) -> None:
        if self._over:
            return
        self._display.progress({"awaited": self._awaited, "seconds": time.monotonic() - self._began})
        self._after(_TICK_S, self._tick)
