"""What a worker holds of a training at most, by what it takes of memory in total and by the way to train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from manyhosts.planner.compute import activations, backward_bytes, batch_of, micro_batches
from manyhosts.planner.measured import Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes that one worker holds at most."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    strategy: int = 0
    """What the strategy keeps in addition to them, or has in full for a while."""
    passing: int = 0
    """What is there for a while: gradients of activations, what an update computes with, the copy that a snapshot is
    written from."""
    apart: int = 0
    """Of all these, what is not there when memory is largest."""
    process: int = 0
    """What its process has in addition to the tensors of the training."""

    @property
    def other(self) -> int:
        """All that a table has no column for."""
        return self.buffers + self.strategy + self.passing - self.apart

    @property
    def total(self) -> int:
        """Of all that is there together, the most."""
        return sum(int(getattr(self, each.name)) for each in fields(self)) - 2 * self.apart


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBytes:
    """What a training takes of a worker that has all of the model; activations those of its largest forward pass."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    backward: int = 0
    """What the backward pass holds at most in addition to these: gradients of activations."""
    update: int = 0
    """What the optimizer's step holds for a while in addition to what it keeps."""
    units: tuple[int, ...] = ()
    """Of the parameters of each unit that the model can be cut into, in the order of the forward pass; last of what no
    unit holds. Empty: it cannot be cut into units."""
    tail: int = 0
    """Of the parameters after the last unit, whose gradients come first."""
    on_cpu: bool
    """Whether it computes where snapshots are copied to, too."""
    several: bool = False
    """Whether a step has several micro-batches."""
    blocks: tuple[int, ...] = ()
    """Of the parameters of each block, where the model is a chain of blocks that stages may share."""
    divisible: int = 0
    """Of the parameters of layers that can be cut over workers."""
    together: float = 1.0
    """Samples of a forward pass where all workers compute the same ones, as a multiple of those that `activations` are
    of."""
    passes: int = 1
    """Forward passes of a step then."""

    @property
    def state(self) -> int:
        """What a snapshot keeps."""
        return self.parameters + self.optimizer + self.buffers


def model_bytes(measured: Measured, workers: int) -> ModelBytes:
    """What one of `workers` would hold of a training that was measured."""
    together = micro_batches(replace(measured, global_batch=batch_of(measured, workers)), 1)
    return ModelBytes(
        parameters=measured.parameter_bytes,
        gradients=measured.gradient_bytes,
        optimizer=measured.optimizer_bytes,
        buffers=measured.buffer_bytes,
        activations=activations(measured, workers),
        backward=backward_bytes(measured, workers),
        update=measured.update_bytes,
        units=measured.unit_bytes,
        tail=measured.tail_bytes,
        on_cpu=measured.device == "cpu",
        several=len(micro_batches(measured, workers)) > 1,
        blocks=tuple(each.parameter_bytes for each in measured.blocks),
        divisible=0 if measured.cut_layers is None else measured.cut_layers.parameter_bytes,
        together=max(together) / max(micro_batches(measured, workers)),
        passes=len(together),
    )


def uncut(model: ModelBytes, *, workers: int, strategy: int = 0) -> Memory:
    """Where each of `workers` holds the entire model, and its strategy keeps so much in addition.

    Gradients lie in buckets from the beginning on; on a GPU those of earlier micro-batches wait outside of them.
    After the first step the buckets are made again, in the order in which gradients came.
    """
    waiting = model.gradients if model.several and workers > 1 and not model.on_cpu else 0
    anew = model.gradients - model.optimizer if workers > 1 else 0
    computing = model.activations + model.backward
    return Memory(
        parameters=model.parameters,
        gradients=model.gradients,
        optimizer=model.optimizer,
        buffers=model.buffers,
        activations=model.activations,
        strategy=strategy + waiting,
        passing=max(computing, model.update, anew) - model.activations + snapshot(model, workers),
    )


