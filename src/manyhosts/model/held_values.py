"""What a model, a loss, a step or a dataset holds in plain Python: counters, lists, dicts, deques.

No one sums it over the workers and no snapshot has it, so looks and the first steps see whether it changes, and a look
puts it back. Of a function it is what its code names: its closure, globals, and those of functions that it calls.
"""

from __future__ import annotations

import functools
import io
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from manyhosts.callbacks.callback import Callback, Callbacks
from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.events import LossLooked
from manyhosts.snapshot.fingerprint import tensor_checksums

_INTERNAL = frozenset(vars(nn.Module()))
_DEPTH, _MOST_ITEMS, _MOST_NUMBERS, _MOST_FUNCTIONS = 5, 1000, 1 << 22, 50
"""How deep is looked, and how much: of longer lists only the length is seen, of larger tensors nothing."""
_OF_OTHERS = ("torch", "numpy", "builtins", "manyhosts")
"""Packages whose objects are none that a script keeps numbers in."""
_PLAIN = bool | int | float | complex | str | bytes | None


def _cloned(tensor: Tensor) -> Tensor | None:
    is_seen = not isinstance(tensor, nn.Parameter) and tensor.numel() <= _MOST_NUMBERS
    return tensor.detach().clone() if is_seen and tensor.layout is torch.strided else None  # sparse ones have no equal


def _set(tensor: Tensor, before: Tensor | None) -> None:
    if before is not None and not same(tensor, before):
        tensor.data = before.clone()


def _plain_of(kind: type) -> dict[str, Any]:
    """The plain values that a class of the script's has as attributes."""
    if kind.__module__.partition(".")[0] in _OF_OTHERS:
        return {}
    return {name: each for name, each in vars(kind).items() if isinstance(each, _PLAIN) and not name.startswith("__")}


def _set_plain(kind: type, before: Mapping[str, Any]) -> None:
    for name, value in before.items():
        if getattr(kind, name, None) is not value:  # else members of an Enum, which cannot be set
            setattr(kind, name, value)


_KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    Tensor: (_cloned, _set),
    np.ndarray: (np.copy, np.copyto),
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (lambda value: value.getstate(), lambda value, before: value.setstate(before)),
    np.random.Generator: (
        lambda value: value.bit_generator.state,
        lambda value, before: setattr(value.bit_generator, "state", before),
    ),
    np.random.RandomState: (lambda value: value.get_state(), lambda value, before: value.set_state(before)),
    set: (set, lambda value, before: (value.clear(), value.update(before))),
    type: (_plain_of, _set_plain),
}
"""What holds numbers of its own: how they are copied, and how a copy is put back in place."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A value as it was: itself, and what was in it."""

    value: Any
    inside: Any = None

    def put_back(self) -> Any:
        """Have the value as it was, in place. Returns it."""
        value, inside = self.value, self.inside
        if (kind := _kind(value)) is not None:
            kind[1](value, inside)
        elif isinstance(inside, int):
            while isinstance(value, list | deque) and len(value) > inside:
                value.pop()
        elif isinstance(inside, list):
            each_of_them = [each.put_back() for each in inside]
            if isinstance(value, list | deque):
                value.clear()
                value.extend(each_of_them)
        elif isinstance(inside, dict):
            for key in value.keys() - inside.keys():
                del value[key]
            for key, each in inside.items():  # a Counter would add up what it is updated with
                value[key] = each.put_back()
        elif isinstance(inside, Saved):
            inside.put_back()
        return value

    def tensors(self) -> Iterator[Tensor]:
        """Those in it that can be put back."""
        if isinstance(self.inside, Tensor) and isinstance(self.value, Tensor):
            yield self.value
        kept_values = list(self.inside.values()) if isinstance(self.inside, dict) else self.inside
        for each in kept_values if isinstance(kept_values, list) else [kept_values]:
            if isinstance(each, Saved):
                yield from each.tensors()


def _kind(value: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    return next((how for kind, how in _KINDS.items() if isinstance(value, kind)), None)


def saved(value: Any, depth: int = _DEPTH) -> Saved:
    """`value` as it is now."""
    inside: Any = None
    if (kind := _kind(value)) is not None:
        inside = kind[0](value)
    elif depth and isinstance(value, list | tuple | deque):
        inside = [saved(each, depth - 1) for each in value] if len(value) <= _MOST_ITEMS else len(value)
    elif depth and isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        inside = {key: saved(each, depth - 1) for key, each in value.items()}
    elif depth and _is_of_script(value):
        inside = saved(vars(value), depth - 1)
    return Saved(value, inside)


def same(one: Any, other: Any) -> bool:
    """Whether both hold the same, as far as that can be seen of values."""
    if isinstance(one, Saved) and isinstance(other, Saved):
        if one.inside is None and isinstance(one.value, _PLAIN):
            return same(one.value, other.value)
        return type(one.value) is type(other.value) and same(one.inside, other.inside)
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other) or (one != one and other != other)


