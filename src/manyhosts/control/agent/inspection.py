"""Looks at the workers of a host from outside: are they stopped, do they compute, and where is their Python?

The stack comes from the worker's own faulthandler, which writes it on a signal whatever Python or C code is doing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyhosts.cluster import reports
from manyhosts.control.agent.processes import descendants
from manyhosts.control.protocol import SeenWorker

if TYPE_CHECKING:
    from manyhosts.control.agent.watched_worker import WatchedWorker
    from manyhosts.control.loop import Loop

SIGNAL = getattr(signal, "SIGURG", None)
"""Asks for a stack. Nothing in Python or torch uses it, and a process that does not know it ignores it."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_MOST_LOADERS = 4
_HEAD = "Current thread"


def answer_on(descriptor: int) -> None:
    """In a worker: write the stacks of all threads to `descriptor` whenever the signal comes."""
    if SIGNAL is not None and hasattr(faulthandler, "register"):
        faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)


@dataclass(slots=True)
class _Sample:
    state: str = ""
    cpu_s: float = 0.0
    at: float = 0.0


class Inspection:
    """One inspection of all workers of a host, which takes `TAKES_S` and runs in the background."""

    TAKES_S = 0.4

    def __init__(
        self, loop: Loop, workers: Sequence[WatchedWorker], socket_path: Path, then: Callable[[list[SeenWorker]], None]
    ) -> None:
        """Note the CPU time that they have used and ask for their stacks; `then` receives the result.

        `socket_path` is the socket where they hand in their reports.
        """
        self._socket = socket_path
        self._workers = [worker for worker in workers if worker.process and not worker.ended]
        self._first = {worker.worker_id.member: _sample(worker.process) for worker in self._workers}
        self._stacks: dict[int, str] = {}
        for worker in self._workers:
            worker.take_stack()  # what is left of the last time
            _ask(worker.process)
        loop.after(self.TAKES_S / 2, self._ask_loaders)
        loop.after(self.TAKES_S, lambda: then([self._seen(worker) for worker in self._workers]))

    def _ask_loaders(self) -> None:
        """Ask the processes that workers have started: one of them may keep its worker waiting."""
        for worker in self._workers:
            self._stacks[worker.worker_id.member] = worker.take_stack()
            children = sorted(descendants(worker.process), key=lambda child: _sample(child).state != "R")
            for child in children[:_MOST_LOADERS]:  # first those that compute
                _ask(child)

    def _seen(self, worker: WatchedWorker) -> SeenWorker:
        first, last = self._first[worker.worker_id.member], _sample(worker.process)
        passed = last.at - first.at
        return SeenWorker(
            **worker.worker_id.to_json(),
            step=reports.step_on(reports.board_of(self._socket, worker.process)),
            state=last.state,
            cpu_s=last.cpu_s,
            busy=round((last.cpu_s - first.cpu_s) / passed, 3) if passed > 0 else 0.0,
            stack=self._stacks.get(worker.worker_id.member, ""),
            loader=next(iter(split(worker.take_stack())), ""),
        )


def _ask(process: int) -> None:
    if SIGNAL is not None and _listens(process):
        try:
            os.kill(process, SIGNAL)
        except OSError:
            return


def _listens(process: int) -> bool:
    """Whether it has a handler for the signal: one that was started by a worker, say, has not."""
    if SIGNAL is None:
        return False
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    except (OSError, ValueError):
        return False
    return False


def _sample(process: int) -> _Sample:
    now = time.monotonic()
    try:
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return _Sample(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, now)
    except (OSError, ValueError, IndexError):
        return _Sample(at=now)


def split(text: str) -> list[str]:
    """The accounts of several processes, in the order in which they came: each names its current thread once."""
    lines = text.splitlines()
    begins = [index for index, line in enumerate(lines) if line.startswith(_HEAD)]
    ends = [*begins[1:], len(lines)] if begins else []
    return ["\n".join(lines[begin:end]) for begin, end in zip(begins, ends, strict=True)]
