"""The strategy that the settings ask for; for `strategy="auto"` the simplest that fits into every worker's memory.

Where a training would not fit otherwise, memory that is given back goes to the machine at once. The C library of Linux
keeps pieces of up to 32 MB for later, and in a training that gathers and frees parameters in every step they fit
nothing else: with 344 MB of tensors such a worker had up to 142 MB of them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from manyhosts import device
from manyhosts.communication.world import World
from manyhosts.config.settings import Settings
from manyhosts.config.strategies import DDP, Auto, many_updates
from manyhosts.config.strategies import Strategy as Asked
from manyhosts.config.strategy_settings import own_or
from manyhosts.control.agent import host_state
from manyhosts.data.data import Data, reads_in_shards
from manyhosts.data.fetch import Fetcher
from manyhosts.errors import ConfigError
from manyhosts.loss.compute import IN_PAIRS, ForwardPass, pair
from manyhosts.model.activation_checkpointing import chosen_blocks
from manyhosts.model.model_checks import Refusal, refuse
from manyhosts.model.parameter_groups import MakeOptimizer, parameters_of
from manyhosts.model.sizing import PassBytes, Unknown, UpdateBytes, optimizer_bytes, pass_bytes
from manyhosts.model.trained_module import model_of
from manyhosts.strategies.audit import Auditor
from manyhosts.strategies.blocks import repeated_blocks
from manyhosts.strategies.pipeline.chain import block_bytes
from manyhosts.strategies.strategy import Sample, Strategy
from manyhosts.strategies.table import STRATEGIES
from manyhosts.strategies.tensor.plan import is_cuttable
from manyhosts.strategies.uncut_model import SingleProcess
from manyhosts.strategies.units import tail_bytes, unit_bytes
from manyhosts.strategies.virtual import VirtualWorkers
from manyhosts.units import bytes_in_words

if TYPE_CHECKING:
    from manyhosts.planner.fit import Training


def make_strategy(settings: Settings, world: World, auditor: Auditor | None = None) -> Strategy:
    """The strategy that `settings` names.

    Raises:
        ConfigError: it cannot work with this many workers, or with other settings.
    """
    asked = settings.strategy
    if world.is_shared:
        asked.check_shared(settings, world.size)
    if settings.virtual_workers is not None:
        return virtual_workers(settings.virtual_workers, asked, world, auditor)
    alone = world.size == 1 and world.part is None
    if not many_updates(asked) and (
        not world.is_shared
        or (alone and not STRATEGIES.load(asked.name).traits.holds_full_model)  # others come with a new start of all
    ):
        return SingleProcess(world)
    return STRATEGIES.load(asked.name)(asked, world)


def virtual_workers(parts: int, strategy: Asked, world: World, auditor: Auditor | None) -> VirtualWorkers:
    """Virtual workers, with the buckets of the strategy that was asked for.

    Raises:
        ConfigError: there are more workers than parts, or gradients are to be compressed.
    """
    ddp = own_or(DDP(), strategy)
    if ddp.compression != "none":
        raise ConfigError(
            f"compression is {ddp.compression!r}, but virtual workers add every bit of the gradients",
            where="virtual_workers",
            fix="leave compression or virtual_workers out",
        )
    return VirtualWorkers(parts, world, bucket_mb=ddp.bucket_mb, auditor=auditor)


_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
"""In the words of glibc's malloc.h: from how many bytes on a piece of memory is given back at once; and from how many
places threads take theirs. Otherwise each reserves 64 MB of addresses when it begins, of which it uses little: that is
for processes whose addresses are counted (`ulimit -v`)."""


def _set_allocator(option: int, value: int) -> None:
    """Have the C library do so from now on; nothing where it has no such choice."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(option, value)


_MOST = float(1 << 52)
"""Bytes, where no one says how many there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What a training takes its memory for."""

    settings: Settings
    made: nn.Module
    """The model, with a loss that has a state, before any strategy has placed it."""
    data: Data
    compute: ForwardPass
    optimizer: MakeOptimizer
    world: World


