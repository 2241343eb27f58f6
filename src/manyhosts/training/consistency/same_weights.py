"""Whether all workers hold the same weights, buffers and own values, bit for bit, wherever somebody relies on it.

Compared at the beginning, before each validation and snapshot, and at the end. In the ordinary case that is a checksum
made on the device and one number exchanged; names are looked for where they differ. Every worker comes to the same
sentence, for all see the same numbers. Workers that step alone are compared where their models have been averaged.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manyhosts.communication.batch_norm import GlobalBatch
from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.errors import SnapshotError, TrainingError
from manyhosts.model.trained_module import check_still_frozen
from manyhosts.snapshot.fingerprint import combined, tensor_checksums
from manyhosts.snapshot.flatten import flatten
from manyhosts.snapshot.tensors import dtype_name
from manyhosts.strategies.local_updates import weighted_mean
from manyhosts.training.consistency.same_given import agree
from manyhosts.training.setup.build import Components

_ROUNDING = 1e-4
"""A difference below this part of the largest number may come of processors that round differently."""


def compare_weights(components: Components, moment: str) -> None:
    """See that all workers hold the same weights, buffers and values of the script's own.

    Every worker calls this; `moment` says when, in words.

    Where BatchNorm sees each worker's own samples, its running statistics become their mean over the workers.

    Raises:
        ConfigError: something is trained that no optimizer steps.
        WrongBits: they do not, and with audits it is known who is left out.
        TrainingError: they do not, on all workers alike: with the first tensor that differs, and who holds what.
    """
    world, model = components.world, components.trained
    check_still_frozen(components.frozen)
    if world.size == 1:
        return
    given = {**components.strategy.compared(model), **components.callbacks.tensors()}
    differing, tensors = components.strategy.compare_copies(given, tensor_checksums)
    if differing:
        raise TrainingError(
            f"the workers do not hold the same model: copies of one part of {differing} differ",
            where=moment,
            fix=_remedy(differing, is_buffer=False, is_rounding=False),
        )
    values = {} if components.own_step is None else components.own_step.compared()
    own, own_values = tensor_checksums(tensors), value_checksums(values)
    if agree(world, combined({**own, **own_values})):
        return
    different = difference_of_values(world, values, own_values, moment)
    if different := different or difference_of_kinds(world, tensors, moment):  # before anything of these is exchanged
        raise different
    if statistics := own_statistics(components):
        weighted_mean([each for each in statistics if each.is_floating_point()], 1 / world.size, world)
        for each in statistics:
            if not each.is_floating_point():
                world.broadcast(each)  # a worker without samples in a step has counted one less
        own = tensor_checksums(tensors)
        if agree(world, combined(own)):
            return
    if components.auditor is not None and components.auditor.agreed:
        components.auditor.name_odd(combined(own))
    raise _difference(world, tensors, own, moment, buffers={name for name, _ in model.named_buffers()})


def own_statistics(components: Components) -> list[Tensor]:
    """What BatchNorm layers have seen, where each has its own batch. Local steps average it with the model."""
    alike = isinstance(components.batch_norm, GlobalBatch) or components.strategy.statistics is not None
    return [] if alike else components.strategy.own_statistics(components.trained)


def difference_of_kinds(world: World, tensors: Mapping[str, Tensor], moment: str) -> TrainingError | None:
    """What is to be raised where a tensor is there, or of a dtype or shape, on some workers alone. All call this."""
    own = {name: f"{dtype_name(each.dtype)} of shape {tuple(each.shape)}" for name, each in tensors.items()}
    reported: list[dict[str, str]] = gather_plain(world, own)
    for name in dict.fromkeys(name for row in reported for name in row):
        kinds = [row.get(name, "nothing") for row in reported]
        of_each = {kind: _ranks([rank for rank, each in enumerate(kinds) if each == kind]) for kind in kinds}
        if len(of_each) > 1:
            said = ", ".join(f"{kind} on {ranks}" for kind, ranks in of_each.items())
            return TrainingError(
                f"the workers do not hold the same model: {name} is {said}",
                where=moment,
                fix="look for code that adds, removes or changes parameters or buffers by RANK",
            )
    return None


def _difference(
    world: World, tensors: Mapping[str, Tensor], own: Mapping[str, str], moment: str, *, buffers: set[str]
) -> TrainingError:
    reported: list[dict[str, str]] = gather_plain(world, own)
    differing = [name for name in tensors if len({found[name] for found in reported}) > 1]
    name = differing[0]
    sums = [found[name] for found in reported]
    holders = ([rank for rank, each in enumerate(sums) if each == value] for value in set(sums))
    groups = sorted(holders, key=lambda ranks: (-len(ranks), ranks))
    amount, part = _amount(world, tensors[name])
    count = f"; {len(differing)} of {len(tensors)} tensors differ" if len(differing) > 1 else ""
    return TrainingError(
        f"the workers do not hold the same model: {_who(groups)} of {name}{amount}{count}",
        where=moment,
        fix=_remedy(name, is_buffer=name in buffers, is_rounding=part < _ROUNDING),
    )


def _who(groups: Sequence[Sequence[int]]) -> str:
    """`ranks 0 and 2 hold one value, rank 1 another`."""
    most, first = 4, f"{_ranks(groups[0])} {'hold' if len(groups[0]) > 1 else 'holds'} one value"
    said = [first, *(f"{_ranks(ranks)} another" for ranks in groups[1:most])]
    return ", ".join(said) + (", …" if len(groups) > most else "")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _amount(world: World, tensor: Tensor) -> tuple[str, float]:
    """By how much a tensor differs from rank 0's on any worker, in words and as a part of its largest number."""
    if not tensor.is_floating_point():
        return "", 1.0
    own = tensor.detach().double().contiguous()
    first = world.broadcast(own.clone())
    found = torch.stack([(own - first).abs().max(), first.abs().max()]) if own.numel() else own.new_zeros(2)
    away, largest = world.stack(found).nan_to_num(nan=float("inf")).amax(0).tolist()
    return f" (by up to {away:.2g})", away / largest if largest else 1.0


