"""Data parallelism: every worker holds the entire model and computes its part of each global batch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from manyhosts.communication.buckets import GradientBuckets
from manyhosts.communication.comm_queue import CommQueue
from manyhosts.communication.compression.choose import Stopwatch
from manyhosts.communication.compression.feedback import Compressor
from manyhosts.communication.compression.table import make_compression
from manyhosts.communication.gathering import gather_words
from manyhosts.communication.model_watch import UNFROZEN, ModelWatch
from manyhosts.communication.world import World
from manyhosts.config.strategies import DDP
from manyhosts.events import CompressionChosen
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome, Steppable, factor_of
from manyhosts.strategies.tally import StepMetrics
from manyhosts.strategies.traits import Traits
from manyhosts.strategies.uncut_model import UncutModel


class DataParallel(UncutModel):
    """Sums the weighted gradients of all workers while the last backward pass runs."""

    traits = Traits()
    complete = False
    """Whether all sums of the step under way are here, and what the compression keeps of it is known."""

    def __init__(self, config: DDP, world: World) -> None:
        super().__init__(world)
        self.config = config
        self.asked = config.compression
        self.bucket_bytes = int(config.bucket_mb * 1e6)
        self.buckets: GradientBuckets | None = None
        self.steps = 0
        """Steps that gradients were exchanged in."""
        self.stopwatch = Stopwatch(world) if config.compression == "auto" else None
        """There while it is not yet known which compression to use."""
        self.names: dict[int, str] = {}
        """Of the parameters, by their numbers in the buckets."""
        self.model_watch = ModelWatch(nn.Module(), world)
        """Of the model, once it is placed."""
        self.more: list[GradientBuckets] = []
        """Of those that were unfrozen since the buckets were made."""
        self.groups: list[GradientBuckets] = []
        """Those of each optimizer, where a step has several passes: `buckets` are one of them then, or none."""
        self.revocable = world.membership is not None  # a step is taken back where one of several workers is lost

    def place(self, model: nn.Module) -> nn.Module:
        """Move `model` to this worker's device and make it equal to rank 0's."""
        model = super().place(model)
        self.model_watch = ModelWatch(model, self.world)
        self._make_buckets()
        return model

    def make_group(self, parameters: Sequence[nn.Parameter]) -> GradientBuckets:
        """See `Strategy`."""
        self.buckets, self.model_watch.frozen = None, []  # buckets of a group have all: none is met as new
        self.groups.append(self._buckets_of(parameters))
        return self.groups[-1]

    def use_group(self, group: GradientBuckets | None, call: int) -> None:
        """See `Strategy`."""
        self.buckets, self.agreed = group, self.agreed_of[call]

    def _make_buckets(self) -> None:
        """Make the buckets for the parameters that all workers train now."""
        trained = self.model_watch.trained()
        parameters = [parameter for _, parameter in trained]
        self.names = {number: name for number, (name, _) in enumerate(trained)}
        self.more = []
        self.buckets = GradientBuckets(
            parameters, self.world, bucket_bytes=self.bucket_bytes, compressor=self._compressor(parameters)
        )

    def let_go(self) -> None:
        """Wait for the communication queues."""
        if self.buckets is not None and self.buckets.compressor is not None:
            self.buckets.compressor.comm_queue.abandon()

    def step_back(self) -> None:
        """Have what the compression keeps and remembers as before the step under way."""
        self.complete = False
        if self.buckets is not None and self.buckets.compressor is not None:
            self.buckets.compressor.step_back()
        for buckets in self.groups:
            buckets.rest()

    def shared_state(self) -> dict[str, Any]:
        """How many steps were exchanged, what `auto` has chosen, and what the compression remembers."""
        compressor = None if self.buckets is None else self.buckets.compressor
        return {
            "steps": self.steps,
            "chosen": self._chosen(),
            "compression": {} if compressor is None else compressor.shared_state(),
            UNFROZEN: self.model_watch.thawed,
        }

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Take up what `shared_state` gave on another worker."""
        self._unfreeze(state[UNFROZEN])
        if self.stopwatch is not None and state["chosen"]:
            self.settle_on(state["chosen"])
        self.steps = state["steps"]
        if self.buckets is not None and self.buckets.compressor is not None:
            self.buckets.compressor.confirm()
            self.buckets.compressor.take_shared(state["compression"])

    def resync(self, source: int, *, new: bool, gone: int) -> str:
        """Exchange gradients in the order of worker `source`, by the compression that any of them has chosen."""
        self._merge_buckets()
        for agreed in (self.agreed, *self.agreed_of.values()):
            agreed.forget()
        self.model_watch.all_is_new()
        for buckets in self.groups:
            buckets.resync(source)
        if self.buckets is None:
            return ""
        if self.asked == "auto":
            chosen = max(gather_words(self.world, self._chosen()))  # one name, or none
            if self.stopwatch is not None and chosen:
                self.settle_on(chosen)
            elif self.stopwatch is not None:
                self.stopwatch.times.clear()  # of other workers than those of now
        for buckets in (self.buckets, *self.more):
            buckets.resync(source)
        compressor = self.buckets.compressor
        if compressor is None or not compressor.feedback or not gone:
            return ""
        of_whom = "a lost worker's" if gone == 1 else f"{gone} lost workers'"
        return f"what compression had kept back of {of_whom} gradients"

    def _chosen(self) -> str:
        """The compression in use by its name; empty while `auto` has yet to choose."""
        known = self.stopwatch is None and isinstance(self.config.compression, str)
        return str(self.config.compression) if known else ""

    def _compressor(self, parameters: Sequence[nn.Parameter]) -> Compressor | None:
        compression = make_compression(self.config)
        if compression is None:
            return None
        compressor = Compressor(
            compression,
            CommQueue(self.world, by_node=self.config.inside_node == "exact"),
            above=self.config.compress_above,
            feedback=self.config.error_feedback,
            parameters=parameters,
        )
        compressor.revocable = self.revocable
        return compressor

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Accumulate the gradients of this worker's pieces and sum them over the workers."""
        buckets = self._begin(scale)
        watch = self.stopwatch
        tally = StepMetrics(control_flags, self.agreed, self.world)
        for piece in pieces[:-1]:
            buckets.backward(scale(tally.add(compute(model, piece), piece.weight)))
        last = scale(tally.add(compute(model, pieces[-1]), pieces[-1].weight)) if pieces else None
        if watch is not None:
            watch.backward()
        # The tally travels with the gradients; but where a compression keeps something it is the word that all have
        # every sum: the worker that gets it knows that no other has to do the step again with what it keeps changed.
        last_word = buckets.compressing and self.revocable
        reported = self.model_watch.numbers() if self.world.size > 1 else []
        tally.control_flags = [*control_flags, *reported]
        buckets.arm(None if last_word or self.world.size == 1 else tally.packed(self.world.device))
        if last is not None:
            buckets.backward(last)
        if watch is not None:
            watch.computed()
        summed = buckets.finish()
        for late in self.more:
            late.arm()
            late.finish()
        if self.world.size > 1 and self.world.device.type == "cpu" and buckets.buckets:
            self.world.exchange_s += time.perf_counter() - buckets.first_left
        self.complete = last_word
        if summed is None:
            self.world.wait(tally.start_sum())
        else:
            tally.take(summed)
        self._heed(tally, len(reported))
        outcome = tally.outcome()
        if self.config.compression_errors and buckets.compressor is not None:
            errors = buckets.compressor.errors()
            outcome.values = {
                **outcome.values, **{f"compression_error/{self.names[key]}": error for key, error in errors.items()}
            }  # fmt: skip
        return outcome

    def _begin(self, scale: Scale) -> GradientBuckets:
        """Ready the buckets for a step."""
        self._merge_buckets()
        buckets = self.buckets
        assert buckets is not None, "place() comes before forward_backward()"
        self.complete = False
        self.model_watch.watch.count_step()
        for late in self.more:
            late.begin()
        watch = self.stopwatch
        if watch is not None and watch.enough:
            choice = watch.decide(self.config, buckets.parameters, bucket_bytes=self.bucket_bytes)
            self.world.notes.append(choice.why())
            self.world.news.append(
                partial(
                    CompressionChosen,
                    compression=choice.name,
                    why=choice.why(),
                    bandwidth=choice.network.bandwidth,
                    latency=choice.network.latency_s,
                )
            )
            self.settle_on(choice.name)
        elif watch is not None:
            watch.begin()
        if buckets.compressor is None:
            buckets.begin()
        else:
            factor = factor_of(scale, self.world.device)
            buckets.begin(compressing=self.steps >= self.config.compression_warmup, scale=factor)
        return buckets

    def _heed(self, tally: StepMetrics, count: int) -> None:
        """See that all workers agree, by the last `count` sums of control flags, and take these out of the tally."""
        if count:
            reported, tally.control_flags = tally.control_flags[-count:], tally.control_flags[:-count]
            if (sums := self.model_watch.read(reported)) is not None:
                self.model_watch.check(sums)
        if found := self.model_watch.unfrozen():  # by all workers alike: their gradients are summed from this step on
            self.model_watch.known(found)
            self.more.append(self._buckets_of([parameter for _, parameter in found]))
            self.more[-1].arm()
            self.more[-1].finish()

    def _buckets_of(self, parameters: Sequence[nn.Parameter]) -> GradientBuckets:
        return GradientBuckets(parameters, self.world, bucket_bytes=self.bucket_bytes)

    def _merge_buckets(self) -> None:
        """Where parameters were unfrozen: let their gradients leave with the others, while the backward pass runs.

        What a compression keeps and remembers belongs to the parameters it knows; then the others continue travelling
        by themselves, after it and as they are.
        """
        if self.more and self.buckets is not None and self.buckets.compressor is None:
            self._make_buckets()
        elif len(self.more) > 1:
            late = {parameter for buckets in self.more for parameter in buckets.parameters}
            self.more = [self._buckets_of([each for _, each in self.model_watch.trained() if each in late])]

    def _unfreeze(self, names: Sequence[str]) -> None:
        """Train the parameters of these names, too, as the other workers do, or as the run did before."""
        if found := self.model_watch.unfreeze(names):
            self.more.append(self._buckets_of(found))

    def settle_on(self, name: str) -> None:
        """Send gradients by the compression of this name from the next step on: what `auto` means, say. All workers
        call this.
        """
        assert self.buckets is not None, "place() comes before a choice"
        self.let_go()
        self.stopwatch = None
        self.config = replace(self.config, compression=name)
        compressor = self._compressor(self.buckets.parameters)
        if compressor is not None or self.buckets.compressor is not None:
            self.buckets.use(compressor)

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Step the optimizer; equal gradients keep the workers equal."""
        optimizer.step()
        self.steps += 1
        if self.buckets is not None and self.buckets.compressor is not None:
            self.buckets.compressor.confirm()

    def state_dict(self) -> dict[str, Any]:
        """What compression has kept back, and what `auto` has chosen; nothing where there is no compression."""
        unfrozen = {UNFROZEN: self.model_watch.thawed} if self.model_watch.thawed else {}
        if self.buckets is None or self.stopwatch is not None:
            return {**unfrozen}
        if self.buckets.compressor is None:
            return {
                **unfrozen,
                **({"chosen": self.config.compression} if self.config.compression != self.asked else {}),
            }
        order, kept = self.buckets.order, self.buckets.compressor.state_dict()
        return {
            "steps": self.steps,
            "chosen": self._chosen(),
            "order": [order.present, [*order.in_parts]] if order.seen is None else [],
            **unfrozen,
            **kept,
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what every former worker kept back, shared out over those of now."""
        chosen = states[0].get("chosen", "") if states else ""
        self._unfreeze(states[0].get(UNFROZEN, ()) if states else ())
        if self.stopwatch is not None and chosen:
            self.settle_on(chosen)
        if self.buckets is None or self.buckets.compressor is None:
            return
        self.steps = max((state.get("steps", 0) for state in states), default=0)
        if known := states[0].get("order") if states else None:
            self.buckets.pack_as(*known)
        self.buckets.compressor.load_state_dict(states)
