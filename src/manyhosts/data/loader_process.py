"""Loader processes that are known to have begun.

A process that is forked while another thread of its parent asks for the interpreter's list of threads waits for ever,
before its first line, in Python up to 3.11.9 (python/cpython issue 112275). A worker has such threads: Gloo's take the
interpreter's lock whenever they drop a tensor. Of 3,000 forks during collective calls, 10 never began.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from typing import Any

PATIENCE = 5.0
"""Seconds until a process that does not begin is forked again; then twice as many, and so on.

One that is only slow has done nothing yet, so nothing is lost with it."""


def context() -> BaseContext | None:
    """For `DataLoader(multiprocessing_context=…)`; `None`, its own, where processes are not forked."""
    return _Context() if multiprocessing.get_start_method() == "fork" else None


class _Process(ForkProcess):
    terminate = ForkProcess.kill
    begun: tuple[int, int]
    """The ends of a pipe, to read and to write."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:
        return _Popen(process_obj)

    def _bootstrap(self, parent_sentinel: Any = None) -> int:
        reader, writer = self.begun
        os.close(reader)
        os.write(writer, b"\n")
        os.close(writer)
        return super()._bootstrap(parent_sentinel)  # type: ignore[misc, no-any-return]


def outlive(_number: int) -> None:
    """For `DataLoader(worker_init_fn=…)`: do not end by SIGTERM, which a scheduler sends to all processes. The worker
    needs its batches to come to the end of its step, and to save; it ends its loaders by SIGKILL.
    """
    if context() is not None:
        signal.signal(signal.SIGTERM, lambda *_: None)  # a handler, and not to ignore: what a dataset starts hears it


class _Popen(Popen):
    pid: int

    def _launch(self, process_obj: Any) -> None:
        patience = PATIENCE
        while not self._begins(process_obj, patience):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.finalizer()  # type: ignore[misc]  # closes its pipes
            patience *= 2

    def _begins(self, process: _Process, patience: float) -> bool:
        reader, writer = process.begun = os.pipe()
        try:
            super()._launch(process)  # type: ignore[misc]
        finally:
            os.close(writer)
        try:
            return bool(wait([reader], patience))  # also where it has ended: the loader reports that
        finally:
            os.close(reader)


class _Context(ForkContext):
    Process = _Process
