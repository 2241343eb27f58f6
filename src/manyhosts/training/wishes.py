"""Signals that ask a run to stop: all workers stop after the same step, whichever of them was asked.

The first signal is a wish, which travels to the others with the next step's loss; the second one is obeyed at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ONE_WISH_S = 0.3
"""Schedulers signal every process, and whoever started it passes that on: what comes so soon is the same wish."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Wishes:
    """Whether this worker was asked to stop, and whether all have heard of it."""

    def __init__(self) -> None:
        self.asked = 0
        """The number of the signal that asked this worker to stop; 0 where none did."""
        self.granted = ""
        """Why all workers stop now; empty while they go on."""
        self._asked_at = 0.0
        self.number = 0
        """The number of the signal behind `granted`."""

    def hear(self, asked: float) -> None:
        """Take what the workers' wishes sum up to."""
        if asked and not self.granted:
            # Several workers may have been asked, and their wishes add up.
            self.number = int(asked) if int(asked) in {int(known) for known in _SIGNALS} else int(signal.SIGTERM)
            self.granted = f"asked to stop by {signal.Signals(self.number).name}"

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._asked_at = number, now
        elif now > self._asked_at + _ONE_WISH_S:
            self._obey(signal.Signals(number))

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
        self._before: dict[signal.Signals, Any] = {known: signal.signal(known, self._on_signal) for known in _SIGNALS}
        try:
            yield
        finally:
            for known, handler in self._before.items():
                signal.signal(known, handler)
