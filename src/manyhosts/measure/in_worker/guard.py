"""Ends a script that does not come to `fit`: it trains without mh.Trainer, or does something else for too long."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any, NoReturn

from torch.optim.optimizer import register_optimizer_step_pre_hook

from manyhosts.measure import lines


class Guard:
    """In place from the beginning of the script until `come`."""

    def __init__(self, patience_s: float) -> None:
        self._pid = os.getpid()
        self._made = False
        self._patience_s = patience_s
        self._hook = register_optimizer_step_pre_hook(self._steps)
        self._timer = threading.Timer(patience_s, self._late)
        self._timer.daemon = True
        self._timer.start()
        atexit.register(self._ended)

    def made(self) -> None:
        """There is a trainer: what its optimizer does is its own affair."""
        self._made = True
        self._hook.remove()

    def come(self) -> None:
        """The script has come to `fit`."""
        self._timer.cancel()
        atexit.unregister(self._ended)

    def _steps(self, *_: Any) -> None:
        if os.getpid() == self._pid:
            lines.send("trains alone")
            leave()

    def _late(self) -> None:
        lines.send("late", seconds=self._patience_s, made=self._made)
        leave()

    def _ended(self) -> None:
        if os.getpid() == self._pid:
            lines.send("no fit", made=self._made)


def leave() -> NoReturn:
    """End this process here: nothing of the script that comes after is run. Its loader processes end with it, which
    would else look for it every five seconds (torch 2.13).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(ValueError):  # not the main thread, where no handler is called
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the loader's raises for one that a signal has ended
    for each in multiprocessing.active_children():
        each.kill()
    os._exit(0)
