"""One optimizer step, from top to bottom: its samples, forward and backward pass, clipping, update, what is counted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch

from manyhosts.communication.batch_norm import GlobalBatch
from manyhosts.communication.shared_norm import acting
from manyhosts.communication.world import World
from manyhosts.data import randomness
from manyhosts.data.steps import DuePiece, LoadedPiece, Step, on_device
from manyhosts.snapshot.store import Store
from manyhosts.strategies.audit import Auditable
from manyhosts.strategies.local_rate import multiplied
from manyhosts.strategies.local_updates import LocalUpdates
from manyhosts.strategies.strategy import (
    Elastic,
    FixedParts,
    HandsOut,
    InCopies,
    Piece,
    PreparesUpdate,
    StepOutcome,
    TellsMisuse,
    UpdatesWithin,
)
from manyhosts.training.consistency.first_steps import FirstSteps, compare_streams
from manyhosts.training.loop.compute import may_draw
from manyhosts.training.loop.numbers import DeferredMetrics, HostTiming, StepFacts
from manyhosts.training.loop.training import Training
from manyhosts.training.loss_weights.counting import LossWeights
from manyhosts.training.setup.model_checks import several_gradients
from manyhosts.training.state.buffers import BufferCopies
from manyhosts.training.telemetry.pace import NormPrice

_NOTHING = nullcontext()
NoteSamples = Callable[[int, Sequence[int]], None]


class Stepper:
    """Takes optimizer steps. What surrounds them is the loop's: which come, and what is due after each."""

    def __init__(
        self,
        training: Training,
        *,
        note_samples: NoteSamples | None,
        see_first: Callable[[Any], None] | None,
        keep_buffers: bool,
    ) -> None:
        """`see_first` is shown the first batch.

        `keep_buffers`: remember before each step what its forward pass changes, so that it can be done again.
        """
        parts, settings, state = training.parts, training.settings, training.state
        self.parts, self.settings, self.state, self.at = parts, settings, state, training.at
        self.flags, self.numbers, self.schedule = training.flags, training.numbers, training.schedule
        snapshot_schedule, bad_steps, numbers = training.snapshot_schedule, training.bad_steps, training.numbers
        self.snapshot_schedule, self.bad_steps = snapshot_schedule, bad_steps
        self.note_samples = note_samples if parts.strategy.mesh.leads_replica else None  # others read the same ones
        self.transfers = Transfers(parts.world.device, numbers, see_first)
        self.clock = StepClock(parts.world, snapshot_schedule.store, self.transfers)
        self.counting = LossWeights(parts, settings, state)
        self.first_steps = FirstSteps(parts)
        self.norm_price = NormPrice(parts.batch_norm, parts.world.notes) if parts.batch_norm is not None else None
        self.buffers = BufferCopies(parts.trained) if keep_buffers else None
        self.watcher = parts.watcher
        self.updates_within = parts.own_step is not None or isinstance(parts.strategy, UpdatesWithin)
        if parts.own_step is not None:
            parts.own_step.remembers = keep_buffers or bad_steps.leave_out
            parts.own_step.done = lambda: state.step
        if isinstance(parts.strategy, UpdatesWithin):
            parts.strategy.before_update = snapshot_schedule.before_update
        # Asked once: to ask a protocol takes as long as a small layer.
        self.fixed_parts = parts.strategy if isinstance(parts.strategy, FixedParts) else None
        self.misuse_told = parts.strategy.misuse_told if isinstance(parts.strategy, TellsMisuse) else nullcontext
        self.hands_out = parts.strategy if isinstance(parts.strategy, HandsOut) else None
        self.prepares = parts.strategy if isinstance(parts.strategy, PreparesUpdate) else None
        self.acts = bool(parts.callbacks)
        """Whether there are callbacks: a session is given them once."""

    def train_step(self, steps: Iterator[Step]) -> None:
        """One optimizer step, from waiting for its samples to queueing its numbers."""
        parts, state, number = self.parts, self.state, self.state.step + 1
        self.clock.begin()
        step, weighed, weight = self.next_of(steps)
        self.clock.fetched()
        self.prepare(number, step)
        lr = parts.optimizer.param_groups[0]["lr"]
        if state.step < parts.warmup.steps:
            lr *= parts.warmup.factor(state.step)
        norm, updated = cast(Any, None), False
        if number in state.left_out or weight == 0:
            outcome = self.pass_over()
        else:
            if self.bad_steps.buffers:
                self.bad_steps.buffers.keep()
            if parts.auditor is not None:
                self.audit(number, weighed)
            pieces = self.transfers.pieces(state.step, weighed.pieces)
            with self.around(len(pieces)):
                if parts.own_step is None:
                    outcome = parts.strategy.forward_backward(
                        parts.trained, pieces, parts.compute, parts.precision.scale, self.flags.own()
                    )
                else:
                    outcome = parts.own_step.make(pieces, self.flags.own())
            if self.watcher is not None:
                self.watcher.differentiates(outcome)
            norm = self.bad_steps.watched(self.clip())
            if self.bad_steps.must_go(number, outcome.values["loss"], norm):
                self.schedule.after_step()
            else:
                norm, updated = self.bad_steps.shown(number, norm), True
                self.update()
        if self.acts:
            self.call_callbacks(step, updated=updated)
        facts = self.facts(number, step, lr, weight)
        self.count(step)
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

    def around(self, pieces: int) -> AbstractContextManager[None]:
        """What the passes of a step run in: nothing, where there is no BatchNorm and it is none of the first steps."""
        return _NOTHING if self.parts.batch_norm is None and not self.first_steps.looking else self.writes_seen(pieces)

    @contextmanager
    def writes_seen(self, pieces: int) -> Iterator[None]:
        """See what the passes of a first step change by themselves: it is put back where a later step breaks off."""
        with acting(self.parts.batch_norm):
            if not self.first_steps.looking or self.updates_within:
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
        if self.note_samples is not None and number not in self.state.left_out:
            self.note(self.note_samples, number, step)
        if self.buffers:
            self.buffers.keep()
        if self.parts.own_step is not None and self.snapshot_schedule.is_writing:
            self.snapshot_schedule.before_update()
        if isinstance(self.parts.batch_norm, GlobalBatch):
            self.parts.batch_norm.begin_step(step.samples)

    def note(self, note_samples: NoteSamples, number: int, step: Step) -> None:
        """Note which samples this worker computes; of pieces that go to a free worker, each when it is taken."""
        if self.hands_out is None:
            note_samples(number, _indices(step.pieces))
        else:
            self.hands_out.taken = lambda piece: note_samples(number, _indices([step.pieces[piece]]))

    def audit(self, number: int, step: Step) -> None:
        """Ready the parts that this worker computes again for another."""
        assert self.parts.auditor is not None, "asked for by its setting"
        pieces = partial(self.transfers.pieces, self.state.step)
        self.parts.auditor.begin(number, [Auditable(each.audit, pieces(each.pieces)) for each in step.audits])

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
        if parts.own_step is None:  # which has made its updates itself
            self.step_optimizer()
        if looking:
            self.first_steps.rate = rate * parts.warmup.factor(done)

    def step_optimizer(self) -> None:
        """Have the strategy step the optimizer, and move the schedule."""
        parts, done = self.parts, self.state.step
        if self.snapshot_schedule.is_writing:
            self.snapshot_schedule.before_update()
        if may_draw(parts.optimizer):
            # The noise of a Langevin sampler, say: the same on every worker, and after a resume.
            randomness.seed_compute(self.settings.seed, randomness.UPDATE, done)
        warms_up = done < parts.warmup.steps
        with multiplied(parts.optimizer, parts.warmup.factor(done)) if warms_up else nullcontext():
            if self.prepares is not None:
                self.prepares.prepare_update()
            self.at.inconsistent = True
            try:
                parts.strategy.update(parts.trained, parts.precision.stepper(parts.optimizer))
            except (AssertionError, TypeError, ValueError, RuntimeError) as error:
                if "closure" in str(error).lower():
                    raise several_gradients(parts.optimizer) from error
                raise
        if self.schedule.follows_steps:
            self.schedule.after_step()
        self.at.inconsistent = False

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
        if self.first_steps.looking:
            self.first_steps.after_step()
        if self.watcher is not None:
            self.watcher.steps(state.step)

    def facts(self, number: int, step: Step, lr: float, weight: float | None) -> StepFacts:
        """What is known of a step, which ends here, without waiting for its device."""
        timing, bytes_sent, exchange_s = self.clock.end()
        if self.norm_price is not None:
            self.norm_price.after_step(timing.total)
        return StepFacts(
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

    def settle(self, *, finished: bool) -> None:
        """End the step under way, which broke off. `finished`: another has done it, so this worker's part counts."""
        at, strategy = self.at, self.parts.strategy
        self.first_steps.asks_others = False  # new workers do not know how many steps were looked at
        if at.under_way and not at.inconsistent and isinstance(strategy, Elastic):
            own_step = self.parts.own_step
            if not finished or own_step is not None or not strategy.complete:
                if self.buffers:
                    self.buffers.put_back()
                strategy.step_back()
                if own_step is not None:
                    own_step.step_back()
            elif isinstance(strategy, LocalUpdates | InCopies) and at.taken is not None:
                if isinstance(strategy, LocalUpdates):
                    self.clip()
                self.update()
                self.call_callbacks(at.taken, updated=True)
                self.count(at.taken)
        at.break_off()


def _indices(pieces: Sequence[LoadedPiece | DuePiece]) -> list[int]:
    """The samples of these pieces, ghosts left out."""
    return [index for piece in pieces if piece.plan.weight for index in piece.plan.indices.tolist()]


class Transfers:
    """Those of one loop."""

    def __init__(
        self, device: torch.device, numbers: DeferredMetrics, see_first: Callable[[Any], None] | None = None
    ) -> None:
        """`numbers` tell, of a device that is not the CPU, how long it had nothing to do meanwhile.

        `see_first` is shown the first batch of the run, on the CPU.
        """
        self._device, self._on_cpu, self._numbers = device, device.type == "cpu", numbers
        self._see_first = see_first
        self.waited_s = 0.0
        """Seconds that this worker has waited for batches in the midst of steps."""

    def next_of(self, steps: Iterator[Step]) -> Step:
        """The next step. Its time begins here; to wait for it is to wait for data."""
        if self._on_cpu:
            return next(steps)
        self._numbers.begin()
        with self._numbers.waiting_for_data():
            return next(steps)

    def pieces(self, step: int, due: Sequence[LoadedPiece | DuePiece]) -> list[Piece]:
        """Pieces of the step after `step` steps. Each batch comes when it is asked for: so few are in memory."""
        return [
            Piece(
                bring=partial(self._bring, loaded, step),
                samples=len(loaded.plan.indices),
                weight=loaded.plan.weight,
                address=(step, loaded.plan.part, loaded.plan.micro),
                shares=loaded.plan.shares,
            )
            for loaded in due
        ]

    def _bring(self, piece: LoadedPiece | DuePiece, step: int) -> Any:
        """The batch of a piece, on this worker's device. To wait for it is to wait for data."""
        begin = time.perf_counter()
        if self._on_cpu:
            batch = piece.batch
        else:
            with self._numbers.waiting_for_data():
                batch = piece.batch
        if step == 0 and self._see_first is not None and piece.plan.weight:
            self._see_first(batch)
            self._see_first = None
        if not self._on_cpu:
            batch = on_device(batch, self._device)
        self.waited_s += time.perf_counter() - begin
        return batch


class StepClock:
    """The times of each step by the host's clock: waiting for data, computing, standing still for a snapshot.

    What workers exchanged and how long it took is counted with them.
    """

    def __init__(self, world: World, store: Store, transfers: Transfers) -> None:
        self._world, self._store, self._transfers = world, store, transfers
        self._begin = self._fetched = self._stalled = self._brought = self._exposed = self._exchanged = 0.0
        self._sent = 0

    def begin(self) -> None:
        """The step begins with waiting for its samples."""
        world = self._world
        self._begin, self._sent, self._exchanged = time.perf_counter(), world.bytes_sent, world.exchange_s
        self._stalled, self._brought = self._store.stalled_s, self._transfers.waited_s

    def fetched(self) -> None:
        """The samples are here. What workers sent each other to find them is a part of waiting for those."""
        self._fetched, self._exposed = time.perf_counter(), self._world.exposed_s

    def end(self) -> tuple[HostTiming, int, float]:
        """The model has changed. Gives the times, the bytes sent, and the seconds that exchanges took."""
        end, world = time.perf_counter(), self._world
        stall = self._store.stalled_s - self._stalled
        brought = self._transfers.waited_s - self._brought
        waited, worked = self._fetched - self._begin + brought, end - self._fetched - stall - brought
        timing = HostTiming(end - self._begin, waited, world.exposed_s - self._exposed, stall, worked)
        return timing, world.bytes_sent - self._sent, world.exchange_s - self._exchanged
