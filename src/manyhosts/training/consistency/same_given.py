"""Whether all workers were given the same model, data, settings and optimizer: compared before the first exchange."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from manyhosts.communication.collectives import Collectives
from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.data.identity import KEEPS_DRAWS, are_alike, print_of_set, without_text
from manyhosts.errors import ConfigError
from manyhosts.model.held_values import checksums
from manyhosts.model.optimizer_kernels import KERNELS
from manyhosts.refusals import line_of_script
from manyhosts.snapshot.fingerprint import combined
from manyhosts.snapshot.tensors import dtype_name


def compare_descriptions(world: World, own: Mapping[str, Mapping[str, str]]) -> None:
    """See that all workers were given the same: kind of thing → name → what it is, in order. Every worker calls this.

    Raises:
        ConfigError: they were not, on all workers alike; the first difference is named.
    """
    plain = {kind: list(entries.items()) for kind, entries in own.items()}
    if agree(world, _number(json.dumps(plain))):
        return
    reported = gather_plain(world, plain)
    for kind, first in reported[0].items():
        for rank, other in enumerate(reported):
            if other[kind] != first:
                raise ConfigError(
                    f"the workers' {kind} differ: {_first_difference(first, other[kind], rank)}",
                    where=f"mh.Trainer(…), rank 0 and rank {rank}",
                    fix="make the same on every worker: nothing that the script gives its Trainer may depend on RANK, "
                    "or be drawn without torch.manual_seed(0) before it",
                )


_OUTSIDE = (
    "call fit, validate, test, predict and save on every worker, outside of `if rank == 0` and is_main: a file "
    "is written once, and mh.print prints once"
)


def compare_calls(world: World, call: str, fix: str = _OUTSIDE) -> None:
    """See that all workers make the same call, such as `test`: exchanges of two would be paired. Every worker calls
    this first.

    Raises:
        ConfigError: they do not, on all workers alike.
    """
    if agree(world, _number(call)):
        return
    reported = gather_plain(world, [call, line_of_script()])
    rank, other = next((rank, each) for rank, each in enumerate(reported) if each[0] != reported[0][0])
    (first, place), (second, there) = reported[0], other
    raise ConfigError(
        f"the workers make different calls: rank 0 is in {first} at {place}, and rank {rank} in {second} at {there}",
        where="mh.Trainer or mh.Run",
        fix=fix,
    )


def compare_run_dirs(world: World, own: str, *, disk: int) -> None:
    """See that workers that share a disk were given the same run directory. Every worker calls this.

    `own`: the script's word for it, empty where it has none; `disk`: a number of the disk that this worker writes to.

    Raises:
        ConfigError: they were not, on all workers alike.
    """
    if agree(world, _number(own)):
        return
    firsts: dict[int, tuple[int, str]] = {}
    for rank, (number, word) in enumerate(gather_plain(world, [disk, own])):
        first, other = firsts.setdefault(number, (rank, word))
        if word != other:
            raise ConfigError(
                f"the workers are given different run directories: rank {first} {_directory(other)}, "
                f"rank {rank} {_directory(word)}",
                where="mh.Trainer(run_dir=…)",
                fix="give every worker the same name, in which neither the time nor RANK is; or leave run_dir out: "
                "rank 0 makes one then, with the time in its name, for all",
            )


def _directory(word: str) -> str:
    return repr(word) if word else "none"


_WHERE = {"prediction": "trainer.predict(dataset)"}


def compare_data(world: World, sets: Mapping[str, Dataset[Any]]) -> None:
    """See that all workers hold the same samples, as far as it shows without reading any. Every worker calls this.

    Raises:
        ConfigError: they do not, on all workers alike.
    """
    if world.size == 1:
        return
    reported = gather_plain(world, {name: print_of_set(each) for name, each in sets.items()})
    for name, first in reported[0].items():
        for rank, other in enumerate(reported):
            if not are_alike(first, other[name]):
                raise ConfigError(
                    f"the {name} set holds other samples on rank {rank} than on rank 0: every worker has made its own",
                    where=f"{_WHERE.get(name, f'mh.Data({name}=…)')}, rank 0 and rank {rank}",
                    fix="draw alike on every worker: random_split(dataset, lengths, torch.Generator().manual_seed(0)), "
                    "or torch.manual_seed(0) before the data is made, for scikit-learn and NumPy random_state=0 and "
                    "np.random.seed(0); what depends on RANK must not be in it",
                )


def compare_samples(world: World, own: Mapping[str, Any]) -> None:
    """See that the samples that each worker has looked at are the same. Every worker calls this.

    `own`: what a `DataIdentity` gives; where it has no sample, none is compared. Text is left out: it may name a file,
    which may have another place on each host.

    Raises:
        ConfigError: they are not, on all workers alike.
    """
    found = gather_plain(world, dict(own))
    if any(each.get("unknown") == KEEPS_DRAWS for each in found):
        raise ConfigError(
            f"of the training set {KEEPS_DRAWS}: which ones these are depends on the worker and the epoch that first "
            "reads it",
            where="mh.Data(train=…)",
            fix="keep what is read, and draw after that in each __getitem__; or draw nothing",
        )
    reported = [each.get("samples", {}) for each in found]
    for rank, other in enumerate(reported):
        for index in sorted(reported[0].keys() & other.keys(), key=int):
            if not are_alike(without_text(reported[0][index]), without_text(other[index])):
                raise ConfigError(
                    f"sample {index} of the training set is another one on rank {rank} than on rank 0",
                    where=f"mh.Data(train=…), rank 0 and rank {rank}",
                    fix="have every worker read the same files, and draw by the same seed: nothing in the data may "
                    "depend on the process, the time or RANK",
                )


def compare_length(world: World, before: int, now: int) -> None:
    """See that the training set is as long `now` as it was when its order was made. Every worker calls this.

    Raises:
        ConfigError: it is not, on all workers alike.
    """
    reported = [now] if world.size == 1 else [int(each) for each in gather_plain(world, now)]
    if other := [each for each in reported if each != before]:
        raise ConfigError(
            f"the training set has {other[0]} samples, and had {before} when the trainer was made: no other is read",
            where="trainer.fit",
            fix="make another trainer for a training set that has grown, in a run directory of its own, with the "
            "weights of this one: mh.Trainer(init_from=…)",
        )


def _first_difference(first: list[list[str]], other: list[list[str]], rank: int) -> str:
    ours, theirs = ({name: what for name, what in entries} for entries in (first, other))
    for name in [*ours, *theirs]:
        here, there = (each.get(name, "not there") for each in (ours, theirs))
        if here != there:
            return f"{name} is {here} on rank 0 and {there} on rank {rank}"
    return f"they come in another order on rank {rank} than on rank 0"


def described(model: nn.Module) -> dict[str, str]:
    """Every parameter and buffer of `model` in words, in the order in which they are exchanged."""
    found = {name: _words(each) + ("" if each.requires_grad else ", frozen") for name, each in model.named_parameters()}
    return found | {name: f"a buffer of {_words(each)}" for name, each in model.named_buffers()}


def _words(tensor: Tensor) -> str:
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        return "not initialised"
    return f"{dtype_name(tensor.dtype)} ({', '.join(map(str, tensor.shape))})"


def agree(world: Collectives, number: int) -> bool:
    """Whether all workers have the same number, which has 63 bits."""
    if world.size == 1:
        return True
    found = world.stack(torch.tensor([number], dtype=torch.int64, device=world.device)).flatten().tolist()
    return all(each == found[0] for each in found)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def settings_compared(settings: Any) -> dict[str, str]:
    """The settings that decide what is trained, in words."""
    return {name: _in_words(getattr(settings, name)) for name in _SETTINGS}


def _in_words(value: Any) -> str:
    # An object without words of its own is named by where it lies in memory, which is another place on every worker.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def optimizer_described(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The options of every parameter group, in words; which kernels it uses may differ from host to host."""
    found = {"kind": type(optimizer).__qualname__}
    for number, group in enumerate(optimizer.param_groups):
        options = {name: each for name, each in sorted(group.items()) if name not in ("params", *KERNELS)}
        found[f"group {number}"] = f"{len(group['params'])} parameters with {_in_words(options)}"
    return found


def others_described(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Modules that a run was not given, by the names that its step has for them: what they are and hold."""
    return {
        name: f"a {type(each).__name__} with the checksum {combined(checksums(each)):x}"
        for name, each in modules.items()
    }


_SETTINGS = (
    "batch_size",
    "batch_size_per_worker",
    "micro_batch_size",
    "drop_last",
    "shuffle",
    "lr_scaling",
    "warmup",
    "strategy",
    "mesh",
    "precision",
    "clip_gradients",
    "batch_norm",
    "activation_checkpointing",
    "validate_every",
    "early_stopping",
    "best",
    "seed",
    "virtual_workers",
    "balance",
    "on_bad_step",
    "lr",
)
