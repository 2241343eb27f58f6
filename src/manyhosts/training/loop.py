"""The training loop: what happens in a step, and what is due after it."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhosts.communication.shared_norm import acting
from manyhosts.config.settings import Settings
from manyhosts.data import randomness
from manyhosts.data.steps import DuePiece, LoadedPiece, Step, mapped
from manyhosts.errors import ConfigError
from manyhosts.events import ValidationDone
from manyhosts.strategies.audit import Auditable
from manyhosts.strategies.local_updates import LocalUpdates, averaged_parameters
from manyhosts.strategies.strategy import Piece, StepOutcome, Survivable
from manyhosts.training import watching
from manyhosts.training.bad_steps import BadSteps
from manyhosts.training.buffers import BufferCopies
from manyhosts.training.build import Parts
from manyhosts.training.counting import Counting
from manyhosts.training.evaluate import CutOff, Evaluation
from manyhosts.training.first_steps import FirstSteps, compare_streams
from manyhosts.training.learning_rate import VanishedRate
from manyhosts.training.numbers import HostTiming, Numbers, StepFacts
from manyhosts.training.pace import Pace
from manyhosts.training.progress import Progress, due, reached, total_steps
from manyhosts.training.same_weights import compare_weights
from manyhosts.training.snapshot_schedule import SnapshotSchedule
from manyhosts.training.state import RunState
from manyhosts.training.step_reporter import StepReporter, Tell
from manyhosts.training.stop_signals import StopSignals
from manyhosts.units import Duration


class WorkersChange(Exception):
    """Between two steps: somebody waits to join."""


class Loop:
    """Trains `parts` until a rule gives a reason to stop."""

    def __init__(  # noqa: PLR0913  # made in one place, by name
        self,
        parts: Parts,
        *,
        settings: Settings,
        state: RunState,
        validation: Evaluation | None,
        snapshot_schedule: SnapshotSchedule,
        stop_signals: StopSignals,
        tell: Tell,
        flush: Callable[[], bool],
        note_samples: Callable[[int, Sequence[int]], None] | None,
        keep_buffers: bool = False,
        pace: Pace | None = None,
    ) -> None:
        """`keep_buffers`: remember before each step what its forward pass changes, so that it can be done again."""
        self.parts, self.settings, self.state = parts, settings, state
        self.validation, self.snapshot_schedule, self.stop_signals, self.tell, self.flush = (
            validation,
            snapshot_schedule,
            stop_signals,
            tell,
            flush,
        )
        self.note_samples, self.pace = note_samples, pace
        self.limit = Duration.parse(settings.duration, where="fit(…)")
        self.validate_every = Duration.parse(settings.validate_every, where="validate_every")
        self.snapshot_every = Duration.parse(settings.snapshots.every, where="snapshots.every")
        self.numbers = Numbers(parts.world.device)
        self.bad_steps = BadSteps(parts, settings.on_bad_step, clips=settings.clip_gradients is not None)
        self.follows_steps = parts.schedule is not None and settings.schedule_every == "step"
        """Whether the schedule moves on after every step."""
        self.schedule_began = False
        """Whether this loop has moved it on."""
        rate = VanishedRate(total_steps(self.limit, parts.source.steps_per_epoch)) if self.follows_steps else None
        self.step_reporter = StepReporter(parts, state, self.bad_steps, stop_signals, snapshot_schedule, tell, rate)
        self.first_steps = FirstSteps(parts)
        self.before = self.progress()
        self.began = time.perf_counter() - state.seconds
        self.on_cpu = parts.world.device.type == "cpu"
        self.exchanges = isinstance(parts.strategy, LocalUpdates)
        """Whether workers step alone, and exchange something after a step."""
        exchange = (self.exchange,) if self.exchanges else ()
        self.duties = (
            *exchange,
            self.end_epoch,
            self.schedule_epoch,
            self.compare_pace,
            self.validate_if_due,
            self.keep_best,
            self.save_if_due,
        )
        """What may be due after a step, in order."""
        self.first_duty = 0 if self.exchanges else self.duties.index(self.schedule_epoch) + 1
        """The first that may be due after a step that ends no epoch."""
        self.duties_done = len(self.duties)
        self.ends_epoch = False
        """Whether the last step was the last of its epoch."""
        self.under_way = 0
        """The step that is being computed; 0 between steps."""
        self.tried = 0
        """The last step that broke off since workers went; 0 where none did."""
        self.taken: Step | None = None
        """What the step under way, or the last one, has read."""
        self.brought_s = 0.0
        """Seconds that this worker has waited for batches in the midst of steps."""
        self.inconsistent = False
        """Whether an update broke off, so that the parameters are those of no step."""
        self.trusted: int | None = None
        """After workers were found to compute wrongly: the last step that all agree on, until the run is back there."""
        self.change_granted = False
        """Whether all workers have heard that somebody waits to join them."""
        self.save_again = False
        """Whether a snapshot is lost that was being written when workers went."""
        self.since = time.time()
        """When what is being done now was begun."""
        self.counting = Counting(parts, settings, state)
        self.buffers = BufferCopies(parts.trained) if keep_buffers else None
        self.watcher = watching.watcher

    def run(self) -> str:
        """Train from where the state stands, after what is still due there. Returns why it ended.

        Raises:
            WorkersChange: somebody waits to join, and all have finished the same step.
            BadStep: a step went wrong, and all are to go back behind it.
        """
        self.parts.trained.train()
        if self.watcher is not None:
            self.watcher.begins(self.parts, self.settings, self.state)
        self.counting.settled = False
        steps: Iterator[Step] | None = None
        while True:
            self.finish_step()
            if self.change_granted:
                raise WorkersChange
            now = self.progress()
            if reason := self.reason_to_stop(now):
                break
            if steps is None:
                steps = self.parts.source.steps(self.state.position, self.state.stream)
            self.before = now
            self.take(steps)
        self.read_numbers(all_of_them=True)
        return reason

    def finish_step(self) -> None:
        """Do what is due after the last step, each thing once, also where a failure came between."""
        while self.duties_done < len(self.duties):
            self.duties[self.duties_done]()
            self.duties_done += 1

    def leave_validation(self) -> None:
        """Do what is due after the last step and needs no other worker, and note whether a validation is left to do."""
        place, state = self.duties.index(self.validate_if_due), self.state
        while self.duties_done < place:
            self.duties[self.duties_done]()
            self.duties_done += 1
        is_open = (self.duties_done == place and self.validation_is_due()) or self.is_at_end()
        state.validation_due = self.validation is not None and state.validated_at != state.step and is_open

    def is_at_end(self) -> bool:
        """Whether the run is as long as it was asked to be, and nobody has asked it to stop before."""
        return not self.stop_signals.granted and bool(reached(self.limit, self.progress()))

    def settle(self, *, finished: bool) -> None:
        """End the step under way, which broke off. `finished`: another has done it, so this worker's part counts."""
        strategy = self.parts.strategy
        if self.under_way and not self.inconsistent and isinstance(strategy, Survivable):
            if not finished or not strategy.whole:
                if self.buffers:
                    self.buffers.put_back()
                strategy.step_back()
            elif self.exchanges and self.taken is not None:
                self.clip()
                self.update()
                self.step_is_done(self.taken)
        self.tried, self.under_way = max(self.tried, self.under_way), 0

    def stand(self) -> None:
        """The state is that of a snapshot now: forget what was under way."""
        self.numbers.pending.clear()
        self.duties_done, self.ends_epoch = len(self.duties), False
        self.under_way, self.inconsistent, self.save_again = 0, False, False
        if self.state.validation_due:
            self.duties_done, self.save_again = self.duties.index(self.validate_if_due), True
        self.before = self.progress()
        if self.parts.auditor is not None:
            self.parts.auditor.forget()

    def progress(self) -> Progress:
        """How far the run has come, in numbers that are equal on all workers."""
        state = self.state
        return Progress(state.step, self.parts.source.epochs(state.position), state.seconds)

    def reason_to_stop(self, now: Progress) -> str:
        """Why to stop `now`; empty where there is no reason."""
        return self.stop_signals.granted or self.state.ended or reached(self.limit, now)

    def take(self, steps: Iterator[Step]) -> Step:
        """One optimizer step, from waiting for its samples to telling its numbers."""
        world, state = self.parts.world, self.state
        begin, sent, stalled = time.perf_counter(), world.bytes_sent, self.snapshot_schedule.stalled_s
        self.since, exchanged, brought = time.time(), world.exchange_s, self.brought_s
        step = next(steps)
        if self.watcher is not None:
            step = self.watcher.reads(step)
        weighed, weight = self.counting.of(step)  # before the step is under way: workers may be lost here, too
        fetched, exposed = time.perf_counter(), world.exposed_s
        if self.first_steps.stream_is_new:
            self.first_steps.stream_is_new = False
            compare_streams(world, step)
        world.take_waits()  # what workers tell each other to find the samples is a part of waiting for those
        self.under_way, self.taken = state.step + 1, step
        left_out = state.step + 1 in state.left_out
        if self.note_samples is not None and not left_out:
            self.note_samples(state.step + 1, _indices(step))
        if self.buffers:
            self.buffers.keep()
        lr = self.parts.optimizer.param_groups[0]["lr"] * self.parts.warmup.factor(state.step)
        outcome, norm = self.pass_over() if left_out or weight == 0 else self.train_step(weighed)
        end = time.perf_counter()
        self.step_is_done(step)
        if self.watcher is not None:
            self.watcher.steps(state.step)
        stall = self.snapshot_schedule.stalled_s - stalled
        in_between = self.brought_s - brought
        waited, worked = fetched - begin + in_between, end - fetched - stall - in_between
        timing = HostTiming(end - begin, waited, world.exposed_s - exposed, stall, worked)
        facts = StepFacts(
            step=state.step,
            epoch=step.epoch,
            lr=lr,
            samples=step.samples,
            bytes_sent=world.bytes_sent - sent,
            exchange_s=world.exchange_s - exchanged,
            timing=timing,
            time=time.time(),
            indices=step.taken,
            shards=step.shards,
            weight=weight,
        )
        self.numbers.add(facts, outcome, norm, world.take_waits())
        if not self.exchanges:
            self.read_numbers()
        return step

    def step_is_done(self, step: Step) -> None:
        """The model has changed: from now on the step counts, and what is due after it is due."""
        state = self.state
        state.step += 1
        state.position, state.stream = step.after, step.stream
        self.under_way, self.ends_epoch = 0, step.ends_epoch
        self.duties_done = 0 if step.ends_epoch else self.first_duty

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
        self.read_numbers()

    def train_step(self, step: Step) -> tuple[StepOutcome, Any]:
        """The arithmetic of one optimizer step. Returns what it found, and the gradient's norm where it is known."""
        parts = self.parts
        self.bad_steps.begin()
        if parts.auditor is not None:
            audits = [Auditable(each.audit, self.pieces(each.pieces)) for each in step.audits]
            parts.auditor.begin(self.state.step + 1, audits)
        with acting(parts.batch_norm):
            outcome = parts.strategy.forward_backward(
                parts.trained, self.pieces(step.pieces), parts.compute, parts.precision.scale, self.control_flags()
            )
        if self.watcher is not None:
            self.watcher.differentiates(outcome)
        norm = self.bad_steps.watched(self.clip())
        if self.bad_steps.must_go(self.state.step + 1, outcome.values["loss"], norm):
            self.schedule_step()
            return outcome, norm
        norm = self.bad_steps.shown(self.state.step + 1, norm)
        if self.first_steps.looking:
            self.first_steps.before_update()
            rate = max(float(group["lr"]) for group in parts.optimizer.param_groups)
            self.update()
            self.first_steps.after_update(rate * parts.warmup.factor(self.state.step))
        else:
            self.update()
        return outcome, norm

    def clip(self) -> Any:
        """Clip the gradient where that is asked for. Returns its norm before."""
        parts = self.parts
        if self.settings.clip_gradients is None:
            return None
        parts.precision.unscale(parts.optimizer)
        return parts.strategy.clip_gradients(parts.trained, self.settings.clip_gradients)

    def update(self) -> None:
        """Change the model by the gradient, and move the schedule."""
        parts = self.parts
        self.snapshot_schedule.before_update()
        if may_draw(parts.optimizer):
            # The noise of a Langevin sampler, say: the same on every worker, and after a resume.
            randomness.seed_compute(self.settings.seed, randomness.UPDATE, self.state.step)
        self.inconsistent = True
        warms_up = self.state.step < parts.warmup.steps
        with parts.warmup.over(parts.optimizer, self.state.step) if warms_up else nullcontext():
            parts.strategy.update(parts.trained, parts.precision.stepper(parts.optimizer))
        self.schedule_step()
        self.inconsistent = False

    def pass_over(self) -> tuple[StepOutcome, Any]:
        """A step that went wrong before: nothing is computed, and the schedule moves on."""
        world = self.parts.world
        control_flags = world.all_reduce(torch.tensor(self.control_flags(), dtype=torch.float64, device=world.device))
        self.schedule_step()
        return StepOutcome({"loss": torch.full((), math.nan, device=world.device)}, control_flags), None

    def pieces(self, due: Sequence[LoadedPiece | DuePiece]) -> list[Piece]:
        """Pieces of the step under way. Each batch comes when the forward pass wants it: so few are in memory."""
        return [
            Piece(
                bring=partial(self.bring, loaded),
                samples=len(loaded.plan.indices),
                weight=loaded.plan.weight,
                address=(self.state.step, loaded.plan.part, loaded.plan.micro),
            )
            for loaded in due
        ]

    def bring(self, piece: LoadedPiece | DuePiece) -> Any:
        """The batch of a piece, on this worker's device. To wait for it is to wait for data."""
        begin, device = time.perf_counter(), self.parts.world.device
        batch = piece.batch
        if not self.on_cpu:
            batch = mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))
        self.brought_s += time.perf_counter() - begin
        return batch

    def control_flags(self) -> tuple[float, ...]:
        """The leader's clock, whether this worker knows of one that wants to join, and what asked it to stop."""
        world = self.parts.world
        clock = time.perf_counter() - self.began if world.is_leader else 0.0
        joining = world.membership is not None and world.membership.change_asked
        return clock, float(joining), *self.stop_signals.control_flags

    def read_numbers(self, *, all_of_them: bool = False) -> None:
        """Tell the steps whose numbers have come, and take from them what the workers decide together."""
        for numbers in self.numbers.read(all_of_them=all_of_them):
            joining = self.step_reporter.of_step(numbers)
            self.change_granted = self.change_granted or joining
        self.step_reporter.of_world()

    def end_epoch(self) -> None:
        """Tell the epoch's sums and begin new ones, where the last step ended one."""
        if self.ends_epoch:
            self.read_numbers(all_of_them=True)
            self.step_reporter.of_epoch()

    def schedule_step(self) -> None:
        """Move the schedule on after an optimizer step, where it follows steps."""
        if self.follows_steps:
            self.advance()

    def schedule_epoch(self) -> None:
        """Move the schedule on where the last step ended an epoch and the schedule follows those."""
        if self.ends_epoch and self.settings.schedule_every == "epoch":
            self.advance()

    def advance(self) -> None:
        """Move the schedule on."""
        advance(self.parts.schedule, first=not self.schedule_began)
        self.schedule_began = True

    def compare_pace(self) -> None:
        """Every few seconds: see whether a host or a link holds the others up."""
        if self.pace is not None and self.pace.is_due(self.before.seconds, self.state.seconds):
            self.pace.compare(self.state.step, self.taken)

    def validate_if_due(self) -> None:
        """Validate where that is due after the last step."""
        if self.validation is None:
            self.state.validation_due = False
        elif self.validation_is_due():
            self.validate()

    def validation_is_due(self) -> bool:
        """Whether a validation is due after the last step. After the last of a run it is, before that is saved."""
        return self.state.validation_due or due(self.validate_every, self.before, self.progress()) or self.is_at_end()

    def keep_best(self) -> None:
        """Write the model as the best one, where the last validation found it to be."""
        state = self.state
        if state.validated_at == state.step == state.best_step != self.snapshot_schedule.best_saved_at:
            self.step_reporter.check_weights()
            self.snapshot_schedule.save_best(state)

    def save_if_due(self) -> None:
        """Make a snapshot where that is due after the last step."""
        is_due = self.save_again or due(self.snapshot_every, self.before, self.progress())
        if is_due and self.snapshot_schedule.saved_at != self.state.step:
            self.save()
        self.save_again = False

    def validate(self) -> None:
        """Evaluate, and let early stopping and a plateau schedule judge.

        Where a worker is asked to stop meanwhile, all stop, and it is left to whoever goes on with the run.
        """
        assert self.validation is not None, "validate() is called where there is a validation set"
        self.read_numbers(all_of_them=True)
        begin, self.since = time.perf_counter(), time.time()
        state, rule = self.state, self.snapshot_schedule.rule
        parts = self.parts
        if self.snapshot_schedule.saved_at == state.step:
            self.snapshot_schedule.saved_at = -1  # that snapshot knows nothing of this validation
        try:
            with averaged_parameters(parts.strategy, parts.trained):
                compare_weights(parts, f"before the validation of step {state.step}")
                state.validation = self.validation(parts.model, asked=lambda: self.stop_signals.control_flags)
        except CutOff as cut:
            state.validation_due = True
            self.stop_signals.hear(cut.asked)
            return
        state.validated_at, state.validation_due = state.step, False
        value = self.snapshot_schedule.watched(state.validation)
        best = rule.better(value, state.best)
        if best:
            state.best, state.best_step, state.validations_without_gain = value, state.step, 0
        else:
            state.validations_without_gain += 1
        if self.settings.early_stopping is not None and state.validations_without_gain >= rule.patience:
            state.ended = f"{rule.metric} has not become better for {rule.patience} validations"
        if isinstance(self.parts.schedule, ReduceLROnPlateau):
            self.parts.schedule.step(value)
        now = time.perf_counter()
        self.tell(
            ValidationDone(
                step=state.step,
                epoch=self.epoch(),
                values=state.validation,
                best=best,
                seconds=now - begin,
                time=time.time(),
            )
        )

    def epoch(self) -> int:
        """The epoch that the last step belongs to."""
        position = self.state.position
        return position.epoch if position.sample else max(position.epoch - 1, 0)

    def save(self) -> None:
        """Make a snapshot of everything, unless a disk does not take the records of the steps that it would count."""
        self.read_numbers(all_of_them=True)
        self.step_reporter.check_weights()
        if self.parts.world.any(not self.flush()):
            self.snapshot_schedule.leave_out(self.state)
        else:
            self.snapshot_schedule.save(self.state)


def may_draw(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of `optimizer` could draw random numbers. PyTorch's own draw none, so they go without a seed."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(hooks) or not type(optimizer).__module__.startswith("torch.optim.")


def advance(schedule: LRScheduler | None, *, first: bool) -> None:
    """One step of the schedule, the `first` of this loop or a later one. A plateau schedule moves after validations."""
    if schedule is None or isinstance(schedule, ReduceLROnPlateau):
        return
    try:
        with _unwarned() if first else nullcontext():
            schedule.step()
    except ValueError as cause:
        raise ConfigError(
            f"the schedule goes no further: {cause}",
            where="mh.Trainer(schedule=…)",
            fix="make it as long as the whole run is to be, counted from the first step",
        ) from cause


@contextmanager
def _unwarned() -> Iterator[None]:
    """Within, PyTorch does not warn of a schedule whose first step comes before any of the optimizer's.

    fp16 leaves out steps whose gradients overflow; the schedule goes on all the same, on every worker.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield


def _indices(step: Step) -> list[int]:
    """The samples that this worker computed in a step, ghosts left out."""
    return [index for piece in step.pieces if piece.plan.weight for index in piece.plan.indices.tolist()]
