"""The training loop: a step, what is due after it, what is reported of it, until there is a reason to stop.

What is reported: the same numbers come to every worker after the same step, so all of them add up the same sums, learn
of the same wishes, and find the same steps bad. What may be due: the end of an epoch, a validation, the best model, a
snapshot, each done once, in order, however often something fails in between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from manyhosts.data import randomness
from manyhosts.data.steps import Steps
from manyhosts.errors import TrainingError
from manyhosts.events import EpochDone, Note, StepDone, StepTiming, ValidationDone
from manyhosts.strategies.local_updates import LocalUpdates, averaged_parameters
from manyhosts.strategies.strategy import UpdatesWithin
from manyhosts.training.consistency.finite import first_not_finite
from manyhosts.training.consistency.held_values import DatasetWatch
from manyhosts.training.consistency.same_weights import compare_weights
from manyhosts.training.evaluation.evaluate import CutOff, OfAllSets
from manyhosts.training.loop.learning_rate import VanishedRate
from manyhosts.training.loop.numbers import BadStep, StepFacts, StepMetricValues, named
from manyhosts.training.loop.step import NoteSamples, Stepper
from manyhosts.training.loop.training import Progress, Training, due, reached, total_steps
from manyhosts.training.telemetry.pace import StragglerMonitor
from manyhosts.units import Duration


class StepReporter:
    """Tells the steps of one loop, its epochs, and what its workers have found out on the way."""

    def __init__(self, training: Training) -> None:
        self.parts, self.state, self.flags, self.tell = training.parts, training.state, training.flags, training.tell
        self.bad_steps, self.numbers, self.snapshot_schedule = (
            training.bad_steps,
            training.numbers,
            training.snapshot_schedule,
        )
        steps = total_steps(training.limit, training.parts.source.steps_per_epoch)
        self.rate = VanishedRate(steps) if training.schedule.follows_steps else None
        self.last: StepFacts | None = None
        """The last step that was reported and whose numbers were well."""

    def read(self, *, all_of_them: bool = False) -> None:
        """Tell the steps whose numbers have come, and take from them what the workers decide together.

        Raises:
            BadStep, TrainingError: see `of_step`.
        """
        for numbers in self.numbers.read(all_of_them=all_of_them):
            self.of_step(numbers)
        if self.parts.world.notes or self.parts.world.news:
            self.of_world()

    def of_step(self, numbers: StepMetricValues) -> None:
        """Tell a step, add it to its epoch's sums, and hear what the workers decide together.

        Raises:
            BadStep: its numbers are none, and all are to go back to before it.
            TrainingError: its numbers are none, and that ends the run.
        """
        good = self.check(numbers)
        self.flags.hear(numbers.control_flags)
        state, facts = self.state, numbers.facts
        if good:
            weight = facts.samples if facts.weight is None else facts.weight
            state.epoch_loss += numbers.values["loss"] * weight
            state.epoch_weight += weight
            state.epoch_samples += facts.samples
        state.epoch_seconds += facts.timing.total
        self.tell(step_done(numbers))
        if self.rate is not None and (text := self.rate.note(facts.lr, facts.step)):
            self.tell(Note(text=text, step=facts.step, time=time.time()))

    def of_world(self) -> None:
        """Tell what the exchanges between workers have left to be said."""
        world, step = self.parts.world, self.state.step
        while world.notes:
            self.tell(Note(text=world.notes.pop(0), step=step, time=time.time()))
        while world.news:
            self.tell(world.news.pop(0)(step=step, time=time.time()))

    def of_epoch(self) -> None:
        """Tell the sums of the epoch that has ended, and begin new ones."""
        state = self.state
        self.tell(
            EpochDone(
                step=state.step,
                epoch=state.position.epoch - 1,
                train_loss=state.epoch_loss / state.epoch_weight if state.epoch_weight else math.nan,
                seconds=state.epoch_seconds,
                samples=state.epoch_samples,
                time=time.time(),
            )
        )
        state.epoch_loss, state.epoch_weight, state.epoch_samples, state.epoch_seconds = 0.0, 0.0, 0, 0.0

    def check(self, numbers: StepMetricValues) -> bool:
        """Whether the numbers of a step are numbers. Where not, stop, go back, or say that the step was left out."""
        facts, trouble = numbers.facts, self.bad_steps.trouble(numbers)
        if not trouble:
            self.last = facts
            return True
        where = _where(facts)
        if facts.weight == 0:
            trouble = "none of its samples counts in the loss"
        elif facts.step in self.state.left_out:
            trouble = "it went wrong before"
        elif self.bad_steps.rewinds:
            raise BadStep(facts.step, trouble, where)
        if facts.weight == 0 or self.bad_steps.leave_out or self.bad_steps.rewinds:
            text = f"step {facts.step} was left out: {trouble} ({where})"
            self.tell(Note(text=text, step=facts.step, time=time.time()))
            return False
        # On a GPU later steps have changed the weights by now, and where it updates within itself this one has.
        if (
            self.bad_steps.on_cpu
            and not isinstance(self.parts.strategy, UpdatesWithin)
            and (what := self._not_finite())
        ):
            raise self._bad_update(what)
        raise self._end(f"{trouble} in step {facts.step}", where)

    def check_weights(self) -> None:
        """See that what is about to be kept is worth it. Every worker calls this, after all steps were reported.

        Raises:
            TrainingError: a weight is NaN or infinite.
        """
        what = self._not_finite()
        if self.bad_steps.drifts and self.parts.world.any(bool(what)):  # what is kept is the mean
            what = what or "nan in the model of another worker"
        if what:
            raise self._bad_update(what)

    def _not_finite(self) -> str:
        """What is wrong with the weights; where each worker holds a part of them, on all alike that something is."""
        strategy = self.parts.strategy
        what = first_not_finite(self.parts.trained, strategy.holding)
        if not strategy.traits.holds_full_model and self.parts.world.any(bool(what)):
            what = what or "nan or infinity in what another worker holds of the model"
        return what

    def _bad_update(self, what: str) -> TrainingError:
        if self.last is None:
            return self._end(f"there is {what} before the first step", "the weights that the run began with")
        found = f"the update of step {self.last.step} left {what}, though its loss was finite"
        return self._end(found, _where(self.last))

    def _end(self, what: str, where: str) -> TrainingError:
        return TrainingError(
            what,
            where=where,
            fix=f"{self.snapshot_schedule.last_good()} Look at those samples, lower the learning rate, "
            'set clip_gradients, or leave such steps out with on_bad_step="skip" or "rewind"',
        )


def _where(facts: StepFacts) -> str:
    return f"epoch {facts.epoch + 1}, {named(facts.indices, facts.shards)}"


def step_done(numbers: StepMetricValues) -> StepDone:
    """The news of one step."""
    facts, host = numbers.facts, numbers.facts.timing
    return StepDone(
        step=facts.step,
        epoch=facts.epoch,
        loss=numbers.values["loss"],
        lr=facts.lr,
        samples=facts.samples,
        gradient_norm=numbers.gradient_norm,
        timing=StepTiming(
            total=host.total,
            compute=host.work - numbers.exposed,
            communication_exposed=numbers.exposed,
            data_wait=host.data_wait,
            snapshot_stall=host.snapshot_stall,
            other=host.total - host.work - host.data_wait - host.snapshot_stall,
        ),
        bytes_sent=facts.bytes_sent,
        exchange_seconds=facts.exchange_s,
        weight=facts.weight,
        time=facts.time,
        values={name: value for name, value in numbers.values.items() if name != "loss"},
    )


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
        """Do what is due after the last step, or the first `most` of it: each once, also after a failure."""
        at, most = self.at, len(self.all) if most is None else most
        while at.done_actions < most:
            self.all[at.done_actions]()
            at.done_actions += 1

    def now(self) -> Progress:
        """How far the run has come, in numbers that are equal on all workers."""
        state = self.state
        return Progress(state.step, self.parts.source.epochs(state.position), state.seconds)

    def is_at_end(self) -> bool:
        """Whether the run is as long as it was asked to be, and no one has asked it to stop before."""
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
        """Call that method of each, as of the last step; `more`: what else they know of the moment."""
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

        Where a worker is asked to stop meanwhile, all stop, and it is left until the run is resumed.
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
        """Train from where the state is, after what is still due there.

        Returns why it ended; empty where somebody waits to join, and all have finished the same step.

        Raises:
            BadStep: a step went wrong, and all are to go back to before it.
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
            steps.close()  # and not when no one holds it any more: then each loader process would be waited for for 5 s
        return reason

    # Where it is, for those who take it elsewhere.

    def stand(self) -> None:
        """The state is that of a snapshot now: forget what was under way."""
        after_step, at = self.after_step, self.at
        after_step.numbers.pending.clear()
        at.stand(done_actions=after_step.before_validation() if self.state.validation_due else len(after_step.all))
        at.save_again, at.before = self.state.validation_due, after_step.now()
        if self.parts.auditor is not None:
            self.parts.auditor.forget()

    def invalidate_state(self) -> None:
        """What this worker holds is of no use to others, until it is at a snapshot or takes another's place."""
        self.at.inconsistent = True

    def doubt(self, trusted: int | None) -> None:
        """The steps after `trusted` are in doubt; None: no step is."""
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
        """Where this worker is besides its `RunState`, in plain values, for one that is late."""
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
        """Stand where the worker is that gave `place`, whose state this worker holds now."""
        at, snapshot_schedule = self.at, self.after_step.snapshot_schedule
        at.done_actions, at.ends_epoch, at.inconsistent = given["duties_done"], given["ends_epoch"], False
        at.before = Progress(*given["before"])
        self.stop_signals.granted, self.stop_signals.number = given["granted"], given["number"]
        snapshot_schedule.saved_at, snapshot_schedule.best_saved_at = given["saved_at"], given["best_saved_at"]
