"""The watcher that raises the learning rate by a constant factor a step, whatever the script's schedule says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manyhosts.config.settings import Settings
from manyhosts.data.steps import Step
from manyhosts.events import Listener
from manyhosts.training.state import RunState
from manyhosts.tune.range_test import rate_of


class Rising:
    """Of several groups of parameters each has the same rate. Everything else is left to the script."""

    parts: Any = None
    step = 0

    def made(self, model: Any) -> None:
        """Nothing to do."""

    def fits(self, validation: Any, listeners: Sequence[Listener]) -> Sequence[Listener]:
        """The run is recorded like others."""
        return listeners

    def begins(self, parts: Any, settings: Settings, state: RunState) -> None:
        """Keep what has the optimizer."""
        self.parts, self.step = parts, state.step

    def reads(self, step: Step) -> Step:
        """Set the rate of the step that comes."""
        for group in self.parts.optimizer.param_groups:
            group["lr"] = rate_of(self.step)
        return step

    def differentiates(self, outcome: Any) -> None:
        """Nothing to do."""

    def steps(self, step: int) -> None:
        """The next one is another."""
        self.step = step
