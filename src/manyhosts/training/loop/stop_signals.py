"""Signals that ask a run to stop: all workers stop after the same step, whichever of them was asked.

The first signal is a wish, which travels to the others with the next step's loss; the second one is obeyed at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ONE_WISH_S = 0.3
"""Schedulers signal every process, and whoever started it passes that on: what comes so soon is the same wish."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What may ask a run to stop. Where workers were asked by several, the first in this order is the reason."""
_NOBODY = (0.0,) * len(SIGNALS)
_HEARD = SIGNALS[:3]
"""Those that a worker is sent itself. A terminal that was closed is known to the head alone."""


class StopSignals:
    """Whether this worker was asked to stop, and whether all have heard of it."""

    def __init__(self, cause: Callable[[], int] = lambda: 0) -> None:
        """`cause`: the signal that whoever sent one to this worker was sent, or 0 where that is not known."""
        self._known_cause = cause
        self.asked = 0
        """The number of the signal that asked this worker to stop; 0 where none did."""
        self.granted = ""
        """Why all workers stop now; empty while they continue."""
        self._asked_at = 0.0
        self.number = 0
        """The number of the signal behind `granted`."""

    @property
    def control_flags(self) -> tuple[float, ...]:
        """1 for the signal that asked this worker, 0 for the others: the sums over all workers count who was asked."""
        return tuple(float(self.asked == known) for known in SIGNALS) if self.asked else _NOBODY

    def hear(self, counts: Sequence[float]) -> None:
        """Take how many workers were asked by each of `SIGNALS`."""
        if not any(counts) or self.granted:
            return
        asked = [known for known, count in zip(SIGNALS, counts, strict=True) if count]
        if asked:
            self._grant(asked[0])

    def grant_own(self) -> bool:
        """Stop for what the run was asked, where no other worker continues. Whether it was asked.

        Workers that are ended because another one has failed are sent a signal, too, and nobody has asked the run.
        """
        if not self.asked or not self._known_cause():
            return False
        if not self.granted:
            self._grant(signal.Signals(self.asked))
        return True

    def _grant(self, asked: signal.Signals) -> None:
        self.number = int(asked)
        self.granted = f"asked to stop by {asked.name}"
        if asked == signal.SIGINT:
            self.granted += " (Ctrl-C)"

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._asked_at = self._cause(number), now
        elif now > self._asked_at + _ONE_WISH_S:
            self._obey(signal.Signals(number))

    def _cause(self, number: int) -> int:
        """What the user did: a launcher that hears Ctrl-C passes it on as SIGTERM."""
        known = self._known_cause()
        return known if number == signal.SIGTERM and known in SIGNALS else number

    def _obey(self, number: signal.Signals) -> None:
        """Do at once what this signal did before anybody listened to wishes."""
        signal.signal(number, self._before[number])
        signal.raise_signal(number)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, the first signal is a wish. Other threads than the main one cannot listen to signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._before: dict[signal.Signals, Any] = {known: signal.signal(known, self._on_signal) for known in _HEARD}
        try:
            yield
        finally:
            for known, handler in self._before.items():
                signal.signal(known, handler)
