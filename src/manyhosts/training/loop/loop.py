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
from manyhosts.evaluation.evaluate import CutOff
from manyhosts.events import EpochDone, StepDone, ValidationDone
from manyhosts.model.held_values import CallbackWatch, DatasetWatch
from manyhosts.training.consistency.same_weights import compare_weights
from manyhosts.training.loop.learning_rate import VanishedRate
from manyhosts.training.loop.numbers import BadStep, StepFacts, StepMetricValues, first_not_finite, named
from manyhosts.training.loop.step import Stepper
from manyhosts.training.loop.training import Progress, Training, due, reached, total_steps
from manyhosts.training.telemetry.pace import StragglerMonitor
from manyhosts.units import Duration


class StepReporter:
    """Reports the steps of one loop, its epochs, and what its workers have found out on the way."""

    def __init__(self, training: Training) -> None:
        self.training = training
        steps = total_steps(training.limit, training.components.batches.source.steps_per_epoch)
        self.rate = VanishedRate(steps) if training.schedule.follows_steps else None
        self.last: StepFacts | None = None
        """The last step that was reported and whose numbers were well."""
        self.left_out: set[int] = set()
        """Steps that were reported, and whose updates were left out."""
        self.first = 0
        """The first step that was reported: others were before it where a run was resumed, or a worker came later."""

    def read(self, *, all_of_them: bool = False) -> None:
        """Report the steps whose numbers have come, and take from them what the workers decide together.

        Then report what the exchanges between workers have left to be said.

        Raises:
            BadStep, TrainingError: see `of_step`.
        """
        for numbers in self.training.numbers.read(all_of_them=all_of_them):
            self.of_step(numbers)
        world, step = self.training.components.world, self.training.state.step
        while world.notes:
            self.training.run_log.say(world.notes.pop(0), step)
        while world.news:
            self.training.run_log.emit(world.news.pop(0)(step=step, time=time.time()))

    def of_step(self, numbers: StepMetricValues) -> None:
        """Report a step, add it to its epoch's sums, and hear what the workers decide together.

        Raises:
            BadStep: its numbers are none, and all are to go back to before it.
            TrainingError: its numbers are none, and that ends the run.
        """
        state, facts = self.training.state, numbers.facts
        self.first = self.first or facts.step
        good = self.check(numbers)
        self.training.hear(numbers.control_flags)
        if good:
            weight = facts.samples if facts.weight is None else facts.weight
            state.epoch_loss += numbers.values["loss"] * weight
            state.epoch_weight += weight
            state.epoch_samples += facts.samples
        state.epoch_seconds += facts.timing.total
        done = StepDone(
            step=facts.step,
            epoch=facts.epoch,
            loss=numbers.values["loss"],
            lr=facts.lr,
            samples=facts.samples,
            gradient_norm=numbers.gradient_norm,
            timing=facts.timing,
            bytes_sent=facts.bytes_sent,
            exchange_seconds=facts.exchange_s,
            weight=facts.weight,
            time=facts.time,
            values={name: value for name, value in numbers.values.items() if name != "loss"},
        )
        self.training.run_log.emit(done)
        if self.training.profiling is not None:
            self.training.profiling.hear(done)
        if self.rate is not None and (text := self.rate.note(facts.lr, facts.step)):
            self.training.run_log.say(text, facts.step)

    def of_epoch(self) -> None:
        """Report the sums of the epoch that has ended, and begin new ones."""
        state = self.training.state
        self.training.run_log.emit(
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
        facts, bad_steps = numbers.facts, self.training.bad_steps
        trouble = bad_steps.trouble(numbers)
        if not trouble:
            self.last = facts
            return True
        where = _where(facts)
        if facts.weight == 0:
            trouble = "none of its samples counts in the loss"
        elif facts.step in self.training.state.left_out:
            trouble = "it went wrong before"
        elif bad_steps.rewinds:
            raise BadStep(facts.step, trouble, where)
        if facts.weight == 0 or bad_steps.leave_out or bad_steps.rewinds:
            self.training.run_log.say(f"step {facts.step} was left out: {trouble} ({where})", facts.step)
            self.left_out.add(facts.step)
            return False
        if bad_steps.keeps_weights and (what := self._not_finite()):
            raise self._bad_update(what)
        raise self._end(f"{trouble} in step {facts.step}", where)

    def check_weights(self) -> None:
        """See that what is about to be kept is worth it. Every worker calls this, after all steps were reported.

        Raises:
            TrainingError: a weight is NaN or infinite.
        """
        what = self._not_finite()
        world = self.training.components.world
        if self.training.bad_steps.drifts and world.any(bool(what)):  # what is kept is the mean
            what = what or "nan in the model of another worker"
        if what:
            raise self._bad_update(what)

    def check_trained(self) -> None:
        """At the end: say how many steps were left out. Every worker calls this, after all steps were reported.

        Raises:
            TrainingError: all of them were, also those before a resume, so nothing was trained.
        """
        count, step = len(self.left_out), self.training.state.step
        if count and count == step:
            raise self._end(
                f"each of the {count} steps was left out, so no weight has changed",
                f"steps {min(self.left_out)} to {max(self.left_out)}",
            )
        if count:
            how_many = f"{count} steps were" if count > 1 else "1 step was"
            of_which = f"steps {self.first} to {step}" if self.first > 1 else f"the {step} until here"
            self.training.run_log.say(f"{how_many} left out of {of_which}", step)

    def _not_finite(self) -> str:
        """What is wrong with the weights; where each worker holds a part of them, on all alike that something is."""
        components, strategy = self.training.components, self.training.components.strategy
        what = first_not_finite(components.trained, strategy.holding)
        if strategy.mesh.any_part(bool(what)):
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
            fix=f"{self.training.snapshot_schedule.last_good()} Look at those samples, lower the learning rate, "
            'set clip_gradients, or leave such steps out with on_bad_step="skip" or "rewind"',
        )