def in_parts(model: ModelBytes, *, shard: int, workers: int, zero: int, gathered: float) -> Memory:
    """Where `shard` of `workers` share a copy of the model, of which each gathers what it computes.

    `gathered`: the share of their bytes that gathered parameters have.
    """
    if shard == 1:
        return uncut(model, workers=workers)
    own = Memory(
        parameters=-(-model.parameters // shard),
        gradients=-(-model.gradients // shard),
        optimizer=-(-model.optimizer // shard),
        buffers=model.buffers,
        activations=model.activations,
        passing=snapshot(model, workers),
    )
    step = _Backward(model, shard=shard, zero=zero, gathered=gathered)
    most = max(*step.sizes(), own.gradients + model.update // shard)
    extra = round(most) - own.gradients - own.activations
    return replace(own, strategy=max(0, extra), apart=max(0, -extra))


def part_of(model: ModelBytes, share: float, *, activations: float, workers: int, at_start: int) -> Memory:
    """Where a worker has a `share` of the parameters, and of what follows from them, and computes with these alone.

    `at_start`: what it holds before the model is cut, in all.
    """
    saved = round(activations)
    computing = saved + round(share * model.backward)
    own = Memory(
        parameters=round(share * model.parameters),
        gradients=round(share * model.gradients),
        optimizer=round(share * model.optimizer),
        buffers=model.buffers,
        activations=saved,
        passing=max(computing, round(share * model.update)) - saved + snapshot(model, workers),
    )
    return replace(own, strategy=max(0, at_start - own.total))


class _Backward:
    """The last backward pass of a step, unit by unit from the last: what there is then besides a worker's parts of
    parameters and of what the optimizer keeps.
    """

    def __init__(self, model: ModelBytes, *, shard: int, zero: int, gathered: float) -> None:
        *blocks, self.rest = model.units
        self.blocks = blocks[::-1]
        self.model, self.shard, self.zero, self.gathered = model, shard, zero, gathered
        self.trains = model.gradients / max(1, model.parameters)
        """The share of the parameters that have gradients."""

    def sizes(self) -> Iterator[float]:
        """At its beginning; before and after each block is computed, and while its gradients are summed; at its end."""
        model = self.model
        gathered = 0 if self.zero == 3 else sum(self.blocks)
        first = self.trains * (self.rest if self._keeps_all else model.tail)
        kept = self._gradients(0) + (first if self._keeps_all else 0.0)
        yield model.activations + model.backward + self.gathered * (self.rest + gathered) + kept
        for done, block in enumerate(self.blocks):
            own = 0.0 if self._keeps_all else self.trains * block
            sent = self.trains * self.blocks[done - 1] if done else 0.0  # of the block before, and still there
            uncut = self._uncut(done, 2)
            yield self._left(done) + first + uncut + self._gradients(done) + sent
            yield self._left(done + 1) + first + uncut + self._gradients(done) + own + sent
            # Gradients are copied into what is sent; then these are gone, and what comes has a place of its own.
            summed = 2 * self.trains * block
            yield self._left(done + 1) + first + self._uncut(done + 1, 1) + self._gradients(done + 1, at=done) + summed
        last = self.trains * self.blocks[-1] if self.blocks else 0.0
        yield self._gradients(len(self.blocks)) + 2 * self.trains * self.rest + last

    def _left(self, done: int) -> float:
        """The activations of the blocks that are yet to come."""
        return self.model.activations * (1 - done / len(self.blocks))

    def _gradients(self, done: int, *, at: int | None = None) -> float:
        """What is kept of gradients when so many blocks are done: their parts, and those that wait in full.

        `at`: the blocks whose parts are there, where that is another number.
        """
        if self.model.several and self.zero > 1:
            return self.model.gradients / self.shard
        waiting = self.trains * sum(self.blocks[done:]) if self._keeps_all else 0.0
        return waiting + self.trains * sum(self.blocks[: done if at is None else at]) / self.shard

    @property
    def _keeps_all(self) -> bool:
        """Whether the gradients of earlier micro-batches wait in full."""
        return self.zero == 1 and self.model.several

    def _uncut(self, done: int, ahead: int) -> float:
        """The gathered parameters, when so many blocks are done: the rest, and of the others so many, or all."""
        left = self.blocks[done : done + ahead] if self.zero == 3 else self.blocks[done:]
        return self.gathered * (self.rest + sum(left))


def snapshot(model: ModelBytes, workers: int) -> int:
    """The copy that a worker writes its share of a snapshot from; of a GPU's state it lies in the host's memory."""
    return -(-model.state // workers) if model.on_cpu else 0
