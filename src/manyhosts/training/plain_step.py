"""Whether a user's step may be tried out in training mode: it asks for that mode, and calls nothing but PyTorch.

A step that counts, averages or takes a step of an optimizer of its own in training mode would do so once more for every
try. So its code is read: each name in it must be PyTorch's and change nothing in place, or a part of the model.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_ASKS = "training"
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_SUBSCR")
_ACTS = frozenset({"backward", "step", "zero_grad", "train", "eval", "manual_seed", "set_", "data", "grad"})
_BUILTINS = frozenset({"len", "float", "int", "range", "sum", "max", "min", "abs", "dict", "tuple", "list", "zip"})


def is_plain(step: Any, model: nn.Module) -> bool:
    """Whether `step` looks at `model.training`, and does nothing that outlasts the call as far as its code tells."""
    code = getattr(step, "__code__", None)
    if not isinstance(code, types.CodeType):
        return False
    known = {part for name, _ in [*model.named_modules(), *model.named_parameters()] for part in name.split(".")}
    names, variables = set[str](), getattr(step, "__globals__", {})
    for each in _all_code(code):
        if any(found.opname in _STORES for found in dis.get_instructions(each)):
            return False
        names.update(each.co_names)
    return _ASKS in names and all(name == _ASKS or name in known or _is_torch(name, variables) for name in names)


def _all_code(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _all_code(each)


def _is_torch(name: str, variables: dict[str, Any]) -> bool:
    """Whether `name`, a global or an attribute, is something of PyTorch's that changes nothing in place."""
    if name in _ACTS or (name.endswith("_") and not name.startswith("_")):
        return False
    if name in variables:
        held = variables[name]
        place = held.__name__ if isinstance(held, types.ModuleType) else str(getattr(held, "__module__", ""))
        return place == "torch" or place.startswith("torch.")
    return any(hasattr(place, name) for place in (torch.Tensor, torch, nn, nn.functional)) or name in _BUILTINS
