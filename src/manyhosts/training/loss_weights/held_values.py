"""What a model, a loss or a step holds in plain Python from one batch to the next: counters, lists, dicts, deques.

Nobody sums it over the workers and no snapshot has it, so a look sees whether it changes, and puts it back. Of a
function it is what its code names: its closure, globals, and those of the script's functions that it calls.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_INTERNAL = frozenset(vars(nn.Module()))
_DEPTH, _MOST_ITEMS, _MOST_NUMBERS, _MOST_FUNCTIONS = 5, 1000, 1 << 22, 50
"""How deep is looked, and how much: of longer lists only the length is seen, of larger tensors nothing."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A value as it was: itself, and what was in it."""

    value: Any
    inside: Any = None

    def put_back(self) -> Any:  # noqa: C901 - one line for each kind
        """Have the value as it was, in place. Returns it."""
        value, inside = self.value, self.inside
        if isinstance(value, Tensor):
            if inside is not None and not _same(value, inside):
                value.data = inside.clone()
        elif isinstance(value, list | deque) and isinstance(inside, int):
            while len(value) > inside:
                value.pop()
        elif isinstance(value, list | deque) and inside is not None:
            value.clear() if isinstance(value, deque) else value.__delitem__(slice(None))
            value.extend([each.put_back() for each in inside])
        elif isinstance(value, dict) and inside is not None:
            for key in value.keys() - inside.keys():
                del value[key]
            value.update({key: each.put_back() for key, each in inside.items()})
        elif isinstance(value, set):
            value.clear()
            value.update(inside)
        elif isinstance(value, tuple) and isinstance(inside, list):
            for each in inside:
                each.put_back()
        elif isinstance(inside, Saved):
            inside.put_back()
        else:
            _put_back_numbers(value, inside)
        return value

    def tensors(self) -> Iterator[Tensor]:
        """Those in it that can be put back."""
        if isinstance(self.inside, Tensor) and isinstance(self.value, Tensor):
            yield self.value
        held = list(self.inside.values()) if isinstance(self.inside, dict) else self.inside
        for each in held if isinstance(held, list) else [held]:
            if isinstance(each, Saved):
                yield from each.tensors()


def _put_back_numbers(value: Any, inside: Any) -> None:
    if isinstance(value, np.ndarray):
        value[...] = inside
    elif isinstance(value, torch.Generator):
        value.set_state(inside)
    elif isinstance(value, random.Random):
        value.setstate(inside)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = inside


def saved(value: Any, depth: int = _DEPTH) -> Saved:  # noqa: C901 - one line for each kind
    """`value` as it is now."""
    inside: Any = None
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter) and value.numel() <= _MOST_NUMBERS:
            inside = value.detach().clone()
    elif isinstance(value, np.ndarray):
        inside = value.copy()
    elif isinstance(value, torch.Generator):
        inside = value.get_state()
    elif isinstance(value, random.Random):
        inside = value.getstate()
    elif isinstance(value, np.random.Generator):
        inside = value.bit_generator.state
    elif isinstance(value, set):
        inside = set(value)
    elif depth and isinstance(value, list | tuple | deque):
        inside = [saved(each, depth - 1) for each in value] if len(value) <= _MOST_ITEMS else len(value)
    elif depth and isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        inside = {key: saved(each, depth - 1) for key, each in value.items()}
    elif depth and _is_of_script(value):
        inside = saved(vars(value), depth - 1)
    return Saved(value, inside)


def _same(one: Any, other: Any) -> bool:
    """Whether both hold the same, as far as that can be seen of values."""
    if isinstance(one, Saved) and isinstance(other, Saved):
        if one.inside is not None or not isinstance(one.value, bool | int | float | complex | str | bytes | None):
            return type(one.value) is type(other.value) and _same(one.inside, other.inside)
        return _same(one.value, other.value)
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other) or (one != one and other != other)


