"""What workers tell each other with the loss of every step, to decide alike: the time, who waits to join, who stops."""

from __future__ import annotations

import time
from collections.abc import Sequence

from manyhosts.communication.world import World
from manyhosts.training.loop.loop_state import LoopState
from manyhosts.training.loop.stop_signals import StopSignals
from manyhosts.training.state.run_state import RunState


class ControlFlags:
    """Those of one worker. Their sums over all workers come back with the numbers of the step."""

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
