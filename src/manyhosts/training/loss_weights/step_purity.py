"""Whether a user's step may be tried out in training mode: it asks for that mode, and changes nothing but its locals.

A step that counts, averages or takes a step of an optimizer of its own in training mode would do so once more for every
try. So its code is read, and that of the script's functions which it calls: each name in it must be PyTorch's and
change nothing in place, a part of the model, a constant, or a function that is read in turn.
"""

from __future__ import annotations

import dis
import functools
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ASKS = "training"
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_SUBSCR")
_ACTS = frozenset({"backward", "step", "zero_grad", "train", "eval", "manual_seed", "set_", "data", "grad"})
_BUILTINS = frozenset(
    {"len", "float", "int", "bool", "range", "enumerate", "zip", "sum", "max", "min", "abs", "dict", "tuple", "list"}
)
_CONSTANT = (bool, int, float, str, type(None), torch.dtype, torch.device)
_MOST_FUNCTIONS = 50


@dataclass(slots=True)
class Read:
    """What the code of a step shows."""

    plain: bool = True
    """Whether it does nothing that outlasts the call, as far as its code tells."""
    asks: bool = False
    """Whether what could be read of it asks for training mode."""


def read(step: Any, model: nn.Module) -> Read:
    """Read the code of `step`, and of the script's functions that it calls."""
    parts = {part for name, _ in [*model.named_modules(), *model.named_parameters()] for part in name.split(".")}
    found, waiting, seen = Read(), [step], set[types.CodeType]()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        function = _written_in_python(waiting.pop())
        if function is None:
            found.plain = False
            continue
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = set[str]()
        for code in _all_code(function.__code__):
            names.update(code.co_names)
            found.plain = found.plain and not any(each.opname in _STORES for each in dis.get_instructions(code))
        found.asks = found.asks or _ASKS in names
        more = _called(names - parts - {_ASKS}, function)
        found.plain = found.plain and more is not None
        waiting += more or []
    found.plain = found.plain and not waiting
    return found


def is_plain(step: Any, model: nn.Module) -> bool:
    """Whether `step` looks at `model.training`, and does nothing that outlasts the call as far as its code tells."""
    found = read(step, model)
    return found.plain and found.asks


def is_hidden(step: Any, model: nn.Module) -> bool:
    """Whether `step` looks at `model.training`, and does what cannot be tried."""
    found = read(step, model)
    return found.asks and not found.plain


def asks_for_training(forward: Any) -> bool:
    """Whether the code of a module's `forward` looks at `training`."""
    return isinstance(forward, types.FunctionType) and any(_ASKS in c.co_names for c in _all_code(forward.__code__))


def _written_in_python(held: Any) -> types.FunctionType | None:
    """The function behind what is called; None where its code cannot be read."""
    while not isinstance(held, types.FunctionType) and hasattr(held, "__wrapped__"):  # by `prove`, say
        held = held.__wrapped__
    while isinstance(held, functools.partial):
        if not all(isinstance(each, _CONSTANT) for each in (*held.args, *held.keywords.values())):
            return None
        held = held.func
    return held if isinstance(held, types.FunctionType) else None


def _all_code(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _all_code(each)


def _called(names: set[str], function: types.FunctionType) -> list[Any] | None:
    """The script's functions among `names`, and among what `function` closes over; None where anything else is."""
    variables = function.__globals__
    folders = [variables[name] for name in names if isinstance(variables.get(name), types.ModuleType)]
    functions = []
    for name in names:
        if _is_torch(name, variables):
            continue
        held = variables.get(name, _NOTHING)
        if held is _NOTHING:
            held = next((vars(each)[name] for each in folders if name in vars(each)), _NOTHING)
        if isinstance(held, types.FunctionType | functools.partial):
            functions.append(held)
        elif not isinstance(held, (*_CONSTANT, types.ModuleType)) and getattr(math, name, _NOTHING) is not held:
            return None
    for held in _closed_over(function):
        if isinstance(held, types.FunctionType | functools.partial):
            functions.append(held)
        elif callable(held) and not isinstance(held, nn.Module) and not _is_of_torch(held):
            return None
    return functions


_NOTHING = object()


def _closed_over(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it has no value yet
            continue
    return found


def _is_torch(name: str, variables: Mapping[str, Any]) -> bool:
    """Whether `name`, a global or an attribute, is something of PyTorch's that changes nothing in place."""
    if name in _ACTS or (name.endswith("_") and not name.startswith("_")):
        return False
    if name in variables:
        return _is_of_torch(variables[name])
    return any(hasattr(place, name) for place in (torch.Tensor, torch, nn, nn.functional)) or name in _BUILTINS


def _is_of_torch(held: Any) -> bool:
    place = held.__name__ if isinstance(held, types.ModuleType) else str(getattr(held, "__module__", ""))
    return place == "torch" or place.startswith("torch.")
