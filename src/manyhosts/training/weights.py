"""Weights to begin with, from a file or a snapshot."""

from __future__ import annotations

from pathlib import Path

from manyhosts.errors import ConfigError
from manyhosts.snapshot.fingerprint import difference
from manyhosts.snapshot.weights import from_file, load
from manyhosts.training.build import Parts
from manyhosts.training.cut_state import put_cut
from manyhosts.training.held import load_model


def load_initial(parts: Parts, path: Path) -> None:
    """Put the weights at `path` into the model of `parts`. Nothing is unpickled but tensors.

    Raises:
        ConfigError: there are none, they cannot be read, or they are of another model.
    """
    where = f"init_from={str(path)!r}"
    weights = load(path) if path.is_dir() else from_file(path, where=where)
    found = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in weights.items()}
    if found.keys() != (wanted := parts.fingerprint()).keys() or any(
        found[name][1] != tuple(wanted[name][1]) for name in found
    ):
        raise ConfigError(
            f"these weights are of another model: {difference(found, wanted)}",
            where=where,
            fix="give the model that they were saved from",
        )
    if parts.strategy.traits.holds_whole_model:
        load_model(parts.model, weights)
    else:
        put_cut(parts.model.state_dict(), weights, parts.strategy.holding)