def choose(given: Given) -> tuple[Settings, Training | None]:
    """Find what `auto` means. All workers call it together.

    Returns the settings with it, and what it was chosen for: the largest sizes of all workers; None where they name a
    strategy.

    Raises:
        ConfigError: the training fits in no way.
    """
    settings, world = given.settings, given.world
    if not isinstance(settings.strategy, Auto):
        return settings, None
    from manyhosts.planner import fit  # here, for most trainings start without predicting memory

    if host_state.counts_addresses():
        _set_allocator(_ARENA_MAX, 1)
    training, notes = _sizes(given)
    # All have found theirs: no one takes memory while the others look what is left.
    own = torch.tensor([_memory_left(world, given.made)], dtype=torch.float64, device=world.device)
    lefts = world.stack(own).flatten().tolist()
    left, rank = int(min(lefts)), lefts.index(min(lefts))
    found = fit.ways(training, world.size)
    chosen = fit.simplest(found, left)
    if chosen is None and world.is_joining:  # counted as if it computed all of the batch, of which it will have a share
        chosen = min(found, key=lambda each: each.needed)
    if chosen is None:
        would_do = fit.workers_that_would_do(training, world.size, left)
        raise fit.none_fits(found, left, rank=rank, would_do=would_do, now=world.size)
    if chosen is not found[0] and chosen.on_cpu:
        _set_allocator(_MMAP_THRESHOLD, 1 << 20)
    room = f"{bytes_in_words(left)}, what rank {rank} can have" if left < _MOST else "no one says how much that is"
    words = f"strategy='auto' is {chosen.name}: the first of these that fits into the memory of each worker ({room})"
    if not world.is_joining:
        world.notes += ["\n  ".join([words, *fit.table((each.name, each.memory) for each in found)]), *notes]
    again = "blocks" if chosen.checkpoints else settings.activation_checkpointing
    return replace(settings, strategy=chosen.strategy, activation_checkpointing=again), training


