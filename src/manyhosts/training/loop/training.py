"""One training on one worker: where it is, what its workers decide together, and the pure rules on how far it is.

All workers must decide alike, or one waits for ever in a collective. So a rule looks only at numbers that are equal on
all of them: the count of steps, the position in the data, and rank 0's clock, which travels with the loss. A signal
that asks a run to stop is a wish, which travels with the next step's loss, too: all workers stop after the same step,
whichever of them was asked. A second signal is obeyed at once.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from manyhosts.config.settings import Settings
from manyhosts.data.steps import Step
from manyhosts.evaluation.evaluate import OfAllSets
from manyhosts.training.loop.learning_rate import Schedule
from manyhosts.training.loop.numbers import BadSteps, DeferredMetrics
from manyhosts.training.setup.build import Components
from manyhosts.training.state.run_state import RunState
from manyhosts.training.state.snapshot_schedule import SnapshotSchedule
from manyhosts.training.telemetry.profiling import Profiling
from manyhosts.training.telemetry.run_log import RunLog
from manyhosts.units import Duration, seconds_in_words

_A_FEW = 1e-6
_A_LITTLE = 1e-9  # epochs are fractions of steps; 20 of 20 must count as 20


@dataclass(slots=True)
class Progress:
    """A point in a run."""

    step: int = 0
    epochs: float = 0.0
    """Epochs done, with the fraction of the one under way; integers only for a stream, whose length is unknown."""
    seconds: float = 0.0
    """Time spent in this run, over all restarts, by rank 0's clock."""


def reached(limit: Duration, progress: Progress) -> str:
    """Why a run of this duration is over at `progress`; empty while it is not."""
    if limit.steps is not None and progress.step >= limit.steps:
        more = progress.step > limit.steps  # resumed with a shorter duration than the run has already trained
        return f"{progress.step} steps done, {limit.steps} asked for" if more else f"all {limit.steps} steps done"
    if limit.epochs is not None and progress.epochs >= limit.epochs - _A_LITTLE:
        if progress.epochs > limit.epochs + _A_LITTLE:
            return f"{progress.epochs:.4g} epochs done, {limit.epochs:g} asked for"
        return f"all {limit.epochs:g} epochs done" if limit.epochs != 1 else "the epoch is done"
    if limit.seconds is not None and progress.seconds >= limit.seconds:
        return f"{seconds_in_words(limit.seconds)} are over"
    return ""


def total_steps(limit: Duration, steps_per_epoch: int | None, now: Progress | None = None) -> int | None:
    """The optimizer steps that a run of this duration has; None where only time or the end of a stream shows it.

    `now`: where it is, when steps before may have had another batch, so that an epoch had another number of them.
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
    return every is not None and math.floor(now / every + _A_LITTLE) > math.floor(before / every + _A_LITTLE)


_ONE_WISH_S = 0.3
"""Schedulers signal every process, and its parent passes that on: what comes so soon is the same wish."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What may ask a run to stop. Where workers were asked by several, the first in this order is the reason."""
_NOBODY = (0.0,) * len(SIGNALS)
_HEARD = SIGNALS[:3]
"""Those that a worker is sent itself. A terminal that was closed is known to the head alone."""


