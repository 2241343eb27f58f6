"""Which worker writes which tensors of a state that all workers have."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import Tensor

from manyhosts.communication.parts import TensorPart

_CUT_ABOVE_BYTES = 1 << 20
"""Below that a file more to look into costs more than a worker that writes a little longer."""


def share_out(
    tensors: Mapping[str, Tensor], workers: int, *, cut_above: int = _CUT_ABOVE_BYTES
) -> list[dict[str, TensorPart]]:
    """The parts of each worker, about equal in bytes: the largest first, each to the worker that has least so far.

    A tensor is in one share, unless it is larger than an equal share, and than `cut_above` bytes: then it is cut along
    its first dimension. Looks at sizes and order only, so every worker that has the same state comes to the same
    answer. The parts are views of the tensors.
    """
    shares: list[dict[str, TensorPart]] = [{} for _ in range(workers)]
    loads = [0] * workers
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    fair = max(-(-sum(sizes.values()) // workers), cut_above)
    for name in sorted(sizes, key=lambda name: -min(sizes[name], fair)):  # stable: equal ones keep their order
        for part in _cut(tensors[name], sizes[name], fair):
            least = min((worker for worker in range(workers) if name not in shares[worker]), key=loads.__getitem__)
            shares[least][name] = part
            loads[least] += sizes[name] if part.is_all else part.local.nbytes
    return shares


def _cut(tensor: Tensor, size: int, fair: int) -> list[TensorPart]:
    """`tensor`, of `size` bytes, in as few parts of about equal size as keep each, if rows do, within `fair` bytes.

    The largest comes first: each goes to another worker, and no share gets larger than another by more than a part.
    """
    if size <= fair or not tensor.dim():
        return [TensorPart.all_of(tensor)]
    shape = tuple(tensor.shape)
    count = min(-(-size // fair), shape[0])
    bounds = [index * shape[0] // count for index in range(count + 1)]
    parts = [TensorPart(tensor[begin:end], (begin, *[0] * (len(shape) - 1)), shape) for begin, end in pairwise(bounds)]
    return sorted(parts, key=lambda part: -part.local.nbytes)