def _remedy(name: str, *, is_buffer: bool, is_rounding: bool) -> str:
    if is_buffer:
        return (
            f"the forward pass changes {name}, on each worker by its own samples: sum over the workers what it "
            'is computed from, with weight="samples", or register it with persistent=False'
        )
    if is_rounding:
        return (
            "it is no more than rounding: hosts with processors of another make may do that (docs/bits.md), or random "
            "numbers that are not drawn from torch, numpy.random or random"
        )
    return (
        "look for code that acts by RANK and changes weights (a hook, a callback), for random numbers of a generator "
        "of its own in the optimizer, or a host with bad memory; start again to continue from the last snapshot"
    )


_MOST = 40
"""Letters of a value in a message."""


def value_checksums(values: Mapping[str, Any]) -> dict[str, str]:
    """Name → a checksum of a nested value. One that no snapshot could keep is known by its kind alone."""
    return {name: _checksum(value) for name, value in values.items()}


def _checksum(value: Any) -> str:
    try:
        flat = flatten(value)
    except SnapshotError:
        return type(value).__name__
    sums = tensor_checksums(flat.tensors)
    return f"{zlib.crc32(json.dumps(flat.nodes).encode()):08x} {' '.join(sums[name] for name in sorted(sums))}"


def difference_of_values(
    world: World, values: Mapping[str, Any], own: Mapping[str, str], moment: str
) -> TrainingError | None:
    """What is to be raised where a value differs between workers; None where all are equal. All workers call this.

    `own`: its `value_checksums`.
    """
    reported: list[dict[str, list[str]]] = gather_plain(
        world, {name: [own[name], _in_words(value)] for name, value in values.items()}
    )
    for name in dict.fromkeys(name for row in reported for name in row):
        found = [row.get(name, ["", "nothing"]) for row in reported]
        if len({checksum for checksum, _ in found}) > 1:
            return TrainingError(
                f"{name} differs: {_by_rank([words for _, words in found])}",
                where=moment,
                fix="change it by what is equal on all workers: what run.backward and run.update return, "
                "run.steps_done; what belongs to a part of the batch is kept by run.part.keep",
            )
    return None


def _by_rank(words: Sequence[str]) -> str:
    """`it is 3 on rank 0, 4 on rank 1`; without values where these look alike."""
    if len(set(words)) == 1:
        return f"it is {words[0]} on each rank, and not the same one"
    return "it is " + ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(words[:4]))


def _in_words(value: Any) -> str:
    if hasattr(value, "shape"):
        shape = tuple(value.shape)
        return f"{value.item()!r}" if shape == () else f"a {type(value).__name__} of shape {shape}"
    text = repr(value)
    return text if len(text) <= _MOST else f"a {type(value).__name__}"
