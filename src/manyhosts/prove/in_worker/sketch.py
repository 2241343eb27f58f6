"""A tensor in a few numbers: enough to see that two differ, and by how much, without keeping either.

The sums of its values, each with a fixed sign, in 16 buckets. The root of the summed squares of the differences between
two such sketches estimates the norm of the difference of the tensors; for up to 16 values it is that norm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from manyhosts.communication.dtensors import gathered
from manyhosts.snapshot.tensors import bytes_of

BUCKETS, _ROW = 16, 4096
_SIGNS = (torch.randint(0, 2, (_ROW,), generator=torch.Generator().manual_seed(0)) * 2 - 1).double()

Facts = list[Any]
"""[hash of the bytes, norm, 16 sums]"""


def facts_of(tensor: Tensor) -> Facts:
    """Hash, norm and sketch of one tensor, whatever its type and device.

    Of a DTensor those of the full tensor: all workers that hold parts of it call this together.
    """
    value = tensor.detach()
    if isinstance(value, DTensor):
        value = gathered(value)
    if value.is_sparse:
        value = value.coalesce().to_dense()
    value = value.cpu().resolve_conj().resolve_neg().contiguous()
    digest = digest_of(value)
    flat = (torch.view_as_real(value) if value.is_complex() else value).reshape(-1).double()
    norm = float(flat.norm()) if len(flat) else 0.0
    rows = -(-len(flat) // _ROW)
    if rows > 1:
        padded = torch.zeros(rows * _ROW, dtype=torch.float64)
        padded[: len(flat)] = flat
        signed = (padded.view(rows, _ROW) * _SIGNS).sum(0)
    else:
        signed = torch.zeros(-(-max(len(flat), 1) // BUCKETS) * BUCKETS, dtype=torch.float64)
        signed[: len(flat)] = flat * _SIGNS[: len(flat)]
    return [digest, norm, *signed.view(-1, BUCKETS).sum(0).tolist()]


def digest_of(value: Tensor) -> str:
    """Equal for equal bits; `value` is contiguous and on the CPU."""
    content = bytes_of(value) if value.numel() else b""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def facts_of_all(tensors: Mapping[str, Tensor]) -> dict[str, Facts]:
    """The facts of each."""
    return {name: facts_of(tensor) for name, tensor in tensors.items()}


def digest_of_sample(leaves: Iterable[Any]) -> str:
    """One hash of the tensors, arrays, numbers and words that a sample is made of."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            digest.update(digest_of(leaf.detach().cpu().contiguous()).encode())
        elif hasattr(leaf, "tobytes"):
            digest.update(leaf.tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def leaves_of(batch: Any) -> list[Any]:
    """What is at the ends of lists, tuples and mappings."""
    if isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in leaves_of(value)]
    if isinstance(batch, list | tuple):
        return [leaf for value in batch for leaf in leaves_of(value)]
    if isinstance(batch, str | bytes | int | float | bool | Tensor) or hasattr(batch, "tobytes") or batch is None:
        return [batch]
    return [leaf for leaf in vars(batch).values() if isinstance(leaf, Tensor)] if hasattr(batch, "__dict__") else []


def digests_of_rows(batch: Any, count: int) -> list[str]:
    """The hash of each of the `count` samples in a batch: of what its tensors and lists have in that row."""
    columns = [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count]
    return [digest_of_sample(column[row] for column in columns) for row in range(count)] if columns else []
