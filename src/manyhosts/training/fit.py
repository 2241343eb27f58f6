"""One run: from its directory and its newest snapshot to its end and its records."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

from manyhosts.cluster.membership import CallAlreadyFinished
from manyhosts.cluster.reports import cause
from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import is_connection_error
from manyhosts.config import profile
from manyhosts.config.settings import Settings
from manyhosts.elastic.rendezvous import NoWorkerHasState, Rendezvous
from manyhosts.elastic.session import CollectiveCalls
from manyhosts.errors import ConfigError, first_line
from manyhosts.evaluation.evaluate import OfAllSets
from manyhosts.evaluation.metrics import KEEPING
from manyhosts.events import Listener, Note, Recovered
from manyhosts.launchers.named_runs import keep_failure
from manyhosts.records.run_directory import RunDirectory
from manyhosts.snapshot.fingerprint import weights_sha256
from manyhosts.strategies.audit import WrongBits
from manyhosts.training.consistency.same_given import (
    compare_calls,
    compare_descriptions,
    compare_length,
    optimizer_described,
    others_described,
)
from manyhosts.training.consistency.same_weights import compare_weights
from manyhosts.training.loop.balance import Balance
from manyhosts.training.loop.loop import Loop
from manyhosts.training.loop.numbers import BadStep
from manyhosts.training.loop.run_end import LastSnapshot, RunEnd
from manyhosts.training.loop.source import IndexedSource
from manyhosts.training.loop.training import StopSignals, Training, reached
from manyhosts.training.setup.run_place import add_command
from manyhosts.training.state.recovery import (
    SharedTraining,
    keep_from_resuming,
    rewind_from_bad_step,
    rewind_from_doubt,
    why_not_survive,
)
from manyhosts.training.state.registry import TrainerState
from manyhosts.training.state.run_state import RunState
from manyhosts.training.state.snapshot_schedule import SnapshotSchedule
from manyhosts.training.telemetry.notes import announce
from manyhosts.training.telemetry.pace import StragglerMonitor
from manyhosts.training.telemetry.profiling import profiling_for
from manyhosts.training.telemetry.result import Result
from manyhosts.training.telemetry.run_log import RunLog


class Fit:
    """What `fit` does around the loop."""

    def __init__(  # noqa: PLR0913  # made in one place, by name
        self,
        *,
        calls: CollectiveCalls,
        provider: TrainerState,
        settings: Settings,
        directory: RunDirectory,
        script: Path,
        validation: OfAllSets | None,
        listeners: Sequence[Listener],
        report: Callable[..., None],
        go_on_with: str = "",
        ended_with: str = "",
    ) -> None:
        """Before `fit` nothing is opened or exchanged. `report` sends to the head; see `cluster.reports`.

        `go_on_with`: the command that resumes this run, where no one else shows it; `ended_with`: the hash of the
        weights that the `fit` before this one has left.
        """
        self.go_on_with, self.ended_with = go_on_with, ended_with
        self.calls, self.provider, self.components = calls, provider, provider.components
        self.world = self.components.world
        self.settings, self.directory, self.script = settings, directory, script
        self.snapshot_schedule = SnapshotSchedule(self.components, settings, directory, script)
        self.run_log = RunLog(self.snapshot_schedule, script, listeners, report)
        self.snapshot_schedule.store.meanwhile = partial(self.run_log.report, "busy")
        self.state = RunState()
        self.training = Training(
            components=self.components,
            settings=settings,
            state=self.state,
            snapshot_schedule=self.snapshot_schedule,
            run_log=self.run_log,
            validation=validation,
            stop_signals=StopSignals(cause),
        )
        self.run_end = RunEnd(self.training)
        provider.run, provider.records = self.state, self.run_log
        self.loop: Loop
        self.recovery: Rendezvous | None = None
        self.has_end = True
        """Whether this worker holds the weights of its end, also where others have trained to it without this one."""

    def fit(self) -> Result:
        """Train until the run is as long as was asked, whichever workers go and come, and record how it ended."""
        bad, layout = None, self.components.strategy.layout()
        may_survive = not why_not_survive(self.components) and (layout is None or self.calls.trainers == 1)
        survives = self.calls.begin(most=self.settings.virtual_workers or 0, survives=may_survive, layout=layout)
        try:
            with self.report_failures():
                self.make_loop(survives=survives)
                self.enter()
                with self.run_end.failures_recorded(), self.training.stop_signals.listening():
                    while True:
                        try:
                            found, bad = bad, None  # who continues where this breaks off will come to it again
                            self.go_back(found)
                            if reason := self.loop.train():
                                outcome = self.conclude(reason)
                                break
                        except BadStep as error:
                            self.training.inconsistent = True  # that is of use to those that have not come so far
                            bad = error
                        except WrongBits as wrong:
                            self.leave_out(wrong)
                        except Exception as error:
                            if self.recovery is None or not is_connection_error(error):
                                raise
                            self.recover(error)
                        else:
                            self.recover(None)  # nothing broke: somebody waits to join
        except CallAlreadyFinished as passed:
            outcome = passed.outcome
            self.take_end(outcome, replaces=passed.replaces)
        self.calls.done(outcome)
        if outcome["asked_by"]:
            self._exit_by(outcome["asked_by"])
        return Result(**outcome["result"], run_dir=self.directory.path)

    # The beginning.

    def make_loop(self, *, survives: bool) -> None:
        """Make what trains and, where others continue without a lost worker, what takes this one through that."""
        training, run_log = self.training, self.run_log
        balance = Balance(self.components.cut_batches) if self.settings.balance == "speed" else None
        pace = StragglerMonitor(self.world, run_log.remembered, run_log.emit, balance) if self.world.is_shared else None
        training.profiling = profiling_for(profile.asked(), self.world, self.directory.profile, run_log.say)
        training.survives = survives
        self.loop = Loop(training, pace)
        if survives:
            shared = SharedTraining(self.provider, self.loop, begin=self.begin)
            self.recovery = Rendezvous(self.calls, shared, most=self.settings.virtual_workers or 0)

    def enter(self) -> None:
        """Begin, whichever workers go and come meanwhile; or come to those that have begun."""
        recovery = self.recovery
        if recovery is None:
            self.begin()
        elif self.world.is_joining:
            recovery.join()
        else:
            try:
                recovery.check()
                self.begin()
            except Exception as error:
                if not is_connection_error(error):
                    raise
                recovery.work.stand_nowhere()
                recovery.go_on(error)  # perhaps where others have come to by then

    def begin(self) -> None:
        """Open the run directory, take up its newest snapshot that fits, and report where the run begins.

        Every worker calls this; where it breaks off, again.

        Raises:
            ConfigError, DataError: the directory is that of another script, or something has changed that must not.
            SnapshotError: there are snapshots, and none can be continued from.
        """
        compare_calls(self.world, "fit")
        self.run_log.lay_down()
        self.provider.refresh()
        if isinstance(source := self.components.batches.source, IndexedSource):
            compare_length(self.world, source.order.length, len(cast(Sized, self.components.batches.identity.dataset)))
        self._open_directory()  # no one looks into it before rank 0 has made it
        was_changed, schedule, training = self._was_changed(), self.snapshot_schedule, self.training
        found, loaded = schedule.begin()
        if was_changed and loaded is not None:
            self.world.notes.append(
                f"the model was changed after the last fit, and training continues from the snapshot of step "
                f"{found.step}, without that change: make it in a callback, or begin another run by init_from="
            )
        if loaded is None and schedule.store.leads_disk() and (kept := self.directory.set_aside()):
            self.world.notes.append(
                "there is no snapshot to continue from, so training begins again; the records of before, and the best "
                f"model, are in {kept}"
            )
        if loaded is None and self.recovery is not None:
            # In a step, and not in what comes before the first one.
            changed = training.inconsistent and max(training.tried, training.under_way) > 0
            if self.world.any(changed):
                raise NoWorkerHasState(
                    "workers were lost while the model changed, and there is no snapshot to go back to"
                )
        self.state.become(found)
        self.components.weighing.take_up(found.counts_by)
        with self.components.strategy.averaged(self.components.trained):
            compare_weights(self.components, f"at the beginning, at step {found.step}")
        own = self.components.own_step
        compare_descriptions(
            self.world,
            {
                "arguments of fit": {"duration": str(self.settings.duration)},
                "optimizers": optimizer_described(self.components.optimizer),
                "modules that the step uses and the run was not given": others_described(
                    own.others() if own and self.world.size > 1 else {}
                ),
            },
        )
        validation = training.validation
        if validation is not None and (names := validation.look(self.components.model)):
            schedule.check_watched(names)
        if validation is not None and (keeping := validation.stateful_metrics):
            self.world.notes.append(f"{', '.join(keeping)} {KEEPING}")
        self.loop.be_at_snapshot()
        training.start_clock()
        is_over = loaded is not None and bool(self.state.ended or reached(training.limit, training.now()))
        self.run_log.open_records(self.state.step, is_over=is_over)
        if schedule.second is not None:
            schedule.second.catch_up()
        why_not = (
            ""
            if self.recovery
            else why_not_survive(self.components) or "no one can continue since a call before this one"
        )
        announce(training, loaded, why_not_survive=why_not)

    def _was_changed(self) -> bool:
        """Whether somebody has changed the model since the last `fit`, as far as a worker that holds it all can say."""
        before, self.ended_with, strategy = self.ended_with, "", self.components.strategy
        holds_all = bool(before) and strategy.mesh.parts == 1
        return holds_all and weights_sha256(self.components.model, strategy.holding) != before

    def _open_directory(self) -> None:
        """Lock the run directory, on each disk that has one, and make it. Where that cannot be, every worker raises.

        Raises:
            ConfigError: another run is in progress in it, or it is that of another script.
        """
        refused: ConfigError | None = None
        if self.snapshot_schedule.store.leads_disk():
            try:
                self.run_log.lock()
                if self.world.is_rank_0:
                    self.directory.open_for(self.script)
            except ConfigError as error:
                refused = error
        gather_plain(self.world, None, refused)
        if self.world.is_rank_0:
            self.run_log.report("directory", path=str(self.directory.path))

    # Ways back into training.

    def go_back(self, bad: BadStep | None) -> None:
        """Go back to a snapshot where the last step was `bad`, or steps before it are in doubt.

        Where that may come, see that there always is one to go back to. Every worker calls this.
        """
        if bad is not None:
            self.report_rewind(rewind_from_bad_step(bad, self.loop))
        if (trusted := self.training.trusted) is not None:
            self.report_rewind(rewind_from_doubt(trusted, self.loop))
        may_go_back = self.settings.on_bad_step == "rewind" or self.settings.audit is not None
        if may_go_back and self.snapshot_schedule.saved_at < 0:
            self.loop.after_step.save()

    def report_rewind(self, news: Recovered | Note) -> None:
        """Report that the run has gone back, or why not; what came after is reported again."""
        if isinstance(news, Recovered):
            self.run_log.recent.clear()
            self.run_log.resume_samples(self.state.step)
        self.run_log.emit(news)
        self.run_log.flush()

    def recover(self, error: Exception | None) -> None:
        """Continue with those left, or wait to join; where no one continues, keep what this worker has, and end.

        Raises:
            Exception: `error`, where no one continues.
            SystemExit: no one continues, for the run was asked to stop.
        """
        assert self.recovery is not None, "where no worker continues none joins, and a break ends the run"
        try:
            self.recovery.go_on(error)
        except Exception:
            if self.recovery.refused:  # and so they have not finished without this worker
                LastSnapshot(self.loop).make()
                if self.training.stop_signals.grant_own():  # a worker was lost, or came, when all were asked
                    self.run_end.record("interrupted", self.training.stop_signals.granted)
                    self._exit_by(self.training.stop_signals.number)
            raise

    def leave_out(self, wrong: WrongBits) -> None:
        """Continue without workers that compute wrongly, or end where that cannot be.

        Raises:
            WrongBits: no one can continue, or no one knows who is wrong.
        """
        if self.recovery is None or not wrong.guilty:
            keep_from_resuming(self.snapshot_schedule, self.world, wrong.trusted)
            raise wrong
        self.training.trusted = wrong.trusted if wrong.trusted < self.state.step else None
        if self.world.rank not in wrong.guilty:  # they themselves say nothing, and wait to be ended
            for rank, what in sorted(wrong.guilty.items()):
                self.recovery.membership.accuse(rank, what)
        self.recovery.go_on(wrong)

    # The end.

    def conclude(self, reason: str) -> dict[str, Any]:
        """Validate, save and record that training is over. Returns what came out, in plain values."""
        state, stop_signals, after_step = self.state, self.training.stop_signals, self.loop.after_step
        if after_step.pace is not None and self.world.size > 1:
            after_step.pace.compare(self.training.taken, is_last=True)
        after_step.dataset_watch.look()
        if self.training.profiling is not None:
            self.training.profiling.finish()
        if (
            self.training.validation is not None
            and state.step
            and state.validated_at != state.step
            and not stop_signals.granted
        ):
            after_step.validate()
        after_step.keep_best()
        self.run_end.save(self.loop)
        if text := self.snapshot_schedule.put_aside_best(state):
            self.run_log.say(text, state.step)
        after_step.call_callbacks("end")
        self.snapshot_schedule.finish_copies(partial(self.run_log.report, "busy"))
        self.components.strategy.average(self.components.trained)  # a run ends with one model
        compare_weights(self.components, f"at the end, at step {state.step}")
        if (auditor := self.components.auditor) is not None:
            text = f"audit: of {auditor.compared} parts that were computed again every bit was equal"
            self.run_log.say(text, state.step)
        if text := self.components.strategy.about_time():
            self.run_log.say(text, state.step)
        status = "interrupted" if stop_signals.granted else "stopped early" if state.ended else "completed"
        weights = self.run_end.record(status, reason, is_failure=False)
        if self.snapshot_schedule.second is not None:
            self.snapshot_schedule.second.keep_end()
        if self.recovery is not None:
            self.world.barrier()  # no one leaves before everybody has done its part
        return {
            "result": {
                "status": status,
                "reason": reason,
                "steps": state.step,
                "epochs": self.components.batches.source.epochs(state.position),
                "validation": dict(state.validation),
                "best": state.best,
                "best_step": state.best_step,
                "seconds": state.seconds,
                "weights_sha256": weights,
            },
            "run": state.to_dict(),
            "asked_by": stop_signals.number,
        }

    def _exit_by(self, number: int) -> NoReturn:
        """End this script as that signal has asked it to."""
        if self.go_on_with and self.world.is_rank_0:
            sys.stderr.write(f"manyhosts: resume with: {self.go_on_with}\n")
        raise SystemExit(128 + number)

    def take_end(self, outcome: dict[str, Any], *, replaces: bool) -> None:
        """The others have finished this training: be where it ended, where this worker was not there."""
        if not self.world.is_joining and self.state.step == outcome["run"]["step"]:
            return
        self.state.become(RunState.from_dict(outcome["run"], {}))
        self.has_end = is_here = self.snapshot_schedule.take_end(self.state.step)
        if os.environ.get("RANK") == "0" and not (is_here and replaces):
            # What a script has its rank 0 do is done by another, or must not be done with a model that is untrained.
            os.environ["RANK"] = os.environ["LOCAL_WORLD_SIZE"]

    @contextmanager
    def report_failures(self) -> Iterator[None]:
        """Whatever ends this call within: the others and the launcher know that this worker is in it no more."""
        try:
            yield
        except CallAlreadyFinished:
            raise
        except BaseException as error:
            self.calls.fail()
            if self.world.is_rank_0:
                add_command(error, self.go_on_with)
                if self.go_on_with and isinstance(error, Exception) and not self.directory.run_json.exists():
                    keep_failure(self.directory.path, f"{type(error).__name__}: {first_line(error)}")
            raise
        finally:
            if self.training.profiling is not None:
                self.training.profiling.close()
            self.run_log.report("rest")
