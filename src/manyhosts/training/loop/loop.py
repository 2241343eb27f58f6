"""The training loop: steps, and what is due after each, until there is a reason to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhosts.data.steps import Steps
from manyhosts.training.evaluation.evaluate import OfAllSets
from manyhosts.training.loop.after_step import AfterStep
from manyhosts.training.loop.progress import Progress, reached
from manyhosts.training.loop.step import NoteSamples, Stepper
from manyhosts.training.loop.step_reporter import StepReporter
from manyhosts.training.loop.training import Training
from manyhosts.training.telemetry.pace import StragglerMonitor


class Loop:
    """Trains until a rule gives a reason to stop."""

    def __init__(
        self,
        training: Training,
        *,
        validation: OfAllSets | None,
        flush: Callable[[], bool],
        note_samples: NoteSamples | None,
        see_first: Callable[[Any], None] | None = None,
        keep_buffers: bool = False,
        pace: StragglerMonitor | None = None,
    ) -> None:
        """`flush`, `pace`: see `AfterStep`. `note_samples`, `see_first`, `keep_buffers`: see `Stepper`."""
        self.parts, self.settings, self.state, self.at = training.parts, training.settings, training.state, training.at
        self.stop_signals, self.flags, self.limit = training.stop_signals, training.flags, training.limit
        self.exchanges = not training.parts.strategy.traits.synchronous
        """Whether workers step alone, and exchange something after a step."""
        self.step_reporter = StepReporter(training)
        self.after_step = AfterStep(training, self.step_reporter, validation=validation, pace=pace, flush=flush)
        self.stepper = Stepper(training, note_samples=note_samples, see_first=see_first, keep_buffers=keep_buffers)

    def train(self) -> str:
        """Train from where the state stands, after what is still due there.

        Returns why it ended; empty where somebody waits to join, and all have finished the same step.

        Raises:
            BadStep: a step went wrong, and all are to go back behind it.
        """
        self.parts.trained.train()
        if self.parts.watcher is not None:
            self.parts.watcher.begins(self.parts, self.settings, self.state)
        self.stepper.counting.settled = False
        self.after_step.call_callbacks("begin")
        steps: Steps | None = None
        while True:
            self.after_step.do()
            if self.at.change_granted:
                reason = ""
                break
            now = self.after_step.now()
            if reason := self.stop_signals.granted or self.state.ended or reached(self.limit, now):
                break
            if steps is None:
                steps = self.parts.source.steps(self.state.position, self.state.stream)
            self.at.before = now
            self.stepper.train_step(steps)
            if not self.exchanges:
                self.step_reporter.read()
        if reason:
            self.step_reporter.read(all_of_them=True)
        if steps is not None:
            steps.close()  # and not when nobody holds it any more: then each loader process would be waited for for 5 s
        return reason

    # Where it stands, for those who take it elsewhere.

    def stand(self) -> None:
        """The state is that of a snapshot now: forget what was under way."""
        after_step, at = self.after_step, self.at
        after_step.numbers.pending.clear()
        at.stand(done_actions=after_step.before_validation() if self.state.validation_due else len(after_step.all))
        at.save_again, at.before = self.state.validation_due, after_step.now()
        if self.parts.auditor is not None:
            self.parts.auditor.forget()

    def invalidate_state(self) -> None:
        """What this worker holds is of no use to others, until it stands at a snapshot or takes another's place."""
        self.at.inconsistent = True

    def doubt(self, trusted: int | None) -> None:
        """The steps behind `trusted` are in doubt; None: no step is."""
        self.at.trusted = trusted

    def enter_group(self) -> None:
        """This worker is among others now: have the state of the last step that was finished."""
        self.step_reporter.read(all_of_them=True)
        self.at.change_granted = False  # what it granted has happened

    def go_on(self, *, save_again: bool) -> None:
        """All workers are as far as the farthest. `save_again`: a snapshot is lost that was being written."""
        self.at.go_on(save_again=save_again)
        self.stepper.first_steps.stream_is_new = False  # a new worker would not compare it
        if self.parts.world.is_leader:
            self.flags.start_clock()

    def place(self) -> dict[str, Any]:
        """Where this worker stands beside its `RunState`, in plain values, for one that is behind."""
        at, snapshot_schedule = self.at, self.after_step.snapshot_schedule
        return {
            "duties_done": at.done_actions,
            "ends_epoch": at.ends_epoch,
            "before": [at.before.step, at.before.epochs, at.before.seconds],
            "granted": self.stop_signals.granted,
            "number": self.stop_signals.number,
            "saved_at": snapshot_schedule.saved_at,
            "best_saved_at": snapshot_schedule.best_saved_at,
        }

    def take_place(self, given: dict[str, Any]) -> None:
        """Stand where the worker stands that gave `place`, whose state this worker holds now."""
        at, snapshot_schedule = self.at, self.after_step.snapshot_schedule
        at.done_actions, at.ends_epoch, at.inconsistent = given["duties_done"], given["ends_epoch"], False
        at.before = Progress(*given["before"])
        self.stop_signals.granted, self.stop_signals.number = given["granted"], given["number"]
        snapshot_schedule.saved_at, snapshot_schedule.best_saved_at = given["saved_at"], given["best_saved_at"]
