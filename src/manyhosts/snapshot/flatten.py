"""A nested state taken apart: plain values that go into JSON, and tensors that each have a name.

What JSON cannot say itself is in an object with one key that begins with `$`:

    {"$tensor": name}  {"$array": name}  {"$tuple": […]}  {"$float": "inf" | "-inf" | "nan"}  {"$bytes": base64}
    {"$dict": [[key, value], …]}         a dict with keys that are no text, or with one that begins with `$`

`records.contents.unflatten` puts it together again.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhosts.communication.parts import TensorPart
from manyhosts.errors import SnapshotError
from manyhosts.snapshot.tensors import can_keep, dtype_name

_KEPT = "None, bool, int, float, str, bytes, list, tuple, dict, tensors and numpy arrays"
TENSOR_TYPES = {Tensor, nn.Parameter, nn.Buffer}
"""Types of tensors that are what they hold, and nothing else."""


@dataclass(slots=True)
class FlatState:
    """A state taken apart by `flatten`."""

    nodes: Any
    """The plain values, as JSON can hold them."""
    tensors: dict[str, Tensor]
    """By name, in the order of the state. A tensor that is in several places is here once."""
    parts: dict[str, TensorPart]
    """Likewise, those tensors of which other workers hold the rest."""


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Take `state` apart. Its tensors are not copied: they are the ones of the state.

    Raises:
        SnapshotError: a value in it is of a kind that cannot be kept; the path to it is named.
    """
    flattener = _Flattener()
    try:
        nodes = flattener.node(state, ())
    except RecursionError:
        raise SnapshotError(
            "the state is nested too deep, or contains itself", where="state", fix="keep it as flat lists and dicts"
        ) from None
    full = {name: held for name, held in flattener.held.items() if isinstance(held, Tensor)}
    parts = {name: held for name, held in flattener.held.items() if isinstance(held, TensorPart)}
    return FlatState(nodes, full, parts)


@dataclass(slots=True)
class _Flattener:
    held: dict[str, Tensor | TensorPart] = field(default_factory=dict)
    names: dict[tuple[Any, ...], str] = field(default_factory=dict)
    """Which memory has a name already."""

    def node(self, value: Any, path: tuple[Any, ...]) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, np.bool_ | np.integer | np.floating) and not isinstance(value, np.longdouble):
            return self.node(value.item(), path)
        if isinstance(value, str | int | float | bytes):
            return _scalar(value, path)
        if isinstance(value, Mapping):
            return self.dict_node(value, path)
        if type(value) is list:
            return [self.node(item, (*path, index)) for index, item in enumerate(value)]
        if type(value) in (tuple, torch.Size):
            return {"$tuple": [self.node(item, (*path, index)) for index, item in enumerate(value)]}
        if isinstance(value, Tensor):
            return {"$tensor": self.named(_plain_tensor(value, path), path)}
        if isinstance(value, TensorPart):
            return {"$tensor": self.named(replace(value, local=_plain_tensor(value.local, path)), path)}
        if isinstance(value, np.ndarray):
            return {"$array": self.named(_array_tensor(value, path), path)}
        raise _refusal(f"a value of type {type(value).__qualname__}", path)

    def dict_node(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): self.node(item, (*path, key)) for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            if not _is_plain_key(key):
                raise _refusal(f"a dict key of type {type(key).__qualname__}", path)
            pairs.append([self.node(key, path), self.node(item, (*path, key))])
        return {"$dict": pairs}

    def named(self, held: Tensor | TensorPart, path: tuple[Any, ...]) -> str:
        tensor = held if isinstance(held, Tensor) else held.local
        place = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride())
        memory = (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())
        if tensor.numel() and memory in self.names:
            return self.names[memory]
        name = plain = ".".join(str(key) for key in path).encode("utf-8", "replace").decode()
        count = 1
        while name in self.held or name == "__metadata__":  # the one name that a safetensors file keeps for itself
            count += 1
            name = f"{plain}~{count}"
        self.held[name] = held
        self.names[memory] = name
        return name


def _scalar(value: str | int | float | bytes, path: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if value.bit_length() > 10_000:  # Python itself refuses to write and read longer ones
        raise _refusal(f"an integer of {value.bit_length()} bits", path)
    return int(value)


def _is_plain_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_plain_key(part) for part in key)
    return key is None or isinstance(key, str | int | float | bytes)


def _plain_tensor(tensor: Tensor, path: tuple[Any, ...]) -> Tensor:
    if type(tensor) not in TENSOR_TYPES:
        raise _refusal(f"a tensor of type {type(tensor).__qualname__}", path)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise _refusal(f"a {kind} tensor", path)
    if tensor.device.type == "meta":
        raise _refusal("a tensor on the meta device, which has no values,", path)
    if not can_keep(tensor.dtype):
        raise _refusal(f"a tensor of {dtype_name(tensor.dtype)}", path)
    return tensor.detach()


def _array_tensor(array: np.ndarray[Any, Any], path: tuple[Any, ...]) -> Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))  # a copy: torch wants it writable and in C order
    except TypeError as cause:
        raise _refusal(f"a numpy array of {array.dtype}", path) from cause


def _refusal(what: str, path: tuple[Any, ...]) -> SnapshotError:
    place = "".join(f"[{key!r}]" for key in path)
    return SnapshotError(f"{what} cannot be kept in a snapshot", where=f"state{place}", fix=f"keep it as {_KEPT}")
