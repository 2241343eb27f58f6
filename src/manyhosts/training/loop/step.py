"""One optimizer step, from top to bottom: its samples, forward and backward pass, clipping, update, what is counted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhosts.communication.batch_norm import GlobalBatch
from manyhosts.communication.shared_norm import acting
from manyhosts.communication.world import World
from manyhosts.data import randomness
from manyhosts.data.steps import DuePiece, LoadedPiece, Step, on_device
from manyhosts.errors import ConfigError
from manyhosts.events import StepTiming
from manyhosts.loss.compute import may_draw
from manyhosts.model.buffers import BufferCopies
from manyhosts.model.model_checks import several_gradients
from manyhosts.snapshot.store import Store
from manyhosts.strategies.audit import Auditable
from manyhosts.strategies.local_rate import multiplied
from manyhosts.strategies.strategy import Compute, Piece, StepOutcome
from manyhosts.training.consistency.first_steps import FirstSteps, compare_streams
from manyhosts.training.loop.counting import LossWeights
from manyhosts.training.loop.numbers import DeferredMetrics, StepFacts
from manyhosts.training.loop.training import Training
from manyhosts.training.telemetry.pace import NormPrice

_NOTHING = nullcontext()


class Stepper:
    """Takes optimizer steps. What surrounds them is the loop's: which come, and what is due after each.

    A step is made of two verbs, `backward` and `update`. Each is called once for a session that is given a loss and an
    optimizer; a step that the script has written (`own_loop.own_step`) calls them as often as it wants.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        components, settings, self.strategy = training.components, training.settings, training.components.strategy
        self.transfers = Transfers(
            components.world.device,
            training.numbers,
            training.run_log.keep_pictures if settings.keep_pictures else None,
        )
        self.clock = StepClock(components.world, training.snapshot_schedule.store, self.transfers)
        self.counting = LossWeights(components, settings, training.state)
        self.first_steps = FirstSteps(components)
        self.norm_price = (
            NormPrice(components.batch_norm, components.world.notes) if components.batch_norm is not None else None
        )
        self.buffers = training.bad_steps.buffers
        """What a step may change by itself, as it was before: where it may be left out, or be made again."""
        if self.buffers is None and training.survives:
            self.buffers = BufferCopies(components.trained)
        self.norm: Tensor | None = None
        """Of the gradient of the step under way, or the last one, before clipping; None where it was not asked for."""
        if components.own_step is not None:
            components.own_step.begin(self, training.state, remembers=self.buffers is not None)
        self.strategy.before_update = self.before_inner_update
        self.acts = bool(components.callbacks)

    def train_step(self, steps: Iterator[Step]) -> None:
        """One optimizer step, from waiting for its samples to queueing its numbers."""
        training, components, state = self.training, self.training.components, self.training.state
        number = state.step + 1
        self.clock.begin()
        step, weighed, weight = self.next_of(steps)
        self.clock.fetched()
        self.prepare(number, step)
        lr = float(components.optimizer.param_groups[0]["lr"])
        if state.step < components.warmup.steps:
            lr *= components.warmup.factor(state.step)
        self.norm, updated = None, False
        if number in state.left_out or weight == 0:
            outcome = self.pass_over()
        else:
            if components.auditor is not None:  # some parts of others are computed again here
                audits = [
                    Auditable(each.audit, self.transfers.pieces(state.step, each.pieces)) for each in weighed.audits
                ]
                components.auditor.begin(number, audits)
            pieces = self.transfers.pieces(state.step, weighed.pieces)
            if components.own_step is None:
                outcome = self.backward(pieces, components.compute, training.control_flags())
                if components.watcher is not None:
                    components.watcher.differentiates(outcome)
                updated = self.update_unless_bad(number, outcome.values["loss"])
            else:
                outcome, updated = components.own_step.make(pieces, training.control_flags())
                weight = components.own_step.weight(step.samples)
                if updated:
                    self.norm = components.own_step.norm()
                else:
                    training.bad_steps.put_back()
                if components.watcher is not None:
                    components.watcher.differentiates(outcome)
        if self.acts:
            self.call_callbacks(step, updated=updated)
        facts = self.facts(number, step, lr, weight)
        self.count(step)
        training.numbers.add(facts, outcome, self.norm, components.world.take_waits())

    # What a step is made of.

    def backward(self, pieces: Sequence[Piece], compute: Compute, control_flags: Sequence[float] = ()) -> StepOutcome:
        """The gradients of what `compute` gives for `pieces`, summed over all workers as the strategy does it."""
        components = self.training.components
        try:
            with self.around(len(pieces)):
                return components.strategy.forward_backward(
                    components.trained, pieces, compute, components.precision.scale, control_flags
                )
        except RuntimeError as cause:
            if "backward through the graph a second time" not in str(cause):
                raise
            raise ConfigError(
                "a graph is gone through backward twice: by a backward() of the script, or because something of an "
                "earlier batch or pass is used again (a hidden state, a tensor made before)",
                where="mh.Trainer(step=…)" if components.own_step is None else "run.backward",
                fix="detach() what is kept from before; return the loss, and leave backward(), zero_grad() and "
                "optimizer.step() to the trainer; or give retain_graph=True to a backward() that is meant"
                if components.own_step is None
                else "detach() what another pass has made; return the loss: run.backward goes backward through it",
            ) from cause

    def update(self, optimizer: Optimizer, step: Callable[[], Any], *address: int) -> None:
        """Change the model by the gradients of `optimizer`: call `step`, whose random numbers are of `address`."""
        training, looking = self.training, self.first_steps.looking
        if looking:
            self.first_steps.before_update()
        if training.snapshot_schedule.is_writing:
            training.snapshot_schedule.before_update()
        if may_draw(optimizer):
            # The noise of a Langevin sampler, say: the same on every worker, and after a resume.
            randomness.seed_compute(training.settings.seed, *address)
        training.inconsistent = True
        try:
            step()
        except (AssertionError, TypeError, ValueError, RuntimeError) as error:
            if "closure" in str(error).lower():
                raise several_gradients(optimizer) from error
            raise
        training.inconsistent = False
        if looking:
            self.first_steps.rate = max(float(group["lr"]) for group in optimizer.param_groups)

    def before_inner_update(self) -> None:
        """The strategy is about to change the model in the midst of its passes, and not by `update`."""
        self.training.snapshot_schedule.before_update()
        self.first_steps.forget_held()  # what changes now is not to be told from what passes change
        self.training.bad_steps.keeps_weights = False

    def update_unless_bad(self, number: int, loss: Tensor) -> bool:
        """Step the optimizer, unless loss or gradient is not finite. Whether the model has changed."""
        training, bad_steps = self.training, self.training.bad_steps
        self.norm = bad_steps.watched(self.clip())
        if bad_steps.must_go(number, loss, self.norm):
            training.schedule.after_step()
            return False
        self.norm = bad_steps.shown(number, self.norm)
        self.step_optimizer()
        return not (self.acts and training.components.precision.left_out)

    def clip(self) -> Tensor | None:
        """Clip the gradient where that is asked for. Returns its norm before."""
        components, most = self.training.components, self.training.settings.clip_gradients
        if most is None:
            return None
        components.precision.unscale(components.optimizer)
        return components.strategy.clip_gradients(components.trained, most)

    def step_optimizer(self) -> None:
        """Have the strategy step the optimizer, and move the schedule."""
        training, components, done = self.training, self.training.components, self.training.state.step
        warms_up = done < components.warmup.steps
        with multiplied(components.optimizer, components.warmup.factor(done)) if warms_up else _NOTHING:
            self.strategy.prepare_update()
            step = partial(
                components.strategy.update, components.trained, components.precision.stepper(components.optimizer)
            )
            self.update(components.optimizer, step, randomness.UPDATE, done)
        if training.schedule.follows_steps:
            training.schedule.after_step()

    def pass_over(self) -> StepOutcome:
        """A step that went wrong before, or counts nothing: nothing is computed, and the schedule moves on."""
        world, flags = self.training.components.world, self.training.control_flags()
        sums = world.all_reduce(torch.tensor(flags, dtype=torch.float64, device=world.device))
        self.training.schedule.after_step()
        return StepOutcome({"loss": torch.full((), math.nan, device=world.device)}, sums)

    def around(self, pieces: int) -> AbstractContextManager[None]:
        """What the passes of a step run in: nothing, where there is no BatchNorm and it is none of the first steps."""
        is_plain = self.training.components.batch_norm is None and not self.first_steps.looking
        return _NOTHING if is_plain else self.writes_seen(pieces)

    @contextmanager
    def writes_seen(self, pieces: int) -> Iterator[None]:
        """See what the passes of a first step change by themselves: it is put back where a later step breaks off."""
        components = self.training.components
        with acting(components.batch_norm):
            if not self.first_steps.looking or components.own_step is not None:
                yield
                return
            self.first_steps.before_forward()
            yield
            self.first_steps.after_forward(pieces)
            if self.buffers is not None:
                self.buffers.follow(self.first_steps.written)

    # What surrounds that.

    def next_of(self, steps: Iterator[Step]) -> tuple[Step, Step, float | None]:
        """The next step; the same with what each piece counts; and what its batch counts (None: its samples)."""
        self.training.since = time.monotonic()
        step = self.transfers.next_of(steps)
        if self.training.components.watcher is not None:
            step = self.training.components.watcher.reads(step)
        with self.strategy.misuse_told():
            weighed, weight = self.counting.of(step)  # before the step is under way: workers may be lost here, too
        return step, weighed, weight

    def prepare(self, number: int, step: Step) -> None:
        """What must be known before the first forward pass, should the step break off or have to be explained."""
        training, components = self.training, self.training.components
        if self.first_steps.stream_is_new:
            self.first_steps.stream_is_new = False
            compare_streams(components.world, step)
        components.world.notes += [step.said] if step.said else []
        components.world.take_waits()  # what workers send each other to find the samples is a part of waiting for those
        training.under_way, training.taken = number, step
        self.strategy.share_out(step.assignment)
        is_noted = training.run_log.samples is not None and number not in training.state.left_out
        if is_noted and self.strategy.mesh.leads_replica:  # others read the same ones
            self.strategy.report_taken(len(step.pieces), partial(self.note, number, step.pieces))
        if self.buffers:
            self.buffers.keep()
        if components.own_step is not None and training.snapshot_schedule.is_writing:
            training.snapshot_schedule.before_update()
        if isinstance(components.batch_norm, GlobalBatch):
            components.batch_norm.begin_step(step.samples)

    def note(self, number: int, pieces: Sequence[LoadedPiece | DuePiece], taken: Sequence[int]) -> None:
        """Note which samples this worker computes, ghosts left out: those of the pieces of a step that it has taken.

        Of pieces that go to a free worker, each when it is taken.
        """
        plans = [pieces[each].plan for each in taken]
        samples = [index for plan in plans if plan.weight for index in plan.indices.tolist()]
        self.training.run_log.note_samples(number, samples)

    def call_callbacks(self, step: Step, *, updated: bool) -> None:
        """Let callbacks act on what `step` has made, as a part of it. `updated`: whether it has changed the model."""
        training, components, state = self.training, self.training.components, self.training.state
        training.snapshot_schedule.before_update()
        before = (state.step, components.batches.source.epochs(state.position))
        moment = components.moment(
            state.step + 1, components.batches.source.epochs(step.after), before=before, updated=updated
        )
        randomness.seed_compute(training.settings.seed, randomness.CALLBACK, state.step)
        training.inconsistent = True
        components.callbacks.call("after_step", moment)
        training.inconsistent = False
        if len(components.optimizer.param_groups) != len(components.initial_optimizer.options):
            raise ConfigError(
                "a callback has added a group of parameters to the optimizer, with which no snapshot could be resumed",
                where="mh.Trainer(callbacks=…)",
                fix="give all groups in optimizer=, and freeze those of later until then (mh.Freeze)",
            )

    def count(self, step: Step) -> None:
        """The model has changed: from now on the step counts, and what is due after it is due."""
        training, state = self.training, self.training.state
        state.step += 1
        state.position, state.stream = step.after, step.stream
        training.under_way, training.ends_epoch = 0, step.ends_epoch
        training.done_actions = 0 if step.ends_epoch else training.first_duty
        if self.first_steps.looking:
            self.first_steps.after_step()
        if state.step == 1:  # what an optimizer keeps is there since now
            training.snapshot_schedule.check_kept()
        if training.components.watcher is not None:
            training.components.watcher.steps(state.step)

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
        training, strategy, own_step = self.training, self.strategy, self.training.components.own_step
        self.first_steps.asks_others = False  # new workers do not know how many steps were looked at
        if training.under_way and not training.inconsistent:
            if not finished or own_step is not None or not strategy.complete:
                if self.buffers:
                    self.buffers.put_back()
                strategy.step_back()
                if own_step is not None:
                    own_step.step_back()
            elif strategy.has_own and training.taken is not None:
                if self.norm is None:  # else the gradient is clipped already
                    self.clip()
                self.step_optimizer()
                if self.acts:
                    self.call_callbacks(training.taken, updated=True)
                self.count(training.taken)
        training.tried, training.under_way = max(training.tried, training.under_way), 0