def _passes(given: Given) -> PassBytes:
    compute, asked = given.compute, given.settings.activation_checkpointing

    def values(module: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        with compute.context():
            return compute.values(module, batch)

    def again(module: nn.Module) -> list[nn.Module]:
        return [block for _, block in repeated_blocks(model_of(module))]

    def chosen(module: nn.Module) -> list[nn.Module]:
        return [block for _, block in chosen_blocks(model_of(module), asked)[0]]

    batch = largest_batch(given.data, given.settings, given.world.size)
    return pass_bytes(given.made, values, batch, given.world.device, again=again, chosen=chosen)


def largest_batch(data: Data, settings: Settings, workers: int) -> Any:
    """One of as many samples as a forward pass has at most, where so many workers take the same share.

    Raises:
        Unknown: it cannot be had yet.
    """
    if data.train is None or isinstance(data.train, IterableDataset) or not isinstance(data.train, Sized):
        raise Unknown("the training set is a stream, of which no batch is known before it is read")
    parts = settings.virtual_workers or workers
    own = settings.batch_size_per_worker or math.ceil((settings.batch_size or 1) / parts)
    indices = np.arange(min(own, settings.micro_batch_size or own, len(data.train)), dtype=np.int64)
    return Fetcher(data.train, seed=settings.seed, name="train", collate=data.collate)(0, indices)


def _sizes(given: Given) -> tuple[Training, list[str]]:
    """The largest sizes of all workers, and what to say of those that could not be found. All call it together."""
    from manyhosts.planner.fit import Training
    from manyhosts.planner.memory import ModelBytes

    world, settings, model = given.world, given.settings, model_of(given.made)
    passes, notes = PassBytes(activations=-1, backward=-1, checkpointed=None), list[str]()
    try:
        own = optimizer_bytes(given.optimizer, parameters_of(given.made))
    except Unknown as reason:
        own = UpdateBytes(kept=2 * _bytes(given.made, trained=True), passing=0)
        notes.append(f"what the optimizer keeps could not be found ({reason}): two numbers for each parameter, as Adam")
    try:
        passes = _passes(given)
    except Unknown as reason:
        notes.append(
            f"strategy='auto' has counted no activations, for they could not be found ({reason}): leave some memory "
            "free, or name a strategy"
        )
    again = -1 if passes.checkpointed is None else passes.checkpointed
    mine = [own.kept, own.passing, passes.activations, passes.backward, again]
    reported = world.stack(torch.tensor(mine, dtype=torch.float64, device=world.device))
    kept, update, plain, backward, less = (int(each) for each in reported.max(0).values.tolist())
    known = [bool(each >= 0) for each in reported.min(0).values.tolist()]
    total = _bytes(given.made)
    training = Training(
        model=ModelBytes(
            parameters=total,
            gradients=_bytes(given.made, trained=True),
            optimizer=kept,
            buffers=sum(each.nbytes for each in given.made.buffers()),
            activations=plain if known[2] else 0,
            backward=backward if known[2] else 0,
            update=update,
            units=unit_bytes(model, total=total),
            tail=tail_bytes(model),
            on_cpu=world.device.type == "cpu",
            several=settings.micro_batch_size is not None,
            **_of_same_samples(given, model),
        ),
        checkpointed=less if known[2] and known[4] else None,
        is_shared=world.is_shared,
        joins=world.is_joining,
        virtual_workers=settings.virtual_workers,
    )
    return training, notes


def _of_same_samples(given: Given, model: nn.Module) -> dict[str, Any]:
    """What `ModelBytes` knows for strategies whose workers compute the same samples; nothing where none could."""
    settings, data = given.settings, given.data
    refused = any(each[0] for each in _refusals(given.compute, data, settings)) or given.world.device.type != "cpu"
    if refused or data.train is None or isinstance(data.train, IterableDataset):
        return {}
    full = settings.batch_size or given.world.size * (settings.batch_size_per_worker or 1)
    own = -(-full // given.world.size)
    most = settings.micro_batch_size or full
    try:
        blocks = block_bytes(model) if settings.precision != "fp16" else ()
    except ConfigError:
        blocks = ()
    layers = {parameter for each in model.modules() if is_cuttable(each) for parameter in each.parameters()}
    return {
        "blocks": blocks,
        "divisible": sum(each.nbytes for each in layers),
        "together": min(full, most) / min(own, most),
        "passes": -(-full // most),
    }


def _bytes(made: nn.Module, *, trained: bool = False) -> int:
    return sum(each.nbytes for each in made.parameters() if each.requires_grad or not trained)


def _memory_left(world: World, made: nn.Module) -> int:
    """Bytes that this worker can have for the training, with those that the model takes already."""
    where = world.device
    already = sum(each.nbytes for each in {*made.parameters(), *made.buffers()} if each.device.type == where.type)
    if device.is_asynchronous(where):
        return already + device.memory_left(where)
    left = host_state.memory_left(share=world.place.local_size)
    return already + left if left is not None else int(_MOST)


def _refusals(compute: ForwardPass, data: Data, settings: Settings) -> list[Refusal]:
    """What does not go with workers that compute the same samples."""
    with_it = f"with strategy {settings.strategy.name!r}"
    return [
        (
            compute.step is not None,
            f"step= computes model and loss in one, and {with_it} several workers compute the model",
            "mh.Trainer(step=…)",
            "give loss=function(outputs, targets) -> loss in place of it, and batches that are (inputs, targets)",
        ),
        *(
            (
                bool(getattr(settings, key)),
                f"{key} is asked for, and {with_it} it has not been tried",
                key,
                "leave it out, or choose another strategy",
            )
            for key in ("compile", "activation_checkpointing")
        ),
        (
            settings.balance == "speed",
            f"{with_it} several workers compute the same samples, and none of them can take fewer",
            "balance",
            "leave balance out, or choose another strategy",
        ),
        (
            reads_in_shards(data.train),
            f"the train stream offers shard(), and {with_it} every worker reads the same samples",
            "mh.Data(train=…)",
            "give a stream without shard(), a map-style dataset, or choose another strategy",
        ),
    ]


def look_ahead(compute: ForwardPass, data: Data, settings: Settings) -> Sample | None:
    """What the model will be called with, where that can be known, for a strategy that places it by that.

    Raises:
        ConfigError: the script computes model and loss in one, or asks for what stages cannot do.
    """
    refuse(_refusals(compute, data, settings))
    try:
        batch = largest_batch(data, settings, 1)
    except Unknown:
        return None
    return Sample(lambda: pair(batch, IN_PAIRS)[0], compute.context, settings.precision)
