"""A few numbers that distinguish the first samples of one stream from those of another, whatever machine has read them.

Words, labels and shapes must be equal. Of floats and of bytes, such as pixels, the mean counts, and nearly so:
two hosts may decode a picture, or compute a logarithm, with other last digits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

SAMPLES = 16
"""How many are looked at."""
_NEARLY = 1e-3
_MOST_ELEMENTS = 4096
"""Of one tensor."""


def numbers_of(samples: Sequence[Any]) -> list[float]:
    """Two numbers for each of the first `SAMPLES` samples: one that must be equal, and one nearly; -1 where none is."""
    found: list[float] = []
    for sample in samples[:SAMPLES]:
        exact, sums, count = 0, 0.0, 0
        for leaf in _leaves(sample):
            if isinstance(leaf, torch.Tensor | np.ndarray):
                array = leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf
                exact = zlib.crc32(f"{leaf.dtype}{tuple(leaf.shape)}".encode(), exact)
                tensor = torch.as_tensor(array).reshape(-1)[:_MOST_ELEMENTS]
                if tensor.is_floating_point() or tensor.dtype == torch.uint8:
                    sums, count = sums + float(tensor.double().abs().sum()), count + tensor.numel()
                else:
                    exact = zlib.crc32(tensor.contiguous().numpy().tobytes(), exact)
            elif isinstance(leaf, float):
                sums, count = sums + abs(leaf), count + 1
            elif isinstance(leaf, str | bytes | int):
                exact = zlib.crc32(repr(leaf).encode(), exact)
        found += [float(exact), sums / count if count else 0.0]
    return found + [-1.0] * (2 * SAMPLES - len(found))


def are_alike(first: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two lists of `numbers_of` may be of the same samples."""
    if list(first[::2]) != list(other[::2]):
        return False
    return all(
        abs(one - two) <= _NEARLY * max(abs(one), abs(two)) or (one != one and two != two)  # NaN
        for one, two in zip(first[1::2], other[1::2], strict=True)
    )


def _leaves(sample: Any) -> Iterator[Any]:
    if isinstance(sample, Mapping):
        for key in sample:
            yield from (key, *_leaves(sample[key]))
    elif isinstance(sample, list | tuple):
        for each in sample:
            yield from _leaves(each)
    else:
        yield sample
