"""The learning rate: what the number of workers and the beginning of a run do to it, and when a schedule moves on.

Scaling with the batch: linear after Goyal et al. 2017, "Accurate, Large Minibatch SGD" (arXiv:1706.02677), square root
after Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks" (arXiv:1404.5997). Warm-up is
laid over the user's schedule for the length of one update and taken off again, because many schedules compute the next
rate from the present one.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhosts.errors import ConfigError
from manyhosts.model.optimizer_state import advance, unwarned
from manyhosts.units import Duration


def scale(rule: str | None, workers: int) -> float:
    """The factor on the learning rate when the batch is `workers` times that of one."""
    if rule == "linear":
        return float(workers)
    return math.sqrt(workers) if rule == "sqrt" else 1.0


class VanishedRate:
    """Notices when a schedule that moves on after every step has taken the learning rate to next to nothing."""

    SHARE = 1e-6
    """Of the highest rate so far: below it, weights in float32 hardly move any more."""
    LATE = 0.9
    """The share of a run after which a vanishing rate is what most schedules intend."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self.highest = 0.0
        self.noticed = False

    def note(self, lr: float, step: int) -> str:
        """What to say of the rate of a step, once; empty where it is as expected."""
        if lr >= self.SHARE * self.highest or self.noticed:
            self.highest = max(self.highest, lr)
            return ""
        if self.total_steps is not None and step > self.LATE * self.total_steps:
            return ""
        self.noticed = True
        return (
            f"the learning rate has fallen from {self.highest:g} to {lr:.1g} by step {step}: the schedule moves on "
            'after every step; for one that is written for epochs, give mh.Trainer(schedule_every="epoch")'
        )


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The learning rate rises linearly to its full value over the first `steps` steps."""

    steps: int

    @classmethod
    def of(cls, warmup: str | None, steps_per_epoch: int | None) -> WarmUp:
        """The one that the setting asks for.

        Raises:
            ConfigError: it is given in epochs, and the training set is a stream.
        """
        if warmup is None:
            return cls(0)
        duration = Duration.parse(warmup, where="warmup")
        if duration.steps is not None:
            return cls(duration.steps)
        if steps_per_epoch is None:
            raise ConfigError(
                f"warmup is {warmup!r}, but it is not known how many steps an epoch of a stream has",
                where="warmup",
                fix='give it in steps, such as warmup="500 steps"',
            )
        return cls(round((duration.epochs or 0) * steps_per_epoch))

    def factor(self, step: int) -> float:
        """The share of the learning rate in the step after `step` steps; 1 once the warm-up is over."""
        return min(1.0, (step + 1) / self.steps) if self.steps else 1.0


class Schedule:
    """Moves one on in one loop, after each step or each epoch; a plateau schedule moves after validations."""

    def __init__(self, schedule: LRScheduler | None, every: Literal["step", "epoch"]) -> None:
        self._schedule = schedule
        self.plateau = schedule if isinstance(schedule, ReduceLROnPlateau) else None
        self.follows_steps = schedule is not None and self.plateau is None and every == "step"
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
        if not self.follows_steps:
            self._advance()

    def _advance(self) -> None:
        """Move on.

        Raises:
            ConfigError: it is shorter than the run.
        """
        if self._schedule is not None and self.plateau is None:
            with nullcontext() if self._began else unwarned():
                advance(self._schedule)
            self._began = True
