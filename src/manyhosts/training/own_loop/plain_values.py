"""Values that modules keep in plain attributes and a step changes: no snapshot has them, no undone step puts them back.

Such as the scores by which AdaLoRA gives out its ranks. Looked for in the first steps, so that it is said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_DEEPEST = 4
_OWN = ("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Attributes of every module; what else begins with `_` is PyTorch's own, too."""


def plain_values(model: nn.Module) -> dict[str, str]:
    """Path → a digest of each plain value: numbers, texts and tensors, alone, in lists and dicts, or in objects."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _OWN or name.startswith("_"):
                continue
            place = f"{path}.{name}" if path else name
            digest = hashlib.sha256()
            for piece in _pieces(value, _DEEPEST):
                digest.update(piece)
            found[place] = digest.hexdigest()
    return found


def _pieces(value: Any, deep: int) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif value is None or isinstance(value, bool | int | float | complex | str):
        yield repr(value).encode()
    elif deep and isinstance(value, Mapping):
        for key, each in value.items():
            yield repr(key).encode() if isinstance(key, str | int) else b""
            yield from _pieces(each, deep - 1)
    elif deep and isinstance(value, list | tuple):
        for each in value:
            yield from _pieces(each, deep - 1)
    elif deep and not isinstance(value, nn.Module | type) and not callable(value):
        for name, each in getattr(value, "__dict__", {}).items():
            yield name.encode()
            yield from _pieces(each, deep - 1)


def said(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """What is to be said of the difference; empty where there is none."""
    changed = [name for name in after if before.get(name) != after[name]]
    if not changed:
        return ""
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return (
        f"the step changes {changed[0]}{more}, a plain attribute of a model: snapshots do not have it, and it is not "
        "put back where a step is made again; keep it in a buffer or in run.state, or a resumed run departs"
    )
