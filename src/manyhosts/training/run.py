"""One run: from its directory and its newest snapshot to its end and its records."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyhosts import refusals
from manyhosts.cluster.membership import Passed
from manyhosts.cluster.reports import Reporter, cause
from manyhosts.communication.gathering import gather_words
from manyhosts.communication.world import is_break
from manyhosts.config.settings import Settings
from manyhosts.config.strategies import Single
from manyhosts.elastic.recovery import Recovery, why_not_survive
from manyhosts.elastic.session import CollectiveCalls, StateProvider
from manyhosts.errors import CommunicationError, ConfigError, ManyhostsError, TrainingError, first_line
from manyhosts.events import Listener, Note, Recovered, RunEnded
from manyhosts.records.run_directory import RunDirectory
from manyhosts.snapshot.fingerprint import weights_sha256
from manyhosts.snapshot.load import Loaded
from manyhosts.strategies.audit import WrongBits
from manyhosts.strategies.local_updates import LocalUpdates
from manyhosts.training import go_on, left_out
from manyhosts.training.bad_steps import BadStep
from manyhosts.training.evaluate import Evaluation
from manyhosts.training.journal import Journal
from manyhosts.training.last_snapshot import LastSnapshot
from manyhosts.training.loop import Loop, WorkersChange
from manyhosts.training.notes import announce
from manyhosts.training.pace import Pace
from manyhosts.training.remote_copy import RemoteCopy
from manyhosts.training.result import Result
from manyhosts.training.rewind import go_back
from manyhosts.training.same_given import compare_descriptions, optimizer_described
from manyhosts.training.same_weights import compare_weights
from manyhosts.training.snapshot_schedule import SnapshotSchedule
from manyhosts.training.state import RunState
from manyhosts.training.stop_signals import StopSignals


class Run:
    """What `fit` does around the loop."""

    def __init__(  # noqa: PLR0913  # made in one place, by name
        self,
        *,
        calls: CollectiveCalls,
        provider: StateProvider,
        settings: Settings,
        directory: RunDirectory,
        script: Path,
        validation: Evaluation | None,
        listeners: Sequence[Listener],
        reporter: Reporter | None,
        go_on_with: str = "",
    ) -> None:
        """Nothing is opened, and no other worker met, before `fit`.

        `go_on_with`: the command that goes on with this run, where nobody else tells it.
        """
        self.go_on_with = go_on_with
        self.calls, self.provider = calls, provider
        self.parts, self.settings, self.directory, self.validation = provider.parts, settings, directory, validation
        self.world, self.script = self.parts.world, script
        to, keep = settings.snapshots.to, settings.snapshots.keep
        second = RemoteCopy(to, directory, keep=keep, script=script, world=self.world) if to is not None else None
        self.snapshot_schedule = SnapshotSchedule(
            self.parts,
            directory,
            keep=keep,
            strategy=settings.strategy.name if self.world.is_shared else Single.name,
            settings=settings,
            tell=lambda news: self.journal.tell(news),
            second=second,
        )
        self.journal = Journal(
            world=self.world,
            settings=settings,
            directory=directory,
            script=script,
            snapshot_schedule=self.snapshot_schedule,
            listeners=listeners,
            reporter=reporter,
        )
        self.state = RunState()
        self.loaded: Loaded | None = None
        self.recovery: Recovery | None = None
        self.has_end = True
        """Whether this worker holds the weights of its end, also where others have trained to it without this one."""

    def begin(self, loop: Loop) -> None:
        """Open the run directory, take up its newest snapshot that fits, and tell where the run begins.

        Every worker calls this; where it breaks off, once more.

        Raises:
            ConfigError, DataError: the directory is that of another script, or something has changed that must not.
            SnapshotError: there are snapshots, and none can be gone on from.
        """
        self.journal.lay_down()
        self.provider.refresh()
        self._open_directory()  # nobody looks into it before the leader has made it
        found, self.loaded = self.snapshot_schedule.begin()
        self.state.become(found)
        if not isinstance(self.parts.strategy, LocalUpdates):
            self.compare(f"at the beginning, at step {found.step}")
        lengths, optimizer = {"duration": str(self.settings.duration)}, optimizer_described(self.parts.optimizer)
        compare_descriptions(self.world, {"arguments of fit": lengths, "optimizers": optimizer})
        if self.validation is not None and (names := self.validation.look(self.parts.model)):
            self.snapshot_schedule.check_watched(names)
        loop.stand()
        loop.began = time.perf_counter() - self.state.seconds
        self.journal.open_records(self.state.step)
        if self.snapshot_schedule.second is not None:
            self.snapshot_schedule.second.catch_up()
        announce(self, loop)

    def _open_directory(self) -> None:
        """Lock the run directory, on each disk that has one, and make it. Where that cannot be, every worker raises.

        Raises:
            ConfigError: another run is going on in it, or it is that of another script.
        """
        refused = {}
        if self.snapshot_schedule.store.leads_disk():
            try:
                self.journal.lock()
                if self.world.is_leader:
                    self.directory.open_for(self.script)
            except ConfigError as error:
                refused = {"what": error.what, "where": error.where, "fix": error.fix}
        words = gather_words(self.world, json.dumps(refused))
        if told := next(filter(None, map(json.loads, words)), None):
            raise ConfigError(told["what"], where=told["where"], fix=told["fix"])
        if self.journal.reporter is not None and self.world.is_leader:
            self.journal.reporter.send("directory", path=str(self.directory.path))

    def fit(self) -> Result:
        """Train until the run is as long as was asked, and record how it ended."""
        goes_on = self.calls.begin(most=self.settings.virtual_workers or 0, survives=not why_not_survive(self.parts))
        if goes_on:
            most = self.settings.virtual_workers or 0
            self.recovery = Recovery(
                self.calls,
                self.provider,
                self.snapshot_schedule,
                self.journal,
                state=self.state,
                begin=self.begin,
                most=most,
            )
        try:
            outcome = self.train_and_end()
        except Passed as passed:
            outcome = passed.outcome
            self.take_end(outcome, replaces=passed.replaces)
        except BaseException as error:
            self.calls.fail()
            if self.world.is_leader:
                go_on.add_to(error, self.go_on_with)
            raise
        finally:
            self.journal.say_rest()
        self.calls.done(outcome)
        if outcome["asked_by"]:
            if self.go_on_with and self.world.is_leader:
                sys.stderr.write(f"manyhosts: go on with: {self.go_on_with}\n")
            raise SystemExit(128 + outcome["asked_by"])
        return Result(**outcome["result"], run_dir=self.directory.path)

    def take_end(self, outcome: dict[str, Any], *, replaces: bool) -> None:
        """The others have finished this training: be where it ended, where this worker was not there."""
        if not self.world.apart:
            return
        self.state.become(RunState.from_dict(outcome["run"], {}))
        self.has_end = is_here = self.snapshot_schedule.take_end(self.state.step)
        if os.environ.get("RANK") == "0" and not (is_here and replaces):
            # What a script has its leader do is done by another, or must not be done with a model that is untrained.
            os.environ["RANK"] = os.environ["LOCAL_WORLD_SIZE"]

    def train_and_end(self) -> dict[str, Any]:
        """Train, and record how it ended. Returns what came out, in plain values."""
        stop_signals, recovery = StopSignals(cause), self.recovery
        loop = Loop(
            self.parts,
            settings=self.settings,
            state=self.state,
            validation=self.validation,
            snapshot_schedule=self.snapshot_schedule,
            stop_signals=stop_signals,
            tell=self.journal.tell,
            flush=self.journal.flush,
            note_samples=self.journal.note_samples if self.settings.record_samples else None,
            keep_buffers=recovery is not None,
            pace=Pace(self.world, self.journal.remembered, self.journal.tell),
        )
        if recovery is not None:
            recovery.use(loop)
        if recovery is not None and self.world.apart:
            recovery.join()
        else:
            self.begin_with_whoever_is_there(loop)
        try:
            with stop_signals.listening():
                return self.train_with_whoever_is_there(loop)
        except Passed:
            raise
        except ManyhostsError as error:
            self.end("failed", error.what)
            raise
        except Exception as error:
            told = refusals.explained(error)
            said = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
            self.end("failed", said if told is None else told.what)
            raise
        except KeyboardInterrupt:
            self.end("interrupted", "a second signal, obeyed at once")
            raise

    def conclude(self, loop: Loop, reason: str) -> dict[str, Any]:
        """Record that training is over. Returns what came out, in plain values."""
        state, stop_signals = self.state, loop.stop_signals
        if (auditor := self.parts.auditor) is not None:
            text = f"audit: of {auditor.compared} parts that were computed again every bit was equal"
            self.journal.tell(Note(text=text, step=state.step, time=time.time()))
        status = "interrupted" if stop_signals.granted else "stopped early" if state.ended else "completed"
        weights = self.end(status, reason)
        if self.snapshot_schedule.second is not None:
            self.snapshot_schedule.second.keep_end()
        result = {
            "status": status,
            "reason": reason,
            "steps": state.step,
            "epochs": self.parts.source.epochs(state.position),
            "validation": dict(state.validation),
            "best": state.best,
            "best_step": state.best_step,
            "seconds": state.seconds,
            "weights_sha256": weights,
        }
        return {
            "result": result,
            "run": state.to_dict(),
            "asked_by": stop_signals.number if stop_signals.granted else 0,
        }

    def begin_with_whoever_is_there(self, loop: Loop) -> None:
        """Begin, whoever goes and comes meanwhile: perhaps where others have come to by then."""
        try:
            if self.recovery is not None:
                self.recovery.check()
            self.begin(loop)
        except Exception as error:
            if self.recovery is None or not is_break(error):
                raise
            self.recovery.stand_nowhere()
            self.recovery.go_on(error)

    def train_with_whoever_is_there(self, loop: Loop) -> dict[str, Any]:
        """Train to the end, whoever goes and comes meanwhile. Returns what came out, in plain values."""
        recovery, bad = self.recovery, None
        while True:
            try:
                if bad is not None:
                    self.rewind(bad, loop)
                    bad = None
                if loop.trusted is not None:
                    self.tell_way_back(left_out.go_back(loop, self.snapshot_schedule))
                outcome = self.conclude(loop, self.train(loop))
                if recovery is not None:
                    self.world.barrier()  # nobody leaves before everybody has done its part
            except BadStep as found:
                bad, loop.inconsistent = (
                    found,
                    True,
                )  # what this worker holds is of no use to those that have not come so far
            except WrongBits as wrong:
                bad = None
                self.leave_out(wrong, loop)
            except Exception as error:
                if recovery is None or not (isinstance(error, WorkersChange) or is_break(error)):
                    raise
                bad = None  # whoever goes on stands before it, and will come to it again
                self.go_on_or_save(error, loop)
            else:
                return outcome

    def go_on_or_save(self, error: Exception, loop: Loop) -> None:
        """Meet those that are left; where nobody goes on, keep what this worker holds, and end.

        Raises:
            Exception: `error`, where nobody goes on.
        """
        assert self.recovery is not None, "the caller has seen to that"
        last = LastSnapshot(self.snapshot_schedule, self.journal, loop)
        try:
            self.recovery.go_on(error)
        except Passed:
            raise
        except Exception as ended:
            if self.recovery.refused:
                last.make()
            if isinstance(ended, WorkersChange):  # all was well, but for the head
                raise CommunicationError(
                    self.recovery.refused, where="recovery", fix="start it again: it goes on from its last snapshot"
                ) from None
            raise

    def leave_out(self, wrong: WrongBits, loop: Loop) -> None:
        """Go on without workers that compute wrongly, or end where that cannot be.

        Raises:
            WrongBits: nobody can go on, or nobody knows who is wrong.
        """
        if self.recovery is None or not wrong.guilty:
            left_out.keep_from_resuming(self.snapshot_schedule, self.world, wrong.trusted)
            raise wrong
        loop.trusted = wrong.trusted if wrong.trusted < self.state.step else None
        left_out.tell_head(wrong, self.world)
        self.recovery.go_on(wrong)

    def rewind(self, bad: BadStep, loop: Loop) -> None:
        """Go back to the last snapshot, in the records too."""
        self.tell_way_back(go_back(bad, loop, self.snapshot_schedule))

    def tell_way_back(self, news: Recovered | Note) -> None:
        """Tell that the run has gone back, or why not; what came after is told again."""
        if isinstance(news, Recovered):
            self.journal.recent.clear()
            self.journal.resume_samples(self.state.step)
        self.journal.tell(news)
        self.journal.flush()

    def train(self, loop: Loop) -> str:
        """Train, validate and save. Returns why it ended. Called anew where workers went or came."""
        state = self.state
        goes_back = self.settings.on_bad_step == "rewind" or self.settings.audit is not None
        if goes_back and self.snapshot_schedule.saved_at < 0:
            loop.save()  # so that there always is one to go back to
        reason = loop.run()
        if (
            self.validation is not None
            and state.step
            and state.validated_at != state.step
            and not loop.stop_signals.granted
        ):
            loop.validate()
        loop.keep_best()
        self.save_end(loop)
        self.snapshot_schedule.finish_copies(self.journal.say_busy)
        if isinstance(self.parts.strategy, LocalUpdates):
            self.parts.strategy.average(self.parts.trained)  # a run ends with one model
        self.compare(f"at the end, at step {state.step}")
        return reason

    def save_end(self, loop: Loop) -> None:
        """See that the snapshot of the last step is whole. Where the disk has no room, older ones go, one by one.

        Raises:
            TrainingError: it is not, and there is none left that may go.
        """
        snapshot_schedule, step = self.snapshot_schedule, self.state.step
        if snapshot_schedule.saved_at != step:
            loop.save()
        snapshot_schedule.finish()
        tried_again = False
        while not snapshot_schedule.has_whole(step):
            if tried_again and not (snapshot_schedule.is_short_of_room() and snapshot_schedule.drop_oldest()):
                told = json.dumps(
                    [snapshot_schedule.trouble, snapshot_schedule.last_good()]
                )  # the leader alone knows all of it
                trouble, last_good = json.loads(gather_words(self.world, told)[0])
                raise TrainingError(
                    f"the snapshot of the last step, {step}, could not be written: {trouble}",
                    where=str(self.directory.snapshots),
                    fix=f"make room on that disk and start again. {last_good}",
                )
            tried_again = True
            loop.save()
            snapshot_schedule.finish()

    def compare(self, moment: str) -> None:
        """See that all workers hold the same model.

        Raises:
            TrainingError: they do not.
        """
        compare_weights(self.parts, moment)

    def end(self, status: str, reason: str) -> str:
        """Record how the run ended. Returns the hash of the weights."""
        weights = weights_sha256(self.parts.model)
        position = self.state.position
        self.journal.tell(
            RunEnded(
                step=self.state.step,
                epoch=position.epoch,
                status=status,
                reason=reason,
                weights_sha256=weights,
                time=time.time(),
            )
        )
        self.journal.flush()
        return weights
