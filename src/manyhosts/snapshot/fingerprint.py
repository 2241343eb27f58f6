"""What tells one model from another, and one set of weights from another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor, nn

from manyhosts.snapshot.tensors import bytes_of, dtype_name

Fingerprint = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name → (dtype, shape) of every parameter and persistent buffer."""


def fingerprint(model: nn.Module) -> Fingerprint:
    """What a snapshot must match to be one of `model`. Pass the bare module, not one that a strategy has wrapped."""
    return {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in _tensors(model).items()}


def difference(saved: Fingerprint, wanted: Fingerprint) -> str:
    """The first difference between two fingerprints, as a sentence; nothing where there is none."""
    for name, (dtype, shape) in wanted.items():
        if name not in saved:
            return f"it is of another model: it has no {name}, which this model has as {_words(dtype, shape)}"
        if tuple(saved[name]) != (dtype, shape):
            return (
                f"it is of another model: its {name} is {_words(*saved[name])}, this model's is {_words(dtype, shape)}"
            )
    for name, (dtype, shape) in saved.items():
        if name not in wanted:
            return f"it is of another model: it has {name} as {_words(dtype, shape)}, which this model has not"
    return ""


def _words(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} of shape ({', '.join(str(side) for side in shape)})"


def weights_sha256(model: nn.Module) -> str:
    """The sha256 of all parameters and persistent buffers in name order: equal hash, equal bits. Pass the bare one."""
    return tensors_sha256(_tensors(model))


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 over name, dtype, shape and bytes of each tensor, in name order, wherever they are kept."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(f"{name}\0{dtype_name(tensor.dtype)}\0{tuple(tensor.shape)}\0".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
