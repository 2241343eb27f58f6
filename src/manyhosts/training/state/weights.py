"""Weights to begin with, from a run, a snapshot, files or a state_dict; and those of the best validation, for a while.

Each worker reads what it holds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

from manyhosts.communication.layout import write
from manyhosts.config.init_from import InitFrom, matches
from manyhosts.errors import ConfigError, ManyhostsError, first_line
from manyhosts.model.frozen_base import KEY
from manyhosts.records.manifest import NAME
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.tensor_parts import Box
from manyhosts.snapshot.load import load as load_snapshot
from manyhosts.snapshot.slices import StoredTensor
from manyhosts.snapshot.weights import is_state_dict, load, of_model
from manyhosts.table import nearest
from manyhosts.training.fit import Fit
from manyhosts.training.setup.build import Components, ModelOrMaker
from manyhosts.training.state.registry import copied, put_weights, state_of, weights_of

_FIX = (
    "give a snapshot folder, a run directory with a best/ or snapshots/, a .safetensors file, a folder with some, "
    "a .pt of a state_dict, or a state_dict"
)
_INDEX = "model.safetensors.index.json"
_MOST_NAMED = 8


@dataclass(frozen=True, eq=False, slots=True)
class _Readable:
    """A tensor in memory, or in a safetensors file: of a block of that no more is read."""

    shape: tuple[int, ...]
    source: Any
    """What gives a block by its slices; of a tensor without dimensions a file gives none."""
    whole: Callable[[], Tensor]

    def full(self) -> Tensor:
        return self.whole()

    def block(self, box: Box) -> Tensor:
        part: Tensor = self.source[box.within(Box.full(self.shape))] if box.shape else self.full()
        return part


Stored = StoredTensor | _Readable
"""A tensor that is there, and perhaps not in memory yet."""


def load_initial(components: Components, init: InitFrom) -> None:
    """Put the weights that `init` names into the model of `components`. Nothing is unpickled but tensors.

    Raises:
        ConfigError: there are none, they cannot be read, or they are of another model than `init` allows.
    """
    read = _read(init)
    for new, times in Counter(map(init.renamed, read)).items():
        if times > 1:
            old = [name for name in read if init.renamed(name) == new]
            raise ConfigError(
                f"rename makes {new} of both {old[0]} and {old[1]}",
                where=init.where,
                fix="let one of them have another name, and leave it out: "
                f'rename={{"{old[1]}": "unused.{old[1]}", …}}, extra=["unused.*"]',
            )
    found = {init.renamed(name): each for name, each in read.items()}
    own = {name: tensor for name, tensor in components.model.state_dict().items() if isinstance(tensor, Tensor)}
    ties = _ties(components.model)
    taken = _agreed(init, found, {name: tuple(tensor.shape) for name, tensor in own.items()}, ties)
    _see_that_ties_agree(init, found, ties)
    with torch.no_grad():
        for name in filter(taken.__contains__, own):  # in the model's order
            block = components.strategy.holding.block(own[name])
            if block.local.numel():
                write(block.local, found[name].block(block.box))
    note = f"{init.where}: {len(taken)} of the model's {len(own)} tensors are from there"
    if len(taken) < len(own) or len(taken) < len(found):
        note += f"; as made: {_named(own.keys() - taken)}; left out: {_named(found.keys() - taken)}"
    if fits := [name for name in taken if matches(name, init.missing)]:
        note += f"; {_named(fits)}, which missing= names, too: it is there and fits (rename it, to have it as made)"
    components.world.notes.append(note)


def frozen(model: ModelOrMaker, patterns: Iterable[str]) -> ModelOrMaker:
    """`model`, or what it makes, with the parameters whose names match not trained.

    Raises:
        ConfigError: a pattern matches none.
    """
    wanted = list(patterns)

    def freeze(made: Any) -> Any:
        if not isinstance(made, nn.Module):
            return made
        names = dict(made.named_parameters())
        for pattern in wanted:
            if not any(matches(name, [pattern]) for name in names):
                raise ConfigError(
                    f"no parameter matches {pattern!r}",
                    where="mh.InitFrom(freeze=…)",
                    fix=f"{nearest(pattern, names)}they are: {_named(names)}",
                )
        for name, parameter in names.items():
            if matches(name, wanted):
                parameter.requires_grad_(False)
        return made

    if not wanted:
        return model
    return freeze(model) if isinstance(model, nn.Module) else lambda: freeze(model())


def _agreed(
    init: InitFrom, found: Mapping[str, Stored], own: Mapping[str, tuple[int, ...]], ties: Mapping[str, str]
) -> set[str]:
    """The names of what is taken.

    Raises:
        ConfigError: something is missing, too much or of another shape, and `init` does not allow it.
    """
    shaped = {name for name in own.keys() & found.keys() if found[name].shape != own[name]}
    missing = {name for name in own.keys() - found.keys() if ties.get(name, name) not in found}
    names = {"missing": missing | shaped, "extra": found.keys() - own.keys()}
    wrong = {key: {name for name in each if not matches(name, getattr(init, key))} for key, each in names.items()}
    if not any(wrong.values()):
        return (own.keys() & found.keys()) - shaped
    lines = []
    if lacking := sorted(wrong["missing"] - shaped):
        lines.append(f"not there: {_named(lacking)}")
    if wrong["extra"]:
        lines.append(f"not in this model: {_named(wrong['extra'])}")
    lines += [
        f"{name} has shape {found[name].shape} there, and {own[name]} in this model"
        for name in sorted(wrong["missing"] & shaped)[:_MOST_NAMED]
    ]
    idle = [
        each for key in names for each in getattr(init, key) if not any(matches(name, [each]) for name in names[key])
    ]
    lines += [f"{each!r} of mh.InitFrom matches nothing: of a part write {each.rstrip('.')}.*" for each in idle[:1]]
    raise ConfigError(
        "these weights are of another model: " + "; ".join(lines),
        where=init.where,
        fix="give the model that they were saved from, or mh.InitFrom(…, rename={'there.': 'here.'}, "
        "missing=['head.*'] for what stays as it is made, extra=['…'] for what is left out)",
    )


def _ties(model: nn.Module) -> dict[str, str]:
    """Name → another name of the same tensor, which files have once."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _see_that_ties_agree(init: InitFrom, found: Mapping[str, Stored], ties: Mapping[str, str]) -> None:
    """See that what is one tensor in the model is not two different ones there.

    Raises:
        ConfigError: it is.
    """
    for name, first in ties.items():
        both = name != first and name in found and first in found and found[name].shape == found[first].shape
        if both and not torch.equal(found[name].full(), found[first].full()):
            raise ConfigError(
                f"{first} and {name} are one tensor in this model, and two different ones there",
                where=init.where,
                fix=f'say which counts: mh.InitFrom(…, rename={{"{name}": "unused.{name}"}}, extra=["unused.*"])',
            )


