"""Weights to begin with, from a file or a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from manyhosts.errors import ConfigError
from manyhosts.snapshot.fingerprint import difference
from manyhosts.snapshot.weights import load
from manyhosts.training.build import Parts
from manyhosts.training.cut_state import put_cut
from manyhosts.training.held import load_model

_FIX = (
    "give a snapshot folder, a run directory with a best/ or snapshots/, a .safetensors file, or a .pt of a state_dict"
)


def load_initial(parts: Parts, path: Path) -> None:
    """Put the weights at `path` into the model of `parts`. Nothing is unpickled but tensors.

    Raises:
        ConfigError: there are none, they cannot be read, or they are of another model.
    """
    weights = _read(path)
    found = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in weights.items()}
    if found.keys() != (wanted := parts.fingerprint()).keys() or any(
        found[name][1] != tuple(wanted[name][1]) for name in found
    ):
        raise ConfigError(
            f"these weights are of another model: {difference(found, wanted)}",
            where=f"init_from={str(path)!r}",
            fix="give the model that they were saved from",
        )
    if parts.strategy.traits.holds_whole_model:
        load_model(parts.model, weights)
    else:
        put_cut(parts.model.state_dict(), weights, parts.strategy.holding)


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return load(path)
    if not path.exists():
        raise ConfigError(
            "cannot read the weights: there is no such file or folder", where=f"init_from={str(path)!r}", fix=_FIX
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as cause:  # of many kinds: no file, no access, half-written, or more than tensors in it
        raise _unreadable(path, cause) from cause
    inner = weights.get("state_dict", weights) if isinstance(weights, dict) else None
    if not isinstance(inner, dict) or not all(isinstance(value, torch.Tensor) for value in inner.values()):
        raise ConfigError("the file holds no state_dict", where=f"init_from={str(path)!r}", fix=_FIX)
    return inner


def _unreadable(path: Path, cause: Exception) -> ConfigError:
    reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    return ConfigError(f"cannot read the weights: {reason}", where=f"init_from={str(path)!r}", fix=_FIX)
