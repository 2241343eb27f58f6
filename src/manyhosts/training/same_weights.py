"""Whether all workers hold the same model: its description before it is placed, its bits wherever that is relied on.

Compared at the beginning, before each validation and snapshot, and at the end. In the ordinary case that is a checksum
made on the device and one number exchanged; names are looked for where they differ. Every worker comes to the same
sentence, for all see the same numbers. Workers that step alone are compared where their models have been averaged.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.communication.gathering import gather_words
from manyhosts.communication.world import World
from manyhosts.errors import ConfigError, TrainingError
from manyhosts.snapshot.fingerprint import combined, tensor_checksums
from manyhosts.snapshot.tensors import dtype_name
from manyhosts.strategies.alone import Drifting, weighted_mean
from manyhosts.strategies.strategy import Strategy

_ROUNDING = 1e-4
"""A difference below this part of the largest number may come of processors that round differently."""


def compare_descriptions(world: World, own: Mapping[str, Mapping[str, str]]) -> None:
    """See that all workers were given the same: kind of thing → name → what it is, in order. Every worker calls this.

    Raises:
        ConfigError: they were not, on all workers alike; the first difference is named.
    """
    text = json.dumps({kind: list(entries.items()) for kind, entries in own.items()})
    if _agree(world, _number(text)):
        return
    told = [json.loads(word) for word in gather_words(world, text)]
    for kind, first in told[0].items():
        for rank, other in enumerate(told):
            if other[kind] != first:
                raise ConfigError(
                    f"the workers' {kind} differ: {_first_difference(first, other[kind], rank)}",
                    where=f"mh.Trainer(…), rank 0 and rank {rank}",
                    fix="make the same on every worker: nothing that the script gives its Trainer may depend on RANK",
                )


def _first_difference(first: list[list[str]], other: list[list[str]], rank: int) -> str:
    ours, theirs = ({name: what for name, what in entries} for entries in (first, other))
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            return f"{name} is {_or_none(ours.get(name))} on rank 0 and {_or_none(theirs.get(name))} on rank {rank}"
    return f"they come in another order on rank {rank} than on rank 0"


def _or_none(what: str | None) -> str:
    return "not there" if what is None else what


def described(model: nn.Module) -> dict[str, str]:
    """Every parameter and buffer of `model` in words, in the order in which they are exchanged."""
    found = {name: _words(each) + ("" if each.requires_grad else ", frozen") for name, each in model.named_parameters()}
    return found | {name: f"a buffer of {_words(each)}" for name, each in model.named_buffers()}


def _words(tensor: Tensor) -> str:
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        return "not initialised"
    return f"{dtype_name(tensor.dtype)} ({', '.join(map(str, tensor.shape))})"


def compare_weights(model: nn.Module, strategy: Strategy, world: World, moment: str) -> None:
    """See that all workers hold the same weights and buffers. Every worker calls this; `moment` says when, in words.

    Where BatchNorm sees each worker's own samples, its running statistics become their mean over the workers.

    Raises:
        TrainingError: they do not, on all workers alike: with the first tensor that differs, and who holds what.
    """
    if world.size == 1:
        return
    tensors = _compared(model, strategy)
    own = tensor_checksums(tensors)
    if _agree(world, combined(own)):
        return
    statistics = _own_statistics(model, strategy)
    if statistics:
        weighted_mean([each for each in statistics if each.is_floating_point()], 1 / world.size, world)
        for each in statistics:
            if not each.is_floating_point():
                world.broadcast(each)  # a worker without samples in a step has counted one less
        own = tensor_checksums(tensors)
        if _agree(world, combined(own)):
            return
    raise _difference(world, tensors, own, moment, buffers={name for name, _ in model.named_buffers()})


def _compared(model: nn.Module, strategy: Strategy) -> dict[str, Tensor]:
    """What must have equal bits. Workers that step alone count their own batches: whole numbers are not averaged."""
    held = {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}
    if isinstance(strategy, Drifting):
        return {name: each for name, each in held.items() if each.is_floating_point() or each.is_complex()}
    return held


def _own_statistics(model: nn.Module, strategy: Strategy) -> list[Tensor]:
    """What BatchNorm layers of PyTorch's own have seen. With local steps it is averaged with the model."""
    if isinstance(strategy, Drifting):
        return []
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [each for layer in model.modules() if type(layer) in kinds for each in layer.buffers(recurse=False)]


