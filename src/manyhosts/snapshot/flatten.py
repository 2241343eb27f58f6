"""A nested state, flattened: plain values that go into JSON, and tensors that each have a name.

What JSON cannot say itself is in an object with one key that begins with `$`:

    {"$tensor": name}  {"$array": name}  {"$tuple": […]}  {"$float": "inf" | "-inf" | "nan"}  {"$bytes": base64}
    {"$counter": [[key, count], …]}      a collections.Counter, as MultiStepLR has
    {"$dict": [[key, value], …]}         a dict with keys that are no text, or with one that begins with `$`

`records.contents.unflatten` puts it together again.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.parts import TensorPart
from manyhosts.communication.world import World
from manyhosts.errors import SnapshotError
from manyhosts.snapshot.tensors import can_keep, dtype_name

_KEPT = "None, bool, int, float, str, bytes, list, tuple, dict, tensors and numpy arrays"
TENSOR_TYPES = {Tensor, nn.Parameter, nn.Buffer}
"""Types of tensors that are what they hold, and nothing else."""


@dataclass(slots=True)
class FlatState:
    """A state that `flatten` has flattened."""

    nodes: Any
    """The plain values, as JSON can hold them."""
    tensors: dict[str, Tensor]
    """By name, in the order of the state. A tensor that is in several places is here once."""
    parts: dict[str, TensorPart]
    """Likewise, those tensors of which other workers hold the rest."""


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Flatten `state`. Its tensors are not copied: they are the ones of the state.

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
    full = {name: entry for name, entry in flattener.found.items() if isinstance(entry, Tensor)}
    parts = {name: entry for name, entry in flattener.found.items() if isinstance(entry, TensorPart)}
    return FlatState(nodes, full, parts)


@dataclass(slots=True)
class _Flattener:
    found: dict[str, Tensor | TensorPart] = field(default_factory=dict)
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
        if type(value) is not Counter and all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): self.node(item, (*path, key)) for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            if not _is_plain_key(key):
                raise _refusal(f"a dict key of type {type(key).__qualname__}", path)
            pairs.append([self.node(key, path), self.node(item, (*path, key))])
        return {"$counter" if type(value) is Counter else "$dict": pairs}

    def named(self, entry: Tensor | TensorPart, path: tuple[Any, ...]) -> str:
        tensor = entry if isinstance(entry, Tensor) else entry.local
        place = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride())
        memory = (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())
        if tensor.numel() and memory in self.names:
            return self.names[memory]
        name = plain = ".".join(str(key) for key in path).encode("utf-8", "replace").decode()
        count = 1
        while name in self.found or name == "__metadata__":  # the one name that a safetensors file keeps for itself
            count += 1
            name = f"{plain}~{count}"
        self.found[name] = entry
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


# One state of all workers, where some hold tensors of which others have nothing, nor what the optimizer keeps of them.
#
# Every worker reports what it has: the plain values, and which tensors it holds. What one alone has is in the state of
# all then, as a part that others hold; a tensor that all hold is shared out as ever.

_Told = tuple[Any, dict[str, list[Any]]]
"""Of one worker: the plain values; name → [dtype, shape, whether it holds values] of each tensor."""


def merged(own: FlatState, world: World) -> FlatState:
    """The state of all workers, with what this one holds of it. Every worker calls this."""
    mine: dict[str, list[Any]] = {
        **{name: [dtype_name(each.dtype), list(each.shape), True] for name, each in own.tensors.items()},
        **{name: [dtype_name(each.local.dtype), list(each.shape), False] for name, each in own.parts.items()},
    }
    reported: list[_Told] = [tuple(row) for row in gather_plain(world, [own.nodes, mine])]
    nodes = _merged_node([(rank, row[0]) for rank, row in enumerate(reported)], reported)
    found = FlatState(nodes, {}, {})
    for name in dict.fromkeys(_tensor_names(nodes)):
        holders = [rank for rank, (_, tensors) in enumerate(reported) if name in tensors and tensors[name][2]]
        here = own.tensors.get(name)
        if here is not None and len(holders) == world.size:
            found.tensors[name] = here
        elif here is not None and holders[0] == world.rank:
            found.parts[name] = TensorPart.all_of(here)
        else:
            [dtype, shape, _] = next(tensors[name] for _, tensors in reported if name in tensors)
            nothing = torch.empty(0, dtype=getattr(torch, dtype))
            found.parts[name] = TensorPart(nothing, (0,) * len(shape), tuple(shape))
    return found


def _merged_node(rows: Sequence[tuple[int, Any]], reported: Sequence[_Told]) -> Any:
    """One node of what is in the same place on several workers, by rank."""
    nodes = [node for _, node in rows]
    if all(isinstance(node, dict) for node in nodes):
        if all("$tensor" in node for node in nodes):
            return next((node for rank, node in rows if reported[rank][1][node["$tensor"]][2]), nodes[0])
        keys = dict.fromkeys(key for node in nodes for key in node)
        if "$dict" in keys and len(keys) == 1:
            return {"$dict": _merged_pairs(rows, reported)}
        if not any(key.startswith("$") for key in keys):
            return {
                key: _merged_node([(rank, node[key]) for rank, node in rows if key in node], reported) for key in keys
            }
    if all(isinstance(node, list) and len(node) == len(nodes[0]) for node in nodes):
        return [_merged_node([(rank, node[place]) for rank, node in rows], reported) for place in range(len(nodes[0]))]
    return nodes[0]


def _merged_pairs(rows: Sequence[tuple[int, Any]], reported: Sequence[_Told]) -> list[Any]:
    """The items of dicts whose keys are no words."""
    keys: list[Any] = []
    for _, node in rows:
        keys += [key for key, _ in node["$dict"] if key not in keys]
    return [
        [
            key,
            _merged_node(
                [(rank, value) for rank, node in rows for own, value in node["$dict"] if own == key], reported
            ),
        ]
        for key in keys
    ]


def _tensor_names(node: Any) -> Iterator[str]:
    """The tensors that are named in `node`."""
    if isinstance(node, list):
        for each in node:
            yield from _tensor_names(each)
    elif isinstance(node, dict):
        for key, each in node.items():
            if key in ("$tensor", "$array"):
                yield each
            else:
                yield from _tensor_names(each)