def _named(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    return ", ".join(known[:_MOST_NAMED]) + more if known else "nothing"


def _read(init: InitFrom) -> Mapping[str, Stored]:
    if isinstance(init.source, Mapping):
        return _in_memory(init.source, init)
    path = Path(init.source)
    if not path.exists():
        raise ConfigError("cannot read the weights: there is no such file or folder", where=init.where, fix=_FIX)
    try:
        if path.is_dir():
            return _in_folder(path)
        if path.suffix == ".safetensors":
            return _in_file(path)
        return _in_memory(torch.load(path, map_location="cpu", weights_only=True), init)
    except ManyhostsError:
        raise
    except Exception as cause:  # of many kinds: no file, no access, half-written, or more than tensors in it
        reason = first_line(cause)
        if "Weights only load failed" in reason:
            reason = "it holds more than tensors, such as a pickled model, which could run any code"
        raise ConfigError(f"cannot read the weights: {reason}", where=init.where, fix=_FIX) from cause


def _in_folder(path: Path) -> Mapping[str, Stored]:
    if (path / _INDEX).exists():
        files = sorted(set(json.loads((path / _INDEX).read_text())["weight_map"].values()))
        return {name: each for file in files for name, each in _in_file(path / Path(file).name).items()}
    if (path / NAME).exists():
        stored = of_model(load_snapshot(path).stored, path)
        return {name: each for name, each in stored.items() if isinstance(each, StoredTensor)}
    if not RunDirectory(path).snapshots.exists():
        for file in ("model.safetensors", "adapter_model.safetensors"):
            if (path / file).exists():
                return _in_file(path / file)
    return _tensors_of(load(path))


def _in_file(path: Path) -> Mapping[str, Stored]:
    file: Any = safe_open(path, framework="pt")
    slices = {name: file.get_slice(name) for name in list(file.keys())}
    return {
        name: _Readable(tuple(each.get_shape()), each, partial(file.get_tensor, name)) for name, each in slices.items()
    }


def _tensors_of(weights: Mapping[str, Any]) -> Mapping[str, Stored]:
    tensors = {name: each for name, each in weights.items() if isinstance(each, Tensor)}
    return {name: _Readable(tuple(each.shape), each, each.detach) for name, each in tensors.items()}


def _in_memory(weights: Any, init: InitFrom) -> Mapping[str, Stored]:
    inner = weights.get("state_dict", weights) if isinstance(weights, Mapping) else None
    if not isinstance(inner, Mapping) or not is_state_dict(inner):
        entries = weights if isinstance(weights, Mapping) else {}
        keys = f", but {', '.join(map(str, list(entries)[:8]))}" if entries else ""
        inside = [key for key, each in entries.items() if isinstance(each, Mapping)]
        fix = f"give one of its entries: init_from=torch.load(PATH)[{inside[0]!r}]; or " if inside else ""
        raise ConfigError(f"no state_dict is in it{keys}", where=init.where, fix=f"{fix}{_FIX}")
    return _tensors_of(inner)


def chosen(weights: Literal["best", "last"], run: Fit | None) -> Path | None:
    """The best model's folder, here on every worker; None where the last weights are asked for, or there is none.

    Raises:
        ConfigError: neither is asked for.
    """
    if weights not in ("best", "last"):
        raise ConfigError(f"weights is {weights!r}", where="weights", fix='choose "best" or "last"')
    if run is None or weights == "last":
        return None
    best = run.directory.best
    run.snapshot_schedule.store.everywhere(best, run.state.best_step)
    return best if best.exists() and run.state.best_step >= 0 else None


@dataclass(frozen=True, slots=True)
class Used:
    """Which weights an evaluation, a prediction or a file is of."""

    is_best: bool
    step: int
    averaging: str
    """The name of the callback that averages; empty where none does."""
    is_averaged: bool
    """Whether it has begun by then."""

    @classmethod
    def of(cls, components: Components, run: Fit | None, *, is_best: bool) -> Used:
        """Those that `holding` gives."""
        step = 0 if run is None else run.state.best_step if is_best else run.state.step
        averaging = components.callbacks.averaging
        callback = components.callbacks.by_name.get(averaging)
        has_begun = callback is not None and bool(callback.averages()) and step >= getattr(callback, "first", 0)
        return cls(is_best, step, averaging, has_begun)

    def __str__(self) -> str:
        which = f"the {'best' if self.is_best else 'last'} weights, of step {self.step}"
        if not self.averaging:
            return which
        how = f"averaged ({self.averaging})" if self.is_averaged else f"not averaged: {self.averaging} had not begun"
        return f"{which}, {how}"


@contextmanager
def holding(weights: Literal["best", "last"], components: Components, run: Fit | None) -> Iterator[Used]:
    """Within, the model has its best weights, where they are asked for and kept, else those of now. Says which."""
    best = chosen(weights, run)
    used = Used.of(components, run, is_best=best is not None)
    if best is None:
        with components.callbacks.evaluated(components.trained):
            yield used
        return
    found = load_snapshot(best, components.fits())
    now = copied(weights_of(components, but_frozen=KEY in found.facts.run))
    put_weights(components, state_of(found.stored, components))
    try:
        yield used
    finally:
        put_weights(components, now)
