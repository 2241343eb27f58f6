"""What a worker sees of a training that it knows nothing about: it counts the steps of the script's optimizers.

A script that uses `mh.Trainer` tells of itself, and is left alone. Nothing here imports torch.
"""

from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Any

from manyhands.cluster import reports
from manyhands.cluster.reports import Reporter
from manyhands.launchers.imports import when_imported

_PAUSE_S = 0.5
"""The reporter would drop what comes sooner; looking at the clock here is cheaper."""


def begin() -> None:
    """Watch what the script of this process will do. Call it once, before the script."""
    reporter = Reporter.from_environment()
    if reporter is not None:
        steps = Steps(reporter)
        when_imported("torch.optim.optimizer", steps.watch)
        reports.when_told("trainer", steps.withdraw)


class Steps:
    """Counts optimizer steps and reports them, where the script does not do so itself.

    Several optimizers that take turns (a GAN's two; one for each parameter; one that wraps another) make one step
    together: a new step begins when one of them steps for the second time.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.done = 0
        self._reporter = reporter
        self._turn: set[int] = set()
        """The optimizers, by id, that have had their turn in the present step."""
        self._next_report = 0.0
        self._handle: Any = None
        self._torch: Any = None
        self._count_untraced = self._count

    def watch(self, optimizers: ModuleType) -> None:
        """Have `torch.optim.optimizer` call us after every step of every optimizer."""
        self._torch = sys.modules["torch"]  # may be half loaded: what is not needed yet is looked up later
        self._count_untraced = self._torch._disable_dynamo(self._count)
        self._handle = optimizers.register_optimizer_step_post_hook(self._note)

    def withdraw(self) -> None:
        """Watch no longer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _note(self, optimizer: object, *_: object) -> None:
        if self._torch.compiler.is_dynamo_compiling():
            self._count_untraced(id(optimizer))  # torch.compile leaves it alone, for 3 µs more in each call
        else:
            self._count(id(optimizer))

    def _count(self, number: int) -> None:
        if self._turn and number not in self._turn:
            self._turn.add(number)
            return
        self._turn = {number}
        self.done += 1
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + _PAUSE_S
            self._reporter.send("step", step=self.done)
