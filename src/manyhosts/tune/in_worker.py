"""What a worker of a learning-rate range test does next to the script: before each step it raises the learning rate."""

from __future__ import annotations

import multiprocessing
from typing import Any

from manyhosts.training.telemetry.watching import Watcher
from manyhosts.tune.range_test import rate_of


def begin() -> None:
    """Have every step seen."""
    if multiprocessing.parent_process() is not None:
        return  # a process that the script has started
    from manyhosts.training.process_session import ProcessSession

    ProcessSession.current().watcher = Rising()


class Rising(Watcher):
    """Of several groups of parameters each has the same rate, whatever the script's schedule says."""

    components: Any = None
    step = 0

    def begins(self, components: Any, settings: Any, state: Any) -> None:
        """Keep what has the optimizer."""
        self.components, self.step = components, state.step

    def reads(self, step: Any) -> Any:
        """Set the rate of the step that comes."""
        for group in self.components.optimizer.param_groups:
            group["lr"] = rate_of(self.step)
        return step

    def steps(self, step: int) -> None:
        """The next one is another."""
        self.step = step
