"""What identifies a model, and a set of weights."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn

from manyhosts.communication.holding import UNCUT, Holding
from manyhosts.snapshot.tensors import bytes_of, dtype_name

Fingerprint = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name → (dtype, shape) of every parameter and persistent buffer."""


_LANES = 1 << 15
"""Words of eight bytes that are multiplied and added at once: 256 KiB, which stay in a cache."""
_ROWS = 1 << 7
"""How many times that is taken at once on a GPU, which needs room for the products: 32 MiB."""


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


def weights_sha256(model: nn.Module, holding: Holding = UNCUT) -> str:
    """The sha256 of all parameters and persistent buffers in name order: equal hash, equal bits. Pass the bare one.

    `holding`: what this worker holds of them. Where that is not all, every worker calls this, and one full tensor
    after another is on each of them.
    """
    return tensors_sha256(_tensors(model), holding)


def tensors_sha256(tensors: Mapping[str, Tensor], holding: Holding = UNCUT) -> str:
    """The sha256 over name, dtype, shape and bytes of each tensor, in name order, wherever they are kept."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = holding.full(tensors[name]).detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(f"{name}\0{dtype_name(tensor.dtype)}\0{tuple(tensor.shape)}\0".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


@torch.no_grad()
def tensor_checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name → a checksum of dtype, shape and bytes, 16 hexadecimal digits, the same on every device and machine.

    It is made on the device where a tensor is, and about ten times as fast as a sha256: for comparing the same tensor
    on several workers or at several moments. A change of any one word of eight bytes changes it for certain, any other
    change but for 1 in 2**64. It is no protection against somebody who wants two tensors to have the same one.
    """
    sums = {name: _weighted_sum(tensor.detach()) for name, tensor in tensors.items()}
    read: dict[str, int] = {}
    for device in dict.fromkeys(each.device for each in sums.values()):
        mine = {name: each for name, each in sums.items() if each.device == device}
        read |= dict(zip(mine, torch.stack(list(mine.values())).tolist(), strict=True))  # one wait for each device
    return {name: f"{(read[name] ^ _kind(tensor)) & (1 << 64) - 1:016x}" for name, tensor in tensors.items()}


def combined(checksums: Mapping[str, str]) -> int:
    """One number of 63 bits for all of `checksums` with their names: equal ones are those of equal tensors."""
    digest = hashlib.sha256("\0".join(f"{name} {checksums[name]}" for name in sorted(checksums)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _kind(tensor: Tensor) -> int:
    text = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}".encode()
    return zlib.crc32(text) << 32 | zlib.crc32(text[::-1])


def _weighted_sum(tensor: Tensor) -> Tensor:
    """The sum over the tensor's words of eight bytes, each times an odd number of its own, modulo 2**64; shape ()."""
    words = _words_of(tensor.resolve_conj().resolve_neg().contiguous())
    rows, rest = words.numel() // _LANES, words.numel() % _LANES
    factors = _factors(words.device, _LANES)
    total = _products_summed(words[rows * _LANES :], factors[:rest])
    if rows:
        total = total * _factors(words.device, 1, skip=rows)[0]
    for first in range(0, rows, _ROWS):
        last = min(first + _ROWS, rows)
        some = words[first * _LANES : last * _LANES].view(last - first, _LANES)
        sums = some @ factors if words.device.type == "cpu" else (some * factors).sum(1)
        total = total + _products_summed(sums, _factors(words.device, last - first, skip=first))
    return total


def _products_summed(words: Tensor, factors: Tensor) -> Tensor:
    # PyTorch has no product of integers on a GPU that adds them up at once.
    return torch.dot(words, factors) if words.device.type == "cpu" else (words * factors).sum()


def _words_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor as int64, shape (words,), the last word filled up with zeros."""
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        full = flat.new_zeros(-(-flat.numel() // 8) * 8)
        full[: flat.numel()] = flat
        flat = full
    return flat.view(torch.int64)


@lru_cache(maxsize=64)
def _factors(device: torch.device, count: int, *, skip: int = 0) -> Tensor:
    """`count` odd numbers without a pattern, int64: those that follow the first `skip`."""
    places = torch.arange(skip + 1, skip + count + 1, dtype=torch.int64)
    mixed = places * -7046029254386353131  # the finaliser of SplitMix64, in arithmetic that wraps around
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    return ((mixed ^ (mixed >> 27)) | 1).to(device)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