def _where(facts: StepFacts) -> str:
    return f"epoch {facts.epoch + 1}, {named(facts.indices, facts.shards)}"


class AfterStep:
    """Those of one loop, in order. Where a failure comes between two, the rest is done when training continues."""

    def __init__(self, training: Training, step_reporter: StepReporter, pace: StragglerMonitor | None) -> None:
        self.training, self.components, self.state = training, training.components, training.state
        settings = training.settings
        self.snapshot_schedule, self.step_reporter, self.pace = training.snapshot_schedule, step_reporter, pace
        self.said_nan = False
        self.validate_every = Duration.parse(settings.validate_every, where="validate_every")
        self.snapshot_every = Duration.parse(settings.snapshots.every, where="snapshots.every")
        self.dataset_watch = DatasetWatch(
            self.components.batches.identity.dataset,
            self.components.world,
            elsewhere=settings.loader_workers not in (0, "auto"),
        )
        self.callback_watch = CallbackWatch(self.components.callbacks, self.components.trained)
        exchanges = training.bad_steps.drifts
        self.all: tuple[Callable[[], None], ...] = (
            *((self._exchange,) if exchanges else ()),
            self._end_epoch,
            self._act_after_epoch,
            self._compare_pace,
            self._validate_if_due,
            self.keep_best,
            self._save_if_due,
        )
        self.before_validation = self.all.index(self._validate_if_due)
        """How much is done when only a validation, and what is kept on disk, is left to do."""
        training.all_actions = training.done_actions = len(self.all)
        training.first_duty = 0 if exchanges else self.all.index(self._compare_pace)
        training.before = training.now()

    def do(self, most: int | None = None) -> None:
        """Do what is due after the last step, or the first `most` of it: each once, also after a failure."""
        training, most = self.training, len(self.all) if most is None else most
        while training.done_actions < most:
            self.all[training.done_actions]()
            training.done_actions += 1

    def _is_at_end(self) -> bool:
        """Whether the run is as long as it was asked to be, and no one has asked it to stop before."""
        return not self.training.stop_signals.number and bool(reached(self.training.limit, self.training.now()))

    # Those of the training itself.

    def _exchange(self) -> None:
        """Where workers step alone: exchange what is due after the last step, and report the step with its cost."""
        world = self.components.world
        begin, exposed, sent, exchanged = time.perf_counter(), world.exposed_s, world.bytes_sent, world.exchange_s
        self.components.strategy.exchange(self.components.trained)
        self.training.numbers.lengthen(
            time.perf_counter() - begin,
            exposed_s=world.exposed_s - exposed,
            exchange_s=world.exchange_s - exchanged,
            bytes_sent=world.bytes_sent - sent,
            waits=world.take_waits(),
        )
        self.step_reporter.read()

    def _end_epoch(self) -> None:
        """Report the epoch's sums and begin new ones, where the last step ended one; the schedule may follow epochs."""
        if self.training.ends_epoch:
            self.step_reporter.read(all_of_them=True)
            self.step_reporter.of_epoch()
            self.training.schedule.after_epoch()

    def _act_after_epoch(self) -> None:
        if self.training.ends_epoch:
            self.call_callbacks("after_epoch")

    def call_callbacks(self, point: str, **more: Any) -> None:
        """Call that method of each, as of the last step; `more`: what else they know of the moment."""
        components, step = self.components, self.state.step
        if components.callbacks:
            self.snapshot_schedule.before_update()
            randomness.seed_compute(self.training.settings.seed, randomness.CALLBACK, step)
            components.callbacks.call(point, components.moment(step, self.training.now().epochs, **more))

    def _compare_pace(self) -> None:
        """Every few seconds: see whether a host or a link holds the others up."""
        if self.pace is not None and self.pace.is_due(self.training.before.seconds, self.state.seconds):
            self.pace.compare(self.training.taken)

    # Validation.

    def _validate_if_due(self) -> None:
        if self.training.validation is None:
            self.state.validation_due = False
        elif self._validation_is_due():
            self.validate()

    def _validation_is_due(self) -> bool:
        """Whether a validation is due after the last step. After the last of a run it is, before that is saved."""
        is_due = self.state.validation_due or due(self.validate_every, self.training.before, self.training.now())
        return is_due or self._is_at_end()

    def validate(self) -> None:
        """Evaluate, and let early stopping and a plateau schedule judge.

        Where a worker is asked to stop meanwhile, all stop, and it is left until the run is resumed.
        """
        training, state, components, schedule = self.training, self.state, self.components, self.snapshot_schedule
        assert training.validation is not None, "validate() is called where there is a validation set"
        self.step_reporter.read(all_of_them=True)
        begin, training.since = time.perf_counter(), time.monotonic()
        if schedule.saved_at == state.step:
            schedule.saved_at = -1  # that snapshot knows nothing of this validation
        try:
            with components.strategy.averaged(components.trained), components.callbacks.evaluated(components.trained):
                compare_weights(components, f"before the validation of step {state.step}")
                state.validation = values = training.validation(
                    components.model, asked=lambda: training.stop_signals.control_flags
                )
        except CutOff as cut:
            state.validation_due = True
            training.stop_signals.hear(cut.asked)
            return
        self.dataset_watch.look()
        state.validated_at, state.validation_due = state.step, False
        schedule.check_watched(values)
        best = self._note_values(values)
        self._say_nan(values[schedule.best_rule.metric])
        self.call_callbacks("after_validation", values=dict(values))
        training.schedule.after_validation(values[schedule.rule.metric])
        position = state.position  # where the next step begins
        training.run_log.emit(
            ValidationDone(
                step=state.step,
                epoch=position.epoch if position.sample else max(position.epoch - 1, 0),
                values=values,
                best=best,
                seconds=time.perf_counter() - begin,
                time=time.time(),
            )
        )

    def _note_values(self, values: Mapping[str, float]) -> bool:
        """Whether a validation is the best so far, by the metric that says so; early stopping may end the run."""
        state, rule, chosen = self.state, self.snapshot_schedule.rule, self.snapshot_schedule.best_rule
        best = chosen.better(values[chosen.metric], state.best)
        if best:
            state.best, state.best_step = values[chosen.metric], state.step
        if rule.better(values[rule.metric], state.stopping_best):
            state.stopping_best, state.validations_without_gain = values[rule.metric], 0
        else:
            state.validations_without_gain += 1
        if self.training.settings.early_stopping is not None and state.validations_without_gain >= rule.patience:
            nan = " (it is nan)" * math.isnan(values[rule.metric])
            by = f" by more than {rule.min_delta:g}" * (rule.min_delta > 0)
            times = f"{rule.patience} validations" if rule.patience > 1 else "a validation"
            state.ended = f"{rule.metric} has not become better{by} for {times}{nan}"
        return best

    def _say_nan(self, value: float) -> None:
        """Say once that a validation by which the best model is chosen is NaN."""
        if math.isnan(value) and not self.said_nan:
            self.said_nan, step, metric = True, self.state.step, self.snapshot_schedule.best_rule.metric
            self.training.run_log.say(
                f"the validation of step {step} gives {metric} nan, which is never the best: see its samples for nan",
                step,
            )

    # What is kept on disk.

    def keep_best(self) -> None:
        """Write the model as the best one, where the last validation found it to be."""
        state = self.state
        if state.validated_at == state.step == state.best_step != self.snapshot_schedule.best_saved_at:
            self.step_reporter.check_weights()
            self.snapshot_schedule.save_best(state)

    def _save_if_due(self) -> None:
        training = self.training
        is_due = training.save_again or due(self.snapshot_every, training.before, training.now())
        if is_due and self.snapshot_schedule.saved_at != self.state.step:
            self.save()
        training.save_again = False

    def save(self) -> None:
        """Make a snapshot of everything, unless a disk does not take the records of the steps that it would count."""
        self.step_reporter.read(all_of_them=True)
        self.step_reporter.check_weights()
        run_log = self.training.run_log
        for text in self.callback_watch.look():
            run_log.say(text, self.state.step)
        if self.components.world.any(not run_log.flush()):
            self.snapshot_schedule.leave_out(self.state)
        else:
            self.snapshot_schedule.save(self.state)

    # Where training breaks off.

    def leave_validation(self) -> None:
        """Do what is due after the last step and needs no other worker, and note whether a validation is left to do."""
        training, state = self.training, self.state
        self.do(self.before_validation)
        is_open = (training.done_actions == self.before_validation and self._validation_is_due()) or self._is_at_end()
        state.validation_due = training.validation is not None and state.validated_at != state.step and is_open


