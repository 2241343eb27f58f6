"""What may be due after a step: the end of an epoch, a validation, the best model, a snapshot, each done once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from manyhosts.data import randomness
from manyhosts.events import ValidationDone
from manyhosts.strategies.local_updates import LocalUpdates, averaged_parameters
from manyhosts.training.consistency.held_values import DatasetWatch
from manyhosts.training.consistency.same_weights import compare_weights
from manyhosts.training.evaluation.evaluate import CutOff, OfAllSets
from manyhosts.training.loop.progress import Progress, due, reached
from manyhosts.training.loop.step_reporter import StepReporter
from manyhosts.training.loop.training import Training
from manyhosts.training.telemetry.pace import StragglerMonitor
from manyhosts.units import Duration


class AfterStep:
    """Those of one loop, in order. Where a failure comes between two, the rest is done when training continues."""

    def __init__(
        self,
        training: Training,
        step_reporter: StepReporter,
        *,
        validation: OfAllSets | None,
        pace: StragglerMonitor | None,
        flush: Callable[[], bool],
    ) -> None:
        """`flush` writes what was recorded; whether a disk has taken it."""
        parts, settings, at = training.parts, training.settings, training.at
        self.parts, self.settings, self.state, self.at = parts, settings, training.state, at
        self.limit, self.snapshot_schedule = training.limit, training.snapshot_schedule
        self.stop_signals, self.numbers, self.schedule = training.stop_signals, training.numbers, training.schedule
        self.step_reporter, self.validation, self.pace, self.flush = step_reporter, validation, pace, flush
        self.validate_every = Duration.parse(settings.validate_every, where="validate_every")
        self.snapshot_every = Duration.parse(settings.snapshots.every, where="snapshots.every")
        self.dataset_watch = DatasetWatch(
            parts.data_identity.dataset, parts.world, elsewhere=settings.loader_workers not in (0, "auto")
        )
        exchanges = not parts.strategy.traits.synchronous
        self.all: tuple[Callable[[], None], ...] = (
            *((self.exchange,) if exchanges else ()),
            self.end_epoch,
            self.act_after_epoch,
            self.compare_pace,
            self.validate_if_due,
            self.keep_best,
            self.save_if_due,
        )
        at.all_actions = at.done_actions = len(self.all)
        at.first_duty = 0 if exchanges else self.all.index(self.compare_pace)
        at.before = self.now()

    def do(self, most: int | None = None) -> None:
        """Do what is due after the last step, or the first `most` of it: each once, also behind a failure."""
        at, most = self.at, len(self.all) if most is None else most
        while at.done_actions < most:
            self.all[at.done_actions]()
            at.done_actions += 1

    def now(self) -> Progress:
        """How far the run has come, in numbers that are equal on all workers."""
        state = self.state
        return Progress(state.step, self.parts.source.epochs(state.position), state.seconds)

    def is_at_end(self) -> bool:
        """Whether the run is as long as it was asked to be, and nobody has asked it to stop before."""
        return not self.stop_signals.granted and bool(reached(self.limit, self.now()))

    # Those of the training itself.

    def exchange(self) -> None:
        """Where workers step alone: exchange what is due after the last step, and tell the step with what that took."""
        world, strategy = self.parts.world, self.parts.strategy
        assert isinstance(strategy, LocalUpdates), "no other has such a duty"
        begin, exposed, sent, exchanged = time.perf_counter(), world.exposed_s, world.bytes_sent, world.exchange_s
        strategy.exchange(self.parts.trained)
        self.numbers.lengthen(
            time.perf_counter() - begin,
            exposed_s=world.exposed_s - exposed,
            exchange_s=world.exchange_s - exchanged,
            bytes_sent=world.bytes_sent - sent,
            waits=world.take_waits(),
        )
        self.step_reporter.read()

    def end_epoch(self) -> None:
        """Tell the epoch's sums and begin new ones, where the last step ended one; the schedule may follow epochs."""
        if self.at.ends_epoch:
            self.step_reporter.read(all_of_them=True)
            self.step_reporter.of_epoch()
            self.schedule.after_epoch()

    def act_after_epoch(self) -> None:
        """Let callbacks act, where the last step ended an epoch."""
        if self.at.ends_epoch:
            self.call_callbacks("after_epoch")

    def call_callbacks(self, point: str, **more: Any) -> None:
        """Call that method of each, as of the last step; `more`: what else they are told of the moment."""
        state, callbacks = self.state, self.parts.callbacks
        if callbacks:
            self.snapshot_schedule.before_update()
            randomness.seed_compute(self.settings.seed, randomness.CALLBACK, state.step)
            callbacks.call(point, self.parts.moment(state.step, self.now().epochs, **more))

    def compare_pace(self) -> None:
        """Every few seconds: see whether a host or a link holds the others up."""
        if self.pace is not None and self.pace.is_due(self.at.before.seconds, self.state.seconds):
            self.pace.compare(self.at.taken)

    # Validation.

    def validate_if_due(self) -> None:
        """Validate where that is due after the last step."""
        if self.validation is None:
            self.state.validation_due = False
        elif self.validation_is_due():
            self.validate()

    def validation_is_due(self) -> bool:
        """Whether a validation is due after the last step. After the last of a run it is, before that is saved."""
        return self.state.validation_due or due(self.validate_every, self.at.before, self.now()) or self.is_at_end()

    def validate(self) -> None:
        """Evaluate, and let early stopping and a plateau schedule judge.

        Where a worker is asked to stop meanwhile, all stop, and it is left to whoever resumes the run.
        """
        assert self.validation is not None, "validate() is called where there is a validation set"
        self.step_reporter.read(all_of_them=True)
        begin, self.at.since = time.perf_counter(), time.monotonic()
        state, parts = self.state, self.parts
        if self.snapshot_schedule.saved_at == state.step:
            self.snapshot_schedule.saved_at = -1  # that snapshot knows nothing of this validation
        try:
            with averaged_parameters(parts.strategy, parts.trained), parts.callbacks.evaluated(parts.trained):
                compare_weights(parts, f"before the validation of step {state.step}")
                state.validation = self.validation(parts.model, asked=lambda: self.stop_signals.control_flags)
        except CutOff as cut:
            state.validation_due = True
            self.stop_signals.hear(cut.asked)
            return
        self.dataset_watch.look()
        state.validated_at, state.validation_due = state.step, False
        self.snapshot_schedule.check_watched(state.validation)
        best = self.note_values(state.validation)
        self.call_callbacks("after_validation", values=dict(state.validation))
        self.schedule.after_validation(state.validation[self.snapshot_schedule.rule.metric])
        self.step_reporter.tell(
            ValidationDone(
                step=state.step,
                epoch=self.epoch(),
                values=state.validation,
                best=best,
                seconds=time.perf_counter() - begin,
                time=time.time(),
            )
        )

    def note_values(self, values: Mapping[str, float]) -> bool:
        """Whether a validation is the best so far, by the metric that says so; early stopping may end the run."""
        state, rule, chosen = self.state, self.snapshot_schedule.rule, self.snapshot_schedule.best_rule
        best = chosen.better(values[chosen.metric], state.best)
        if best:
            state.best, state.best_step = values[chosen.metric], state.step
        if rule.better(values[rule.metric], state.stopping_best):
            state.stopping_best, state.validations_without_gain = values[rule.metric], 0
        else:
            state.validations_without_gain += 1
        if self.settings.early_stopping is not None and state.validations_without_gain >= rule.patience:
            state.ended = f"{rule.metric} has not become better for {rule.patience} validations"
        return best

    def epoch(self) -> int:
        """The epoch that the last step belongs to."""
        position = self.state.position
        return position.epoch if position.sample else max(position.epoch - 1, 0)

    # What is kept on disk.

    def keep_best(self) -> None:
        """Write the model as the best one, where the last validation found it to be."""
        state = self.state
        if state.validated_at == state.step == state.best_step != self.snapshot_schedule.best_saved_at:
            self.step_reporter.check_weights()
            self.snapshot_schedule.save_best(state)

    def save_if_due(self) -> None:
        """Make a snapshot where that is due after the last step."""
        is_due = self.at.save_again or due(self.snapshot_every, self.at.before, self.now())
        if is_due and self.snapshot_schedule.saved_at != self.state.step:
            self.save()
        self.at.save_again = False

    def save(self) -> None:
        """Make a snapshot of everything, unless a disk does not take the records of the steps that it would count."""
        self.step_reporter.read(all_of_them=True)
        self.step_reporter.check_weights()
        if self.parts.world.any(not self.flush()):
            self.snapshot_schedule.leave_out(self.state)
        else:
            self.snapshot_schedule.save(self.state)

    # Where training breaks off.

    def before_validation(self) -> int:
        """How much is done when only a validation, and what is kept on disk, is left to do."""
        return self.all.index(self.validate_if_due)

    def leave_validation(self) -> None:
        """Do what is due after the last step and needs no other worker, and note whether a validation is left to do."""
        at, state, place = self.at, self.state, self.before_validation()
        self.do(place)
        is_open = (at.done_actions == place and self.validation_is_due()) or self.is_at_end()
        state.validation_due = self.validation is not None and state.validated_at != state.step and is_open
