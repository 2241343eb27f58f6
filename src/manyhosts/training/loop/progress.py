"""How far a run has come, and what is due there: pure rules on steps, epochs and agreed seconds.

All workers must decide alike, or one waits for ever in a collective. So a rule looks only at numbers that are equal on
all of them: the count of steps, the position in the data, and the leader's clock, which travels with the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyhosts.units import Duration, seconds_in_words

_A_FEW = 1e-6
_A_LITTLE = 1e-9  # epochs are fractions of steps; 20 of 20 must count as 20


@dataclass(slots=True)
class Progress:
    """A point in a run."""

    step: int = 0
    epochs: float = 0.0
    """Epochs done, with the fraction of the one under way; whole numbers only for a stream, whose length is unknown."""
    seconds: float = 0.0
    """Time spent in this run, over all restarts, by the leader's clock."""


def reached(limit: Duration, progress: Progress) -> str:
    """Why a run of this duration is over at `progress`; empty while it is not."""
    if limit.steps is not None and progress.step >= limit.steps:
        return f"all {limit.steps} steps done"
    if limit.epochs is not None and progress.epochs >= limit.epochs - _A_LITTLE:
        return f"all {limit.epochs:g} epochs done" if limit.epochs != 1 else "the epoch is done"
    if limit.seconds is not None and progress.seconds >= limit.seconds:
        return f"{seconds_in_words(limit.seconds)} are over"
    return ""


def total_steps(limit: Duration, steps_per_epoch: int | None, now: Progress | None = None) -> int | None:
    """The optimizer steps that a run of this duration has; None where only time or the end of a stream tells.

    `now`: where it stands, when steps before may have had another batch, so that an epoch had another number of them.
    """
    now = now or Progress()
    ends = [] if limit.steps is None else [limit.steps]
    if limit.epochs is not None and steps_per_epoch is not None:
        ends.append(now.step + max(0, math.ceil((limit.epochs - now.epochs) * steps_per_epoch - _A_FEW)))
    return min(ends) if ends else None


def due(every: Duration, before: Progress, now: Progress) -> bool:
    """Whether something that is done `every` so often falls between `before` and `now`."""
    return (
        _passed(every.steps, before.step, now.step)
        or _passed(every.epochs, before.epochs, now.epochs)
        or _passed(every.seconds, before.seconds, now.seconds)
    )


def _passed(every: float | None, before: float, now: float) -> bool:
    if every is None:
        return False
    return math.floor(now / every + _A_LITTLE) > math.floor(before / every + _A_LITTLE)
