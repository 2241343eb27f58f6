"""One optimizer step: its samples, forward and backward pass, clipping, update, and what is counted of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch

from manyhosts.communication.batch_norm import GlobalBatch
from manyhosts.communication.shared_norm import acting
from manyhosts.config.settings import Settings
from manyhosts.data import randomness
from manyhosts.data.steps import Step
from manyhosts.strategies.audit import Auditable, Auditor
from manyhosts.strategies.local_rate import multiplied
from manyhosts.strategies.local_updates import LocalUpdates
from manyhosts.strategies.strategy import Elastic, FixedParts, HandsOut, StepOutcome, TellsMisuse, UpdatesWithin
from manyhosts.training.consistency.first_steps import FirstSteps, compare_streams
from manyhosts.training.loop.bad_steps import BadSteps
from manyhosts.training.loop.clock import StepClock
from manyhosts.training.loop.control_flags import ControlFlags
from manyhosts.training.loop.deferred_metrics import DeferredMetrics, StepFacts
from manyhosts.training.loop.loop_state import LoopState
from manyhosts.training.loop.schedules import Schedule
from manyhosts.training.loop.transfers import Transfers
from manyhosts.training.loss_weights.counting import LossWeights
from manyhosts.training.own_loop.strategy import OwnLoop
from manyhosts.training.setup.build import Parts
from manyhosts.training.setup.model_checks import several_gradients
from manyhosts.training.state.buffers import BufferCopies
from manyhosts.training.state.run_state import RunState
from manyhosts.training.state.snapshot_schedule import SnapshotSchedule
from manyhosts.training.telemetry.norm_price import NormPrice

NoteSamples = Callable[[int, Sequence[int]], None]


class Stepper:
    """Takes optimizer steps. What surrounds them is the loop's: which come, and what is due after each."""

    def __init__(  # noqa: PLR0913  # made in one place, by name
        self,
        parts: Parts,
        settings: Settings,
        state: RunState,
        at: LoopState,
        *,
        flags: ControlFlags,
        snapshot_schedule: SnapshotSchedule,
        numbers: DeferredMetrics,
        bad_steps: BadSteps,
        schedule: Schedule,
        note_samples: NoteSamples | None,
        see_first: Callable[[Any], None] | None,
        keep_buffers: bool,
    ) -> None:
        """`see_first` is shown the first batch.

        `keep_buffers`: remember before each step what its forward pass changes, so that it can be done again.
        """
        self.parts, self.settings, self.state, self.at, self.flags = parts, settings, state, at, flags
        self.snapshot_schedule, self.numbers, self.bad_steps, self.schedule = (
            snapshot_schedule,
            numbers,
            bad_steps,
            schedule,
        )
        self.note_samples = note_samples if parts.strategy.mesh.leads_replica else None  # others read the same ones
        self.transfers = Transfers(parts.world.device, numbers, see_first)
        self.clock = StepClock(parts.world, snapshot_schedule.store, self.transfers)
        self.counting = LossWeights(parts, settings, state)
        self.first_steps = FirstSteps(parts)
        self.norm_price = NormPrice(parts.batch_norm)
        self.buffers = BufferCopies(parts.trained) if keep_buffers else None
        self.watcher = parts.watcher
        if isinstance(parts.strategy, OwnLoop):
            parts.strategy.remembers = keep_buffers or bad_steps.leave_out
            parts.strategy.done = lambda: state.step
        if isinstance(parts.strategy, UpdatesWithin):
            parts.strategy.before_update = snapshot_schedule.before_update
        # Asked once: to ask a protocol takes as long as a small layer.
        self.fixed_parts = parts.strategy if isinstance(parts.strategy, FixedParts) else None
        self.misuse_told = parts.strategy.misuse_told if isinstance(parts.strategy, TellsMisuse) else nullcontext
        self.hands_out = parts.strategy if isinstance(parts.strategy, HandsOut) else None

    def train_step(self, steps: Iterator[Step]) -> None:
        """One optimizer step, from waiting for its samples to queueing its numbers."""
        parts, state, number = self.parts, self.state, self.state.step + 1
        self.clock.begin()
        step, weighed, weight = self.next_of(steps)
        self.clock.fetched()
        self.prepare(number, step)
        lr = parts.optimizer.param_groups[0]["lr"] * parts.warmup.factor(state.step)
        norm, updated = cast(Any, None), False
        if number in state.left_out or weight == 0:
            outcome = self.pass_over()
        else:
            if self.bad_steps.buffers:
                self.bad_steps.buffers.keep()
            if parts.auditor is not None:
                self.audit(parts.auditor, number, weighed)
            pieces = self.transfers.pieces(state.step, weighed.pieces)
            with acting(parts.batch_norm), self.writes_seen(len(pieces)):
                outcome = parts.strategy.forward_backward(
                    parts.trained, pieces, parts.compute, parts.precision.scale, self.flags.own()
                )
            self.differentiated(number, weighed, outcome)
            norm = self.bad_steps.watched(self.clip())
            if self.bad_steps.must_go(number, outcome.values["loss"], norm):
                self.schedule.after_step()
            else:
                norm = self.bad_steps.shown(number, norm)
                self.update()
                updated = True
        self.call_callbacks(step, updated=updated)
        timing, bytes_sent, exchange_s = self.clock.end()
        if self.norm_price.batch is not None and (price := self.norm_price.after_step(timing.total)):
            parts.world.notes.append(price)
        self.count(step)
        facts = StepFacts(
            step=number,
            epoch=step.epoch,
            lr=lr,
            samples=step.samples,
            bytes_sent=bytes_sent,
            exchange_s=exchange_s,
            timing=timing,
            time=time.time(),
            indices=step.taken,
            shards=step.shards,
            weight=weight,
        )
        self.numbers.add(facts, outcome, norm, parts.world.take_waits())

    def next_of(self, steps: Iterator[Step]) -> tuple[Step, Step, float | None]:
        """The next step; the same with what each piece counts; and what its batch counts (None: its samples)."""
        self.at.since = time.monotonic()
        step = self.transfers.next_of(steps)
        if self.watcher is not None:
            step = self.watcher.reads(step)
        with self.misuse_told():
            weighed, weight = self.counting.of(step)  # before the step is under way: workers may be lost here, too
        return step, weighed, weight

    @contextmanager
    def writes_seen(self, pieces: int) -> Iterator[None]:
        """See what the passes of a first step change by themselves: it is put back where a later step breaks off."""
        if not self.first_steps.looking or isinstance(self.parts.strategy, UpdatesWithin):
            yield
            return
        self.first_steps.before_forward()
        yield
        self.first_steps.after_forward(pieces)
        for copies in (self.buffers, self.bad_steps.buffers):
            if copies is not None:
                copies.follow(self.first_steps.written)

    def prepare(self, number: int, step: Step) -> None:
        """What must be known before the first forward pass, should the step break off or have to be explained."""
        if self.first_steps.stream_is_new:
            self.first_steps.stream_is_new = False
            compare_streams(self.parts.world, step)
        self.parts.world.take_waits()  # what workers tell each other to find the samples is a part of waiting for those
        self.at.begin_step(number, step)
        if self.fixed_parts is not None:
            self.fixed_parts.share_out(step.held)
        if self.note_samples is not None and self.hands_out is None and number not in self.state.left_out:
            self.note_samples(number, _indices(step))
        if self.buffers:
            self.buffers.keep()
        if isinstance(self.parts.batch_norm, GlobalBatch):
            self.parts.batch_norm.begin_step(step.samples)

    def differentiated(self, number: int, step: Step, outcome: StepOutcome) -> None:
        """Show what was found; and note the samples of a step whose pieces went to whoever was free."""
        if self.watcher is not None:
            self.watcher.differentiates(outcome)
        if self.note_samples is not None and self.hands_out is not None:
            own = [step.pieces[each] for each in self.hands_out.computed]
            self.note_samples(number, _indices(replace(step, pieces=own)))

    def audit(self, auditor: Auditor, number: int, step: Step) -> None:
        """Ready the parts that this worker computes again for another."""
        done = self.state.step
        auditor.begin(number, [Auditable(each.audit, self.transfers.pieces(done, each.pieces)) for each in step.audits])

    def clip(self) -> Any:
        """Clip the gradient where that is asked for. Returns its norm before."""
        parts = self.parts
        if self.settings.clip_gradients is None:
            return None
        parts.precision.unscale(parts.optimizer)
        return parts.strategy.clip_gradients(parts.trained, self.settings.clip_gradients)

    def update(self) -> None:
        """Change the model by the gradient, and move the schedule."""
        parts, done, looking = self.parts, self.state.step, self.first_steps.looking
        if looking:
            self.first_steps.before_update()
            rate = max(float(group["lr"]) for group in parts.optimizer.param_groups)
        self.snapshot_schedule.before_update()
        if may_draw(parts.optimizer):
            # The noise of a Langevin sampler, say: the same on every worker, and after a resume.
            randomness.seed_compute(self.settings.seed, randomness.UPDATE, done)
        self.at.inconsistent = True
        warms_up = done < parts.warmup.steps
        with multiplied(parts.optimizer, parts.warmup.factor(done)) if warms_up else nullcontext():
            try:
                parts.strategy.update(parts.trained, parts.precision.stepper(parts.optimizer))
            except (AssertionError, TypeError, ValueError, RuntimeError) as error:
                if "closure" in str(error).lower():
                    raise several_gradients(parts.optimizer) from error
                raise
        self.schedule.after_step()
        self.at.inconsistent = False
        if looking:
            self.first_steps.after_update(rate * parts.warmup.factor(done))

    def pass_over(self) -> StepOutcome:
        """A step that went wrong before, or counts nothing: nothing is computed, and the schedule moves on."""
        world = self.parts.world
        control_flags = world.all_reduce(torch.tensor(self.flags.own(), dtype=torch.float64, device=world.device))
        self.schedule.after_step()
        return StepOutcome({"loss": torch.full((), math.nan, device=world.device)}, control_flags)

    def call_callbacks(self, step: Step, *, updated: bool) -> None:
        """Let callbacks act on what `step` has made, as a part of it. `updated`: whether it has changed the model."""
        parts, state = self.parts, self.state
        if not parts.callbacks:
            return
        self.snapshot_schedule.before_update()
        before = (state.step, parts.source.epochs(state.position))
        moment = parts.moment(state.step + 1, parts.source.epochs(step.after), before=before, updated=updated)
        randomness.seed_compute(self.settings.seed, randomness.CALLBACK, state.step)
        self.at.inconsistent = True
        parts.callbacks.call("after_step", moment)
        self.at.inconsistent = False

    def count(self, step: Step) -> None:
        """The model has changed: from now on the step counts."""
        state = self.state
        state.step += 1
        state.position, state.stream = step.after, step.stream
        self.at.end_step(ends_epoch=step.ends_epoch)
        if self.watcher is not None:
            self.watcher.steps(state.step)

    def settle(self, *, finished: bool) -> None:
        """End the step under way, which broke off. `finished`: another has done it, so this worker's part counts."""
        at, strategy = self.at, self.parts.strategy
        if at.under_way and not at.inconsistent and isinstance(strategy, Elastic):
            if not finished or not strategy.whole:
                if self.buffers:
                    self.buffers.put_back()
                strategy.step_back()
            elif isinstance(strategy, LocalUpdates) and at.taken is not None:
                self.clip()
                self.update()
                self.call_callbacks(at.taken, updated=True)
                self.count(at.taken)
        at.break_off()


def may_draw(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of `optimizer` could draw random numbers. PyTorch's own draw none, so they go without a seed."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(hooks) or not type(optimizer).__module__.startswith("torch.optim.")


def _indices(step: Step) -> list[int]:
    """The samples that this worker computed in a step, ghosts left out."""
    return [index for piece in step.pieces if piece.plan.weight for index in piece.plan.indices.tolist()]
