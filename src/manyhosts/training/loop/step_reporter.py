"""What is told of a step once its numbers are known, and what the workers decide by them together.

The same numbers come to every worker after the same step, so all of them add up the same sums, hear the same wishes,
and find the same steps bad.
"""

from __future__ import annotations

import math
import time

from manyhosts.errors import TrainingError
from manyhosts.events import EpochDone, Note, StepDone, StepTiming
from manyhosts.strategies.strategy import UpdatesWithin
from manyhosts.training.consistency.finite import first_not_finite
from manyhosts.training.loop.bad_steps import BadStep, named
from manyhosts.training.loop.deferred_metrics import StepFacts, StepMetricValues
from manyhosts.training.loop.learning_rate import VanishedRate
from manyhosts.training.loop.progress import total_steps
from manyhosts.training.loop.training import Training


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
        """The last step that was told and whose numbers were well."""

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
            BadStep: its numbers are none, and all are to go back behind it.
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
        """See that what is about to be kept is worth it. Every worker calls this, with all steps told.

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
        if not strategy.traits.holds_whole_model and self.parts.world.any(bool(what)):
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