def _is_of_script(value: Any) -> bool:
    """Whether it is an object of a class that somebody has written, to keep something in."""
    is_code = isinstance(value, nn.Module | type | types.ModuleType | types.FunctionType | types.MethodType)
    return not is_code and hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _OF_OTHERS


Held = Mapping[str, Saved]


def differing(one: Held, other: Held) -> list[str]:
    """The names of what is not the same in both."""
    return [name for name, each in other.items() if name not in one or not same(one[name], each)]


class HeldValues:
    """The places in which a model, a loss or a step can hold something besides parameters and buffers."""

    def __init__(self, module: nn.Module, *functions: Any) -> None:
        self.places: dict[str, tuple[Any, str]] = {}
        """By the name of each: the mapping that it is kept in and its key there, or a cell."""
        self.asks_for_training = False
        """Whether code of the script's looks at `training`: of its modules, of the functions, and of what they call."""
        self.modules: dict[str, nn.Module] = {}
        """Those that the code of a function names."""
        self.iterators: list[str] = []
        """Names of those from which the code of a function may take the next."""
        self._add_modules("", module)
        waiting, seen = [each for each in functions if each is not None], set[int]()
        while waiting and len(seen) < _MOST_FUNCTIONS:
            given = waiting.pop()
            if id(given) not in seen:
                seen.add(id(given))
                waiting += self._add(given)

    def now(self) -> dict[str, Saved]:
        """What each holds; those that hold nothing are left out."""
        return {name: saved(each) for name, place in self.places.items() for each in _in_place(*place)}

    def put_back(self, kept_values: Held) -> None:
        """Have each hold its earlier value."""
        for name, each in kept_values.items():
            holder, key = self.places[name]
            if isinstance(holder, types.CellType):
                holder.cell_contents = each.put_back()
            else:
                holder[key] = each.put_back()

    def _add_modules(self, name: str, module: nn.Module) -> None:
        for kind in {kind for part in module.modules() for kind in type(part).__mro__}:
            if not kind.__module__.startswith(("torch.", "manyhosts.")):
                self._read(each for each in vars(kind).values() if isinstance(each, types.FunctionType))
        for path, part in module.named_modules():
            own = vars(part).keys() - _INTERNAL - _computed_by_hooks(part)
            self.add_names(".".join(filter(None, (name, path))), vars(part), own)

    def add_names(self, name: str, holder: dict[str, Any], keys: Iterable[str]) -> None:
        """Look at these `keys` of `holder`, too."""
        self.places.update({f"{name}.{key}" if name else key: (holder, key) for key in keys})

    def _add(self, given: Any) -> list[Any]:
        """Add what `given` holds. Returns what it calls, as far as its code shows."""
        while isinstance(given, functools.partial) or hasattr(given, "__wrapped__"):
            given = given.func if isinstance(given, functools.partial) else given.__wrapped__
        if isinstance(given, types.MethodType):
            return [given.__self__, given.__func__]
        if isinstance(given, types.FunctionType):
            return self._add_function(given)
        if isinstance(given, nn.Module):
            self._add_modules("loss", given)
        elif _is_of_script(given):  # and not written in C, say
            self.add_names(type(given).__name__, vars(given), vars(given))
            return [type(given).__call__] if callable(given) else []
        return []

    def _read(self, functions: Iterable[types.FunctionType]) -> None:
        codes = [code for each in functions for code in all_code(each.__code__)]
        self.asks_for_training = self.asks_for_training or any("training" in code.co_names for code in codes)

    def _add_function(self, function: types.FunctionType) -> list[Any]:
        self._read([function])
        variables = function.__globals__
        names = {name for code in all_code(function.__code__) for name in code.co_names} & variables.keys()
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        places = {name: (variables, name) for name in names} | {name: (cell, "") for name, cell in cells}
        self.add_names(function.__name__, vars(function), vars(function))
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = dict(zip(reversed(arguments), reversed(function.__defaults__ or ()), strict=False))
        self.add_names(function.__name__, defaults, defaults)
        self.places.update(places)
        kept_values = {name: each for name, place in places.items() for each in _in_place(*place)}
        for name, each in kept_values.items():
            if isinstance(each, nn.Module):
                self._add_modules(name, each)
                self.modules[name] = each
            elif isinstance(each, Iterator) and not isinstance(each, io.IOBase):
                self.iterators.append(name)
        return [
            each
            for each in kept_values.values()
            if isinstance(each, types.FunctionType | types.MethodType | functools.partial)
            or (callable(each) and _is_of_script(each))
        ]


