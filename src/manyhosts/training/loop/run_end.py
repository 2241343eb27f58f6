"""The end of a run: its last snapshot, and the record of how it ended, also where it failed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from manyhosts import refusals
from manyhosts.cluster.membership import CallAlreadyFinished
from manyhosts.cluster.neighbours import Neighbours
from manyhosts.communication.gathering import gather_plain
from manyhosts.errors import ManyhostsError, TrainingError, first_line
from manyhosts.events import Note, RunEnded
from manyhosts.snapshot.fingerprint import weights_sha256
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
        """See that the snapshot of the last step is whole. Where the disk has no room, older ones go, one by one.

        Raises:
            TrainingError: it is not, and there is none left that may go.
        """
        snapshot_schedule, step = self._snapshot_schedule, self._state.step
        if snapshot_schedule.saved_at != step:
            loop.after_step.save()
        snapshot_schedule.finish()
        tried_again = False
        while not snapshot_schedule.has_whole(step):
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
        """Record how the run ended. Returns the hash of the weights; nothing where nobody can know it."""
        strategy = self._parts.strategy
        # Behind a failure the others may not come to where the whole weights are put together.
        can_hash = strategy.traits.holds_whole_model or not is_failure
        knows = can_hash and self._run_log.world.drain()
        weights = weights_sha256(self._parts.model, strategy.holding) if knows else ""
        position = self._state.position
        if self._run_log.world.is_leader and (beside := self._neighbours.in_words()):
            self._run_log.tell(Note(text=beside, step=self._state.step, time=time.time()))
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
