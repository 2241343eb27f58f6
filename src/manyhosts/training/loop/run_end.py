"""The end of a run: its last snapshot, and the record of how it ended, also where it failed.

Where no worker can continue, one that holds everything makes the last snapshot alone, without any collective. The head
is gone, or has said that no worker continues: too few hosts are left, say. The workers that are left will be ended, and
what they hold may be many steps later than the newest snapshot. Any of them that holds all of it writes it down; where
several do, one after another, so that the second finds what the first has made.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from manyhosts import refusals
from manyhosts.cluster.membership import CallAlreadyFinished
from manyhosts.cluster.neighbours import Neighbours
from manyhosts.communication.gathering import gather_plain
from manyhosts.errors import ManyhostsError, TrainingError, first_line
from manyhosts.events import Note, RunEnded
from manyhosts.records import run_lock
from manyhosts.snapshot.fingerprint import weights_sha256
from manyhosts.snapshot.load import newest_complete
from manyhosts.training.consistency.same_weights import own_statistics
from manyhosts.training.loop.loop import Loop
from manyhosts.training.setup.build import Parts
from manyhosts.training.state.run_state import RunState
from manyhosts.training.state.snapshot_schedule import SnapshotSchedule
from manyhosts.training.telemetry.run_log import RunLog


class RunEnd:
    """That of one run. Made before it begins."""

    def __init__(self, parts: Parts, state: RunState, snapshot_schedule: SnapshotSchedule, run_log: RunLog) -> None:
        self._parts, self._state, self._snapshot_schedule, self._run_log = parts, state, snapshot_schedule, run_log
        self._neighbours = Neighbours()

    def save(self, loop: Loop) -> None:
        """See that the snapshot of the last step is complete. Where the disk has no room, older ones go, one by one.

        Raises:
            TrainingError: it is not, and there is none left that may go.
        """
        snapshot_schedule, step = self._snapshot_schedule, self._state.step
        if snapshot_schedule.saved_at != step:
            loop.after_step.save()
        snapshot_schedule.finish()
        tried_again = False
        while not snapshot_schedule.has_complete(step):
            if tried_again and not (snapshot_schedule.is_short_of_room() and snapshot_schedule.drop_oldest()):
                # The leader alone knows all of it.
                reported = [snapshot_schedule.trouble, snapshot_schedule.last_good()]
                trouble, last_good = gather_plain(self._run_log.world, reported)[0]
                raise TrainingError(
                    f"the snapshot of the last step, {step}, could not be written: {trouble}",
                    where=str(self._snapshot_schedule.store.folder),
                    fix=f"make room on that disk and start again. {last_good}",
                )
            tried_again = True
            loop.after_step.save()
            snapshot_schedule.finish()

    @contextmanager
    def failures_recorded(self) -> Iterator[None]:
        """Whatever ends the training within, but its being passed by the others, is recorded as the run's end."""
        try:
            yield
        except CallAlreadyFinished:
            raise
        except ManyhostsError as error:
            self.record("failed", error.what)
            raise
        except Exception as error:
            reported = refusals.explained(error)
            said = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
            self.record("failed", said if reported is None else reported.what)
            raise
        except KeyboardInterrupt:
            self.record("interrupted", "a second signal, obeyed at once")
            raise

    def record(self, status: str, reason: str, *, is_failure: bool = True) -> str:
        """Record how the run ended. Returns the hash of the weights; nothing where no one can know it."""
        strategy = self._parts.strategy
        # After a failure the others may not come to where the entire weights are put together.
        can_hash = strategy.traits.holds_full_model or not is_failure
        knows = can_hash and self._run_log.world.drain()
        weights = weights_sha256(self._parts.model, strategy.holding) if knows else ""
        position = self._state.position
        if self._run_log.world.is_leader and (others := self._neighbours.in_words()):
            self._run_log.tell(Note(text=others, step=self._state.step, time=time.time()))
        self._run_log.tell_end(
            RunEnded(
                step=self._state.step,
                epoch=position.epoch,
                status=status,
                reason=reason,
                weights_sha256=weights,
                time=time.time(),
            )
        )
        self._run_log.flush()
        return weights


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
            return "it is not between two steps"
        if state.best_step != state.step and self.snapshot_schedule.lacks_best(state):
            return "the best model, of a step before, was being written"
        if parts.auditor is not None or loop.at.trusted is not None:
            return "no other worker can be asked whether it computed rightly"
        traits = parts.strategy.traits
        if not (traits.synchronous and traits.holds_full_model) or parts.strategy.state_dict():
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
        newest = newest_complete(self.snapshot_schedule.store.folder, content=False)
        return newest is not None and newest.step >= self.loop.state.step

    def _is_ours(self) -> bool:
        """Whether no one continues in the run directory without this worker."""
        membership = self.run_log.world.membership
        assert membership is not None, "somebody has refused to continue"
        if not membership.headless:
            return True  # the head has said that no one does
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