class Loop:
    """Trains until a rule gives a reason to stop."""

    def __init__(self, training: Training, pace: StragglerMonitor | None = None) -> None:
        """`pace`: see `AfterStep`."""
        self.training, components = training, training.components
        if components.own_step is None and not components.model.training:
            components.trained.train()  # as the script has left it after the fit before; see also `make_model`
        self.step_reporter = StepReporter(training)
        self.after_step = AfterStep(training, self.step_reporter, pace)
        self.stepper = Stepper(training)

    def train(self) -> str:
        """Train from where the state is, after what is still due there.

        Returns why it ended; empty where somebody waits to join, and all have finished the same step.

        Raises:
            BadStep: a step went wrong, and all are to go back to before it.
        """
        training, components, state = self.training, self.training.components, self.training.state
        if components.watcher is not None:
            components.watcher.begins(components, training.settings, state)
        self.stepper.counting.settled = False
        self.after_step.call_callbacks("begin")
        self.after_step.callback_watch.begin()
        self.after_step.do()
        steps: Steps | None = None
        reason = ""
        while not training.change_granted:
            now = training.now()
            if reason := training.stop_signals.granted or state.ended or reached(training.limit, now):
                break
            if steps is None:
                steps = components.batches.source.steps(state.position, state.stream)
            training.before = now
            self.stepper.train_step(steps)
            if not training.bad_steps.drifts:  # else it is reported with what its workers exchange after it
                self.step_reporter.read()
            self.after_step.do()
        if steps is not None:
            steps.close()  # and not when no one holds it any more: then each loader process would be waited for for 5 s
        if reason:
            self.step_reporter.read(all_of_them=True)
            self.step_reporter.check_trained()
        return reason

    # Where it is, for those who take it elsewhere.

    def be_at_snapshot(self) -> None:
        """The state is that of a snapshot now: forget what was under way."""
        training, after_step = self.training, self.after_step
        training.numbers.pending.clear()
        is_due = training.state.validation_due
        training.done_actions = after_step.before_validation if is_due else len(after_step.all)
        training.ends_epoch, training.under_way, training.inconsistent = False, 0, False
        training.save_again, training.before = is_due, training.now()
        if training.components.auditor is not None:
            training.components.auditor.forget()

    def enter_group(self) -> None:
        """This worker is among others now: have the state of the last step that was finished."""
        self.step_reporter.read(all_of_them=True)
        self.training.change_granted = False  # what it granted has happened

    def resume(self, *, save_again: bool) -> None:
        """All workers are as far as the farthest. `save_again`: a snapshot is lost that was being written."""
        training = self.training
        training.under_way, training.tried, training.inconsistent = 0, 0, False
        if save_again:
            training.save_again = True
            training.done_actions = min(training.done_actions, training.all_actions - 1)
        self.stepper.first_steps.stream_is_new = False  # a new worker would not compare it
        if training.components.world.is_rank_0:
            training.start_clock()

    def place(self) -> dict[str, Any]:
        """Where this worker is besides its `RunState`, in plain values, for one that is late."""
        training, before = self.training, self.training.before
        return {
            "duties_done": training.done_actions,
            "ends_epoch": training.ends_epoch,
            "before": [before.step, before.epochs, before.seconds],
            "number": training.stop_signals.number,
            "saved_at": training.snapshot_schedule.saved_at,
            "best_saved_at": training.snapshot_schedule.best_saved_at,
        }

    def take_place(self, given: dict[str, Any]) -> None:
        """Be where the worker is that gave `place`, whose state this worker has now."""
        training, schedule = self.training, self.training.snapshot_schedule
        training.done_actions, training.ends_epoch = given["duties_done"], given["ends_epoch"]
        training.inconsistent, training.before = False, Progress(*given["before"])
        training.stop_signals.number = given["number"]
        schedule.saved_at, schedule.best_saved_at = given["saved_at"], given["best_saved_at"]