class StopSignals:
    """Whether this worker was asked to stop, and whether all have heard of it."""

    def __init__(self, cause: Callable[[], int] = lambda: 0) -> None:
        """`cause`: the signal that the sender of one to this worker was sent, or 0 where that is not known."""
        self._known_cause = cause
        self.asked = 0
        """The number of the signal that asked this worker to stop; 0 where none did."""
        self._asked_at = 0.0
        self.number = 0
        """That of the signal for which all workers stop now; 0 while they continue."""

    @property
    def granted(self) -> str:
        """Why all workers stop now; empty while they continue."""
        if not self.number:
            return ""
        by_key = " (Ctrl-C)" if self.number == signal.SIGINT else ""
        return f"asked to stop by {signal.Signals(self.number).name}{by_key}"

    @property
    def control_flags(self) -> tuple[float, ...]:
        """1 for the signal that asked this worker, 0 for the others: the sums over all workers count who was asked."""
        return tuple(float(self.asked == known) for known in SIGNALS) if self.asked else _NOBODY

    def hear(self, counts: Sequence[float]) -> None:
        """Take how many workers were asked by each of `SIGNALS`."""
        if any(counts) and not self.number:
            self.number = int(next(known for known, count in zip(SIGNALS, counts, strict=True) if count))

    def grant_own(self) -> bool:
        """Stop for what the run was asked, where no other worker continues. Whether it was asked.

        Workers that are ended because another one has failed are sent a signal, too, and no one has asked the run.
        """
        if not self.asked or not self._known_cause():
            return False
        self.number = self.number or self.asked
        return True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            known = self._known_cause()
            # What the user did: a launcher that hears Ctrl-C passes it on as SIGTERM.
            self.asked = known if number == signal.SIGTERM and known in SIGNALS else number
            self._asked_at = now
        elif now > self._asked_at + _ONE_WISH_S:  # do at once what this signal did before anybody listened to wishes
            signal.signal(number, self._before[number])
            signal.raise_signal(number)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, the first signal is a wish. Other threads than the main one cannot listen to signals."""
        heard = _HEARD if threading.current_thread() is threading.main_thread() else ()
        self._before: dict[int, Any] = {known: signal.signal(known, self._on_signal) for known in heard}
        try:
            yield
        finally:
            for known, handler in self._before.items():
                signal.signal(known, handler)


@dataclass(kw_only=True)
class Training:
    """What the loop, a step and what is due after it share; made once for each `fit`. They alone change it."""

    components: Components
    settings: Settings
    state: RunState
    """What snapshots keep of it."""
    snapshot_schedule: SnapshotSchedule
    run_log: RunLog
    validation: OfAllSets | None = None
    stop_signals: StopSignals = field(default_factory=StopSignals)
    profiling: Profiling | None = None
    survives: bool = False
    """Whether others continue without a lost worker, so that a step may be made again."""
    all_actions: int = 0
    """How many things may be due after a step."""
    first_duty: int = 0
    """The number of the first that may be due after a step that ends no epoch."""
    done_actions: int = 0
    """Of what is due after the last step, how much is done."""
    before: Progress = field(default_factory=Progress)
    """How far the run had come before the last step."""
    ends_epoch: bool = False
    """Whether the last step was the last of its epoch."""
    under_way: int = 0
    """The step that is being computed; 0 between steps."""
    tried: int = 0
    """The last step that broke off since workers went; 0 where none did."""
    taken: Step | None = None
    """What the step under way, or the last one, has read."""
    inconsistent: bool = False
    """Whether an update or a transfer broke off, so that the parameters are those of no step."""
    trusted: int | None = None
    """After workers were found to compute wrongly: the last step that all agree on, until the run is back there."""
    change_granted: bool = False
    """Whether all workers have heard that somebody waits to join them."""
    save_again: bool = False
    """Whether a snapshot is lost that was being written when workers went."""
    since: float = field(default_factory=time.monotonic)
    """When what is being done now was begun, by a clock that no one sets."""

    def __post_init__(self) -> None:
        components, settings = self.components, self.settings
        self.limit = Duration.parse(settings.duration, where="fit(…)")
        self.numbers = DeferredMetrics(components.world.device)
        self.schedule = Schedule(components.schedule, settings.schedule_every)
        self.bad_steps = BadSteps(components, settings.on_bad_step, clips=settings.clip_gradients is not None)
        self.start_clock()

    def now(self) -> Progress:
        """How far the run has come, in numbers that are equal on all workers."""
        state = self.state
        return Progress(state.step, self.components.batches.source.epochs(state.position), state.seconds)

    # What workers send each other with each loss, to decide alike; the sums come back with the numbers of the step.

    def start_clock(self) -> None:
        """The run's clock, which is rank 0's, continues from the time that the run has taken so far."""
        self._began = time.perf_counter() - self.state.seconds

    def control_flags(self) -> tuple[float, ...]:
        """Rank 0's clock, whether this worker knows of one that wants to join, and what asked it to stop."""
        world = self.components.world
        clock = time.perf_counter() - self._began if world.place.rank == 0 else 0.0
        joining = world.membership is not None and world.membership.change_asked
        return clock, float(joining), *self.stop_signals.control_flags

    def hear(self, sums: Sequence[float]) -> None:
        """Take the sums over all workers of what each sent with a step."""
        self.state.seconds, joining, *asked = sums
        self.stop_signals.hear(asked)
        self.change_granted |= joining > 0
