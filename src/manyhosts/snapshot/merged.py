"""One state of all workers, where some hold tensors of which others have nothing, nor what the optimizer keeps of them.

Every worker tells what it has: the plain values, and which tensors it holds. What one alone has is in the state of all
then, as a part that others hold; a tensor that all hold is shared out as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.parts import TensorPart
from manyhosts.communication.world import World
from manyhosts.snapshot.flatten import FlatState

_Told = tuple[Any, dict[str, list[Any]]]
"""Of one worker: the plain values; name → [dtype, shape, whether it holds values] of each tensor."""


def merged(own: FlatState, world: World) -> FlatState:
    """The state of all workers, with what this one holds of it. Every worker calls this."""
    mine: dict[str, list[Any]] = {
        **{name: [_word(each.dtype), list(each.shape), True] for name, each in own.tensors.items()},
        **{name: [_word(each.local.dtype), list(each.shape), False] for name, each in own.parts.items()},
    }
    reported: list[_Told] = [tuple(row) for row in gather_plain(world, [own.nodes, mine])]
    nodes = _one([(rank, row[0]) for rank, row in enumerate(reported)], reported)
    found = FlatState(nodes, {}, {})
    for name in dict.fromkeys(_names(nodes)):
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


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one(rows: Sequence[tuple[int, Any]], reported: Sequence[_Told]) -> Any:
    """One node of what is in the same place on several workers, by rank."""
    nodes = [node for _, node in rows]
    if all(isinstance(node, dict) for node in nodes):
        if all("$tensor" in node for node in nodes):
            return next((node for rank, node in rows if reported[rank][1][node["$tensor"]][2]), nodes[0])
        keys = dict.fromkeys(key for node in nodes for key in node)
        if "$dict" in keys and len(keys) == 1:
            return {"$dict": _pairs(rows, reported)}
        if not any(key.startswith("$") for key in keys):
            return {key: _one([(rank, node[key]) for rank, node in rows if key in node], reported) for key in keys}
    if all(isinstance(node, list) and len(node) == len(nodes[0]) for node in nodes):
        return [_one([(rank, node[place]) for rank, node in rows], reported) for place in range(len(nodes[0]))]
    return nodes[0]


def _pairs(rows: Sequence[tuple[int, Any]], reported: Sequence[_Told]) -> list[Any]:
    """The items of dicts whose keys are no words."""
    keys: list[Any] = []
    for _, node in rows:
        keys += [key for key, _ in node["$dict"] if key not in keys]
    return [
        [key, _one([(rank, value) for rank, node in rows for own, value in node["$dict"] if own == key], reported)]
        for key in keys
    ]


def _names(node: Any) -> Iterator[str]:
    """The tensors that are named in `node`."""
    if isinstance(node, list):
        for each in node:
            yield from _names(each)
    elif isinstance(node, dict):
        for key, each in node.items():
            if key in ("$tensor", "$array"):
                yield each
            else:
                yield from _names(each)