class Transfers:
    """Those of one loop."""

    def __init__(
        self, device: torch.device, numbers: DeferredMetrics, see_first: Callable[[Any], None] | None = None
    ) -> None:
        """`numbers` say, of a device that is not the CPU, how long it had nothing to do meanwhile.

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
        with _NOTHING if self._on_cpu else self._numbers.waiting_for_data():
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

    def begin(self) -> None:
        """The step begins with waiting for its samples."""
        world = self._world
        self._begin, self._sent, self._exchanged = time.perf_counter(), world.bytes_sent, world.exchange_s
        self._stalled, self._brought = self._store.stalled_s, self._transfers.waited_s

    def fetched(self) -> None:
        """The samples are here. What workers sent each other to find them is a part of waiting for those."""
        self._fetched, self._exposed = time.perf_counter(), self._world.exposed_s

    def end(self) -> tuple[StepTiming, int, float]:
        """The model has changed. Gives the times, the bytes sent, and the seconds that exchanges took."""
        end, world = time.perf_counter(), self._world
        stall = self._store.stalled_s - self._stalled
        brought = self._transfers.waited_s - self._brought
        waited, worked = self._fetched - self._begin + brought, end - self._fetched - stall - brought
        total, exposed = end - self._begin, world.exposed_s - self._exposed
        timing = StepTiming(
            total=total,
            compute=worked - exposed,
            communication_exposed=exposed,
            data_wait=waited,
            snapshot_stall=stall,
            other=total - worked - waited - stall,
        )
        return timing, world.bytes_sent - self._sent, world.exchange_s - self._exchanged