def _difference(
    world: World, tensors: Mapping[str, Tensor], own: Mapping[str, str], moment: str, *, buffers: set[str]
) -> TrainingError:
    told: list[dict[str, str]] = [json.loads(word) for word in gather_words(world, json.dumps(own))]
    differing = [name for name in tensors if len({found.get(name, "") for found in told}) > 1]
    if not differing:
        return TrainingError("the workers hold tensors of different names", where=moment)
    name = differing[0]
    holders: dict[str, list[int]] = {}
    for rank, found in enumerate(told):
        holders.setdefault(found.get(name, ""), []).append(rank)
    groups = sorted(holders.values(), key=lambda ranks: (-len(ranks), ranks))
    amount, part = _amount(world, tensors[name])
    count = f"; {len(differing)} of {len(tensors)} tensors differ" if len(differing) > 1 else ""
    return TrainingError(
        f"the workers do not hold the same model: {_who(groups)} of {name}{amount}{count}",
        where=moment,
        fix=_remedy(name, is_buffer=name in buffers, is_rounding=part < _ROUNDING),
    )


def _who(groups: Sequence[Sequence[int]]) -> str:
    """`ranks 0 and 2 hold one value, rank 1 another`."""
    most = 4
    said = [f"{_ranks(ranks)} {'hold' if len(ranks) > 1 else 'holds'} one value" for ranks in groups[:1]]
    said += [f"{_ranks(ranks)} another" for ranks in groups[1:most]]
    return ", ".join(said) + (", …" if len(groups) > most else "")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _amount(world: World, tensor: Tensor) -> tuple[str, float]:
    """By how much a tensor differs from the leader's on any worker, in words and as a part of its largest number."""
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
            f"the forward pass changes {name}, on each worker by its own samples: exchange what it is computed from, "
            "or register it with persistent=False"
        )
    if is_rounding:
        return (
            "it is no more than rounding: hosts with processors of another make may do that (docs/bits.md), or random "
            "numbers that are not drawn from torch, numpy.random or random"
        )
    return (
        "look for code that acts by RANK and changes weights (a hook, a callback), for random numbers of a generator "
        "of its own in the optimizer, or a host with bad memory; start again to go on from the last snapshot"
    )


def _agree(world: World, number: int) -> bool:
    """Whether all workers have the same number, which has 63 bits."""
    if world.size == 1:
        return True
    found = world.stack(torch.tensor([number], dtype=torch.int64, device=world.device)).flatten().tolist()
    return all(each == found[0] for each in found)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def settings_compared(settings: Any) -> dict[str, str]:
    """The settings that decide what is trained, in words."""
    # An object without words of its own is named by where it lies in memory, which is another place on every worker.
    return {name: re.sub(r" at 0x[0-9a-f]+", "", repr(getattr(settings, name))) for name in _SETTINGS}


def optimizer_described(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The options of every parameter group, in words; which kernels it uses may differ from host to host."""
    found = {"kind": type(optimizer).__qualname__}
    for number, group in enumerate(optimizer.param_groups):
        options = {name: each for name, each in sorted(group.items()) if name not in ("params", *_KERNELS)}
        found[f"group {number}"] = f"{len(group['params'])} parameters with {options}"
    return found


_KERNELS = ("foreach", "fused", "capturable")
_SETTINGS = (
    "batch_size",
    "batch_size_per_worker",
    "micro_batch_size",
    "drop_last",
    "shuffle",
    "lr_scaling",
    "warmup",
    "strategy",
    "precision",
    "clip_gradients",
    "batch_norm",
    "validate_every",
    "early_stopping",
    "seed",
    "virtual_workers",
    "on_bad_step",
    "lr",
)
