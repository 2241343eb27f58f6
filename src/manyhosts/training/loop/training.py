"""One training on one worker: what its loop, a step, and what is due after a step work with, and where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manyhosts.communication.world import World
from manyhosts.config.settings import Settings
from manyhosts.data.steps import Step
from manyhosts.events import Event
from manyhosts.training.loop.bad_steps import BadSteps
from manyhosts.training.loop.deferred_metrics import DeferredMetrics
from manyhosts.training.loop.learning_rate import Schedule
from manyhosts.training.loop.progress import Progress
from manyhosts.training.loop.stop_signals import StopSignals
from manyhosts.training.setup.build import Parts
from manyhosts.training.state.run_state import RunState
from manyhosts.training.state.snapshot_schedule import SnapshotSchedule
from manyhosts.units import Duration


@dataclass(slots=True)
class LoopState:
    """Written by the loop, the step and what is due after it, and by nobody else; `RunState` is what snapshots keep."""

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
    """When what is being done now was begun, by a clock that nobody sets."""

    def begin_step(self, number: int, step: Step) -> None:
        """From here on, until `end_step`, step `number` is under way."""
        self.under_way, self.taken = number, step

    def end_step(self, *, ends_epoch: bool) -> None:
        """The model has changed: what is due after the step is due."""
        self.under_way, self.ends_epoch = 0, ends_epoch
        self.done_actions = 0 if ends_epoch else self.first_duty

    def break_off(self) -> None:
        """The step under way was put back, or finished because another worker has finished it."""
        self.tried, self.under_way = max(self.tried, self.under_way), 0

    def stand(self, *, done_actions: int) -> None:
        """The state is that of a snapshot now: nothing is under way."""
        self.done_actions, self.ends_epoch = done_actions, False
        self.under_way, self.inconsistent = 0, False

    def go_on(self, *, save_again: bool) -> None:
        """All workers are as far as the farthest."""
        self.under_way, self.tried, self.inconsistent = 0, 0, False
        if save_again:
            self.save_again, self.done_actions = True, min(self.done_actions, self.all_actions - 1)


class ControlFlags:
    """What workers tell each other with each loss, to decide alike: the time, who waits to join, who stops.

    Their sums over all workers come back with the numbers of the step.
    """

    def __init__(self, world: World, state: RunState, at: LoopState, stop_signals: StopSignals) -> None:
        self._world, self._state, self._at, self._wishes = world, state, at, stop_signals
        self._began = 0.0
        self.start_clock()

    def start_clock(self) -> None:
        """The run's clock, which is the leader's, continues from the time that the run has taken so far."""
        self._began = time.perf_counter() - self._state.seconds

    def own(self) -> tuple[float, ...]:
        """The leader's clock, whether this worker knows of one that wants to join, and what asked it to stop."""
        world = self._world
        clock = time.perf_counter() - self._began if world.place.rank == 0 else 0.0
        joining = world.membership is not None and world.membership.change_asked
        return clock, float(joining), *self._wishes.control_flags

    def hear(self, sums: Sequence[float]) -> None:
        """Take the sums over all workers of what each told with a step."""
        clock, joining, *asked = sums
        self._state.seconds = clock
        self._wishes.hear(asked)
        if joining > 0:
            self._at.change_granted = True


@dataclass(kw_only=True, slots=True)
class Training:
    """Made once for each `fit`."""

    parts: Parts
    settings: Settings
    state: RunState
    """What snapshots keep of it."""
    snapshot_schedule: SnapshotSchedule
    stop_signals: StopSignals
    tell: Callable[[Event], None]
    at: LoopState = field(default_factory=LoopState)
    """What snapshots do not keep of it."""
    limit: Duration = field(init=False)
    """How long it is to be."""
    flags: ControlFlags = field(init=False)
    numbers: DeferredMetrics = field(init=False)
    schedule: Schedule = field(init=False)
    bad_steps: BadSteps = field(init=False)

    def __post_init__(self) -> None:
        parts, settings = self.parts, self.settings
        self.limit = Duration.parse(settings.duration, where="fit(…)")
        self.flags = ControlFlags(parts.world, self.state, self.at, self.stop_signals)
        self.numbers = DeferredMetrics(parts.world.device)
        self.schedule = Schedule(parts.schedule, settings.schedule_every)
        self.bad_steps = BadSteps(parts, settings.on_bad_step, clips=settings.clip_gradients is not None)
