"""The user's learning-rate schedule: when it moves on, and what is said where it goes no further."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhosts.errors import ConfigError


class Schedule:
    """Moves one on in one loop, after each step or each epoch; a plateau schedule moves after validations."""

    def __init__(self, schedule: LRScheduler | None, every: Literal["step", "epoch"]) -> None:
        self._schedule = schedule
        self.plateau = schedule if isinstance(schedule, ReduceLROnPlateau) else None
        self.follows_steps = schedule is not None and every == "step"
        self.follows_epochs = schedule is not None and every == "epoch"
        self._began = False
        """Whether this loop has moved it on."""

    def after_validation(self, watched: float) -> None:
        """A validation gave this value of the metric that is watched."""
        if self.plateau is not None:
            self.plateau.step(watched)

    def after_step(self) -> None:
        """Move on, where the schedule follows steps."""
        if self.follows_steps:
            self._advance()

    def after_epoch(self) -> None:
        """Move on, where the schedule follows epochs."""
        if self.follows_epochs:
            self._advance()

    def _advance(self) -> None:
        """Move on.

        Raises:
            ConfigError: it is shorter than the run.
        """
        if self._schedule is None or self.plateau is not None:
            return
        try:
            with nullcontext() if self._began else _unwarned():
                self._schedule.step()
        except ValueError as cause:
            raise ConfigError(
                f"the schedule goes no further: {cause}",
                where="mh.Trainer(schedule=…)",
                fix="make it as long as the whole run is to be, counted from the first step",
            ) from cause
        self._began = True


@contextmanager
def _unwarned() -> Iterator[None]:
    """Within, PyTorch does not warn of a schedule whose first step comes before any of the optimizer's.

    fp16 leaves out steps whose gradients overflow; the schedule continues all the same, on every worker.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield
