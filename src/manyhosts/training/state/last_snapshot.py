"""A last snapshot, where nobody continues: made by one worker that holds everything, without any collective.

The head is gone, or has said that nobody continues: too few hosts are left, say. The workers that are left will be
ended, and what they hold may be many steps later than the newest snapshot. Any of them that holds all of it writes it
down; where several do, one after another, so that the second finds what the first has made.
"""

from __future__ import annotations

import sys
import time

from manyhosts.errors import ManyhostsError
from manyhosts.records import run_lock
from manyhosts.snapshot.load import newest_whole
from manyhosts.training.consistency.same_weights import own_statistics
from manyhosts.training.loop.loop import Loop
from manyhosts.training.state.snapshot_schedule import SnapshotSchedule
from manyhosts.training.telemetry.run_log import RunLog

_LOCK = "last-snapshot.lock"
_LEADER_FIRST_S = 0.3
"""How long others let the leader go first, whose records need no taking over."""


class LastSnapshot:
    """That of one worker. Made before it is known whether there will be one."""

    def __init__(self, snapshot_schedule: SnapshotSchedule, run_log: RunLog, loop: Loop) -> None:
        self.snapshot_schedule, self.run_log, self.loop = snapshot_schedule, run_log, loop

    def why_not(self) -> str:
        """Why what this worker holds is not all that a run needs to continue; empty where it is."""
        parts, state, loop = self.snapshot_schedule.parts, self.loop.state, self.loop
        if state.step < 1 or loop.at.inconsistent:
            return "it stands at no step"
        if state.best_step != state.step and self.snapshot_schedule.lacks_best(state):
            return "the best model, of a step before, was being written"
        if parts.auditor is not None or loop.at.trusted is not None:
            return "no other worker can be asked whether it computed rightly"
        traits = parts.strategy.traits
        if not (traits.synchronous and traits.holds_whole_model) or parts.strategy.state_dict():
            return "each worker holds something of its own"
        if own_statistics(parts):
            return "each worker holds something of its own"
        if state.stream:
            return "each worker knows a part of how far the stream is read"
        if self.snapshot_schedule.store.apart and not (self.run_log.led or self.run_log.copies):
            return "another worker writes the records on this disk"
        return ""

    def make(self) -> None:
        """Write it, where there is none that is as new. What keeps it from being written ends nothing else."""
        if self.why_not():
            return
        membership = self.run_log.world.membership
        assert membership is not None, "somebody has refused to continue"
        membership.saving()
        if not self.run_log.led:
            time.sleep(_LEADER_FIRST_S)
        try:
            with run_lock.alone_in(self.run_log.directory.path, _LOCK) as is_alone:
                if is_alone and not self._is_there() and self._is_ours():
                    self._write()
        except (OSError, ManyhostsError) as error:
            sys.stderr.write(f"manyhosts: no snapshot could be made of step {self.loop.state.step}: {error}\n")

    def _is_there(self) -> bool:
        newest = newest_whole(self.snapshot_schedule.store.folder, content=False)
        return newest is not None and newest.step >= self.loop.state.step

    def _is_ours(self) -> bool:
        """Whether nobody continues in the run directory without this worker."""
        membership = self.run_log.world.membership
        assert membership is not None, "somebody has refused to continue"
        if not membership.headless:
            return True  # the head has said that nobody does
        return run_lock.steal_lock(self.run_log.directory.path, run_lock.token_of_this_run())

    def _write(self) -> None:
        loop, state = self.loop, self.loop.state
        loop.stepper.settle(finished=False)
        loop.step_reporter.read(all_of_them=True)
        loop.step_reporter.check_weights()
        loop.after_step.leave_validation()
        self.run_log.become_leader(goes_on=False)
        if self.run_log.flush() and self.snapshot_schedule.save_alone(state):
            sys.stderr.write(f"manyhosts: saved step {state.step} before this worker ends\n")
            self.run_log.flush()