def _computed_by_hooks(module: nn.Module) -> set[str]:
    """The weights that `torch.nn.utils.weight_norm`, `spectral_norm` and `prune` compute again before each forward."""
    hooks = [each for each in module._forward_pre_hooks.values() if type(each).__module__.startswith("torch.nn.utils.")]
    found = (vars(hook).get(name) for hook in hooks for name in ("name", "_tensor_name"))
    return {name for name in found if isinstance(name, str)}


def _in_place(holder: Any, key: str) -> list[Any]:
    """What is in a cell, or under a key; nothing where it has no value yet, or none any more."""
    try:
        return [holder.cell_contents if isinstance(holder, types.CellType) else holder[key]]
    except (ValueError, KeyError):
        return []


def all_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """`code`, and that of the functions within."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from all_code(each)


def changed_attributes(before: Held, after: Held) -> str:
    """What is to be said of what a step changes in plain Python; empty where that is nothing."""
    if not (changed := differing(before, after)):
        return ""
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return (
        f"the step changes {changed[0]}{more}, a plain attribute of a model or a value of the script: snapshots do not "
        "have it, and it is not put back where a step is made again; keep it in a buffer or in run.state "
        "(run.steps_done counts the steps), or a resumed run departs; and change it in the step: a loss is called for "
        "each part of a batch, and what it changes belongs to that part (run.part.keep), or workers differ"
    )


def checksums(module: nn.Module) -> dict[str, str]:
    """Of the plain tensors that a module holds: parts of a cut model, and what is no tensor, are left out."""
    kinds = (Tensor, nn.Parameter)
    return tensor_checksums({name: each for name, each in module.state_dict().items() if type(each) in kinds})


class CallbackWatch:
    """What callbacks that keep nothing in snapshots have as attributes, looked at where a snapshot is made."""

    def __init__(self, callbacks: Callbacks, model: nn.Module) -> None:
        """`model`: the one that is trained, which a callback may have as an attribute, too."""
        named, self._own = callbacks.by_name.items(), set(model.modules())
        self._callbacks = {n: each for n, each in named if type(each).state_dict is Callback.state_dict}
        self._first: dict[str, dict[str, Saved]] = {}

    def begin(self) -> None:
        """Training begins, with what they have now."""
        self._first = {name: self._attributes(each) for name, each in self._callbacks.items()}

    def look(self) -> list[str]:
        """What is to be said of what they have changed since, once of each."""
        found = []
        for name, before in list(self._first.items()):
            if changed := differing(before, self._attributes(self._callbacks[name])):
                del self._first[name]
                found.append(
                    f"callback {name!r} changes its attribute {changed[0]}, which no snapshot has: where a resumed run "
                    "needs it, give it state_dict() and load_state_dict()"
                )
        return found

    def _attributes(self, callback: Callback) -> dict[str, Saved]:
        """Of a module that is none of the model's, such as an average, checksums of what it holds."""
        return {
            name: saved(checksums(each)) if isinstance(each, nn.Module) and each not in self._own else saved(each)
            for name, each in vars(callback).items()
        }


class DatasetWatch:
    """The plain values that a training set has as attributes, looked at with each validation and at the end."""

    def __init__(self, dataset: Dataset[Any] | None, world: World, *, elsewhere: bool) -> None:
        """`elsewhere`: it is read in loader processes, which have copies of it."""
        self.dataset, self.world, self.elsewhere = dataset, world, elsewhere
        self.first = dict(_numbers(dataset))
        self.is_told = False

    def look(self) -> None:
        """See whether any has changed on some workers alone, and say so once. Every worker calls this."""
        now = dict(_numbers(self.dataset))
        own = [name for name, value in now.items() if self.first.get(name) != value]
        if self.is_told or not self.world.any(bool(own)):
            return
        reported = gather_plain(self.world, now)
        others = [name for name in reported[0] if any(each.get(name) != reported[0][name] for each in reported)]
        if not others and not (self.elsewhere and own):
            return
        self.is_told = True
        where = "on other workers it is another" if others else "loader processes read copies made before"
        text = (
            f"the training set's {(others or own)[0]} was changed while it was trained on, and {where}: change it on "
            "every worker alike, in a callback (listeners are called on rank 0 alone), with loader_workers=0"
        )
        self.world.notes.append(text)
        self.world.news.append(functools.partial(LossLooked, outcome="not tried", text=text))


def _numbers(dataset: object, path: str = "", depth: int = 8) -> Iterator[tuple[str, str]]:
    """Of a dataset, those within and their transforms, each plain attribute, by its path."""
    for name, value in vars(dataset).items() if depth and hasattr(dataset, "__dict__") else ():
        if isinstance(value, _PLAIN):
            yield f"{path}{name}", repr(value)
        elif isinstance(value, Dataset) or name in ("transform", "target_transform", "transforms"):
            yield from _numbers(value, f"{path}{name}.", depth - 1)
