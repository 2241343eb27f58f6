"""What tells one worker's dataset from another's without running the script's code: how it was split, tensors it holds.

A split or tensors that are drawn from a generator no one has seeded are others in every process. Reading a sample would
run the script's code, so a dataset of the script's own is looked at only for datasets of PyTorch's that it holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from manyhosts.data.identity import Print, Unknown, print_of

ROWS = 8
"""Samples of a `TensorDataset` that are looked at, the first and the last among them."""
_MOST_INDICES = 1 << 16
_DEEPEST = 8


def look_at(dataset: Dataset[Any]) -> Print:
    """Words that must be equal on all workers, and sums that must be near each other; less where less is known."""
    return list(_look(dataset, _DEEPEST))


def _look(dataset: object, deep: int) -> Iterator[str | list[float]]:
    if deep == 0:
        return
    kind = type(dataset)
    if isinstance(dataset, Subset) and kind is Subset:
        yield _split(dataset.indices)
        yield from _look(dataset.dataset, deep - 1)
    elif isinstance(dataset, ConcatDataset) and kind is ConcatDataset:
        for each in dataset.datasets:
            yield from _look(each, deep - 1)
    elif isinstance(dataset, TensorDataset) and kind is TensorDataset:
        yield from _rows(dataset)
    elif isinstance(dataset, Dataset):
        for value in vars(dataset).values():
            if isinstance(value, Dataset):
                yield from _look(value, deep - 1)


def _split(indices: Any) -> str:
    """Which samples were chosen: of very many every second, third … is looked at."""
    try:
        chosen = np.asarray(indices[:: max(1, -(-len(indices) // _MOST_INDICES))], dtype=np.int64)
    except Exception:  # a sequence of the script's own kind
        return "split"
    return f"split {hashlib.sha256(chosen.tobytes()).hexdigest()[:16]}"


def _rows(dataset: TensorDataset) -> Iterator[str | list[float]]:
    if len(dataset) == 0:
        return
    rows = np.linspace(0, len(dataset) - 1, min(ROWS, len(dataset))).astype(int).tolist()
    for tensor in dataset.tensors:
        try:
            for row in rows:  # each a view: what is copied in threads may not be forked from any more
                yield from print_of(tensor[row])
        except (Unknown, RuntimeError, NotImplementedError):  # rows of sparse tensors are none
            yield "tensor"
