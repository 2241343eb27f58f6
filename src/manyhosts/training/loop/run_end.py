"""The end of a run: its last snapshot, and the record of how it ended, also where it failed.

Where no worker can continue, one that holds everything makes the last snapshot alone, without any collective. The head
is gone, or has said that no worker continues: too few hosts are left, say. The workers that are left will be ended, and
what they hold may be many steps later than the newest snapshot. Any of them that holds all of it writes it down; where
several do, one after another, so that the second finds what the first has made.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from manyhosts import refusals
from manyhosts.cluster.membership import CallAlreadyFinished, Membership
from manyhosts.cluster.neighbours import Neighbours
from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.model_watch import UNFROZEN
from manyhosts.errors import ManyhostsError, TrainingError, first_line
from manyhosts.events import RunEnded
from manyhosts.records import run_lock
from manyhosts.snapshot.fingerprint import weights_sha256
from manyhosts.snapshot.load import newest_complete
from manyhosts.training.consistency.same_weights import own_statistics
from manyhosts.training.loop.loop import Loop
from manyhosts.training.loop.training import Training

_OTHERS_WRITE_S = 5.0
"""How long a run that fails waits for what others write of the snapshot under way: they fail, too, or are gone."""


class RunEnd:
    """That of one run. Made before it begins."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._neighbours = Neighbours()

    def save(self, loop: Loop) -> None:
        """See that the snapshot of the last step is complete. Where the disk has no room, older ones go, one by one.

        Raises:
            TrainingError: it is not, and there is none left that may go.
        """
        schedule, step = self._training.snapshot_schedule, self._training.state.step
        for tried in itertools.count():
            if tried or schedule.saved_at != step:
                loop.after_step.save()
            schedule.finish()
            if schedule.has_complete(step):
                return
            if tried and not (schedule.is_short_of_room() and schedule.drop_oldest()):
                # Rank 0 alone knows all of it.
                remedy = "make room on that disk" if schedule.is_short_of_room() else "mend that"
                reported = [schedule.trouble, f"{remedy} and start again. {schedule.last_good()}"]
                trouble, fix = gather_plain(self._training.components.world, reported)[0]
                raise TrainingError(
                    f"the snapshot of the last step, {step}, could not be written: {trouble}",
                    where=str(schedule.store.folder),
                    fix=fix,
                )

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
            said = (
                f"another worker ended before this one; {said}" if self._training.components.world.is_broken else said
            )
            self.record("failed", said if reported is None else reported.what)
            raise
        except KeyboardInterrupt:
            self.record("interrupted", "a second signal, obeyed at once")
            raise

    def record(self, status: str, reason: str, *, is_failure: bool = True) -> str:
        """Record how the run ended. Returns the hash of the weights; nothing where no one can know it."""
        training, components, step = self._training, self._training.components, self._training.state.step
        if status == "failed":
            with suppress(Exception):  # what ends the run is known, and no second error may hide it
                training.snapshot_schedule.abandon(after_s=_OTHERS_WRITE_S)
        # After a failure the others may not come to where the entire weights are put together.
        can_hash = components.strategy.mesh.parts == 1 or not is_failure
        weights = (
            weights_sha256(components.model, components.strategy.holding)
            if can_hash and components.world.drain()
            else ""
        )
        if components.world.is_rank_0 and (others := self._neighbours.in_words()):
            training.run_log.say(others, step)
        training.run_log.emit_end(
            RunEnded(
                step=step,
                epoch=training.state.position.epoch,
                status=status,
                reason=reason,
                weights_sha256=weights,
                time=time.time(),
            )
        )
        training.run_log.flush()
        return weights


_LOCK = "last-snapshot.lock"
_RANK_0_FIRST_S = 0.3
"""How long others let rank 0 go first, whose records need no taking over."""


class LastSnapshot:
    """That of one worker. Made before it is known whether there will be one."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.snapshot_schedule, self.run_log = loop.training.snapshot_schedule, loop.training.run_log

    def why_not(self) -> str:
        """Why what this worker holds is not all that a run needs to continue; empty where it is."""
        training, components, state = self.loop.training, self.loop.training.components, self.loop.training.state
        if state.step < 1 or training.inconsistent:
            return "it is not between two steps"
        if state.best_step != state.step and self.snapshot_schedule.lacks_best(state):
            return "the best model, of a step before, was being written"
        if components.auditor is not None or training.trusted is not None:
            return "no other worker can be asked whether it computed rightly"
        if (
            components.strategy.has_own
            or components.strategy.state_dict().keys() - {UNFROZEN}
            or own_statistics(components)
        ):
            return "each worker holds something of its own"
        if state.stream:
            return "each worker knows a part of how far the stream is read"
        if self.snapshot_schedule.store.separate_disks and not (self.run_log.led or self.run_log.copies):
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
            time.sleep(_RANK_0_FIRST_S)
        try:
            with run_lock.alone_in(self.run_log.directory.path, _LOCK) as is_alone:
                if is_alone and not self._is_there() and self._is_ours(membership):
                    self._write()
        except (OSError, ManyhostsError) as error:
            sys.stderr.write(f"manyhosts: no snapshot could be made of step {self.loop.training.state.step}: {error}\n")

    def _is_there(self) -> bool:
        newest = newest_complete(self.snapshot_schedule.store.folder, content=False)
        return newest is not None and newest.step >= self.loop.training.state.step

    def _is_ours(self, membership: Membership) -> bool:
        """Whether no one continues in the run directory without this worker: a head that is there has said so."""
        run_dir = self.run_log.directory.path
        return not membership.headless or run_lock.steal_lock(run_dir, run_lock.token_of_this_run())

    def _write(self) -> None:
        loop, state = self.loop, self.loop.training.state
        loop.stepper.settle(finished=False)
        loop.step_reporter.read(all_of_them=True)
        loop.step_reporter.check_weights()
        loop.after_step.leave_validation()
        self.run_log.become_rank_0(continues=False)
        if self.run_log.flush() and self.snapshot_schedule.save_alone(state):
            sys.stderr.write(f"manyhosts: saved step {state.step} before this worker ends\n")
            self.run_log.flush()