def _is_of_script(value: Any) -> bool:
    """Whether it is an object of a class that somebody has written, to keep something in."""
    if isinstance(value, nn.Module | type | types.ModuleType | types.FunctionType | types.MethodType):
        return False
    return hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in ("torch", "numpy", "builtins")


Held = Mapping[str, Saved]


def differing(one: Held, other: Held) -> list[str]:
    """The names of what is not the same in both."""
    return [name for name, each in other.items() if name not in one or not _same(one[name], each)]


class HeldValues:
    """The places in which a model, a loss or a step can hold something beside parameters and buffers."""

    def __init__(self, module: nn.Module, *functions: Any) -> None:
        self.places: dict[str, tuple[Any, str]] = {}
        """By the name of each: the mapping that it is kept in and its key there, or a cell."""
        self._add_modules("", module)
        waiting, seen = [each for each in functions if each is not None], set[int]()
        while waiting and len(seen) < _MOST_FUNCTIONS:
            given = waiting.pop()
            if id(given) not in seen:
                seen.add(id(given))
                waiting += self._add(given)

    def now(self) -> dict[str, Saved]:
        """What each holds; those that hold nothing are left out."""
        found = {}
        for name, (holder, key) in self.places.items():
            for held in _cell(holder) if isinstance(holder, types.CellType) else [holder[key]] if key in holder else []:
                found[name] = saved(held)
        return found

    def put_back(self, held: Held) -> None:
        """Have each hold what it held."""
        for name, each in held.items():
            holder, key = self.places[name]
            if isinstance(holder, types.CellType):
                holder.cell_contents = each.put_back()
            else:
                holder[key] = each.put_back()

    def _add_modules(self, name: str, module: nn.Module) -> None:
        for path, part in module.named_modules():
            self._add_names(".".join(filter(None, (name, path))), vars(part), vars(part).keys() - _INTERNAL)

    def _add_names(self, name: str, holder: dict[str, Any], keys: Iterable[str]) -> None:
        self.places.update({f"{name}.{key}" if name else key: (holder, key) for key in keys})

    def _add(self, given: Any) -> list[Any]:
        """Add what `given` holds. Returns what it calls, as far as its code tells."""
        while isinstance(given, functools.partial) or hasattr(given, "__wrapped__"):
            given = given.func if isinstance(given, functools.partial) else given.__wrapped__
        if isinstance(given, nn.Module):
            self._add_modules("loss", given)
            return []
        if isinstance(given, types.MethodType):
            return [given.__self__, given.__func__]
        if isinstance(given, types.FunctionType):
            return self._add_function(given)
        if not _is_of_script(given):  # written in C, say
            return []
        self._add_names(type(given).__name__, vars(given), vars(given))
        return [type(given).__call__] if callable(given) else []

    def _add_function(self, function: types.FunctionType) -> list[Any]:
        variables = function.__globals__
        names = {name for code in all_code(function.__code__) for name in code.co_names} & variables.keys()
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._add_names(function.__name__, vars(function), vars(function))
        self._add_names("", variables, names)
        self.places.update({name: (cell, "") for name, cell in cells.items()})
        held = {name: variables[name] for name in names} | {
            name: each for name, cell in cells.items() for each in _cell(cell)
        }
        for name, each in held.items():
            if isinstance(each, nn.Module):
                self._add_modules(name, each)
        functions = (types.FunctionType, types.MethodType, functools.partial)
        return [
            each for each in held.values() if isinstance(each, functions) or (callable(each) and _is_of_script(each))
        ]


def _cell(cell: types.CellType) -> list[Any]:
    """What is in it; nothing where it has no value yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def asks_for_training(function: Any) -> bool:
    """Whether the code of a function looks at `training`."""
    return isinstance(function, types.FunctionType) and any(
        "training" in c.co_names for c in all_code(function.__code__)
    )


def all_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """`code`, and that of the functions within."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from all_code(each)
