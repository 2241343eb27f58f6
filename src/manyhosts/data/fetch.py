"""Samples by index, collated, with random numbers of each sample and of each batch from an address of its own.

Three ways, the fastest that gives the same samples: tensors are indexed at once; a dataset with `__getitems__` is asked
for all indices at once, unless it draws random numbers in there; every other dataset is read sample by sample, each
under its own seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from manyhosts import refusals
from manyhosts.data import randomness
from manyhosts.data.order import Indices
from manyhosts.errors import DataError, ManyhostsError

Collate = Callable[[list[Any]], Any]


class Fetcher:
    """Reads batches of one dataset. Travels to loader processes, so it holds plain things only."""

    def __init__(self, dataset: Dataset[Any], *, seed: int, name: str, collate: Collate | None = None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.name = name
        """What the dataset is called in errors: train, validation, test."""
        self.collate = collate or default_collate
        self.tensors = tensors_of(dataset) if collate is None else None
        self.at_once = self.tensors is None and hasattr(dataset, "__getitems__")

    def __call__(self, epoch: int, indices: Indices) -> Any:
        """The batch of samples `indices`, as the dataset gives them in `epoch`.

        Raises:
            DataError: the dataset raised, or its samples cannot be put together.
        """
        if self.tensors is not None:
            chosen = torch.from_numpy(indices)
            tensors, subset = self.tensors
            chosen = chosen if subset is None else subset[chosen]
            return [rows_of(tensor, chosen) for tensor in tensors]
        samples = self._at_once(indices) if self.at_once else None
        draws = samples is None or self.collates
        with randomness.kept() if draws else nullcontext():
            return self._collated(epoch, indices, self._one_by_one(epoch, indices) if samples is None else samples)

    @property
    def collates(self) -> bool:
        """Whether batches are made by a function of the script's."""
        return self.collate is not default_collate

    def samples(self, epoch: int, indices: Indices) -> list[Any]:
        """The samples of `indices`, as the dataset gives them in `epoch`, each by itself.

        Raises:
            DataError: the dataset raised.
        """
        with randomness.kept():
            at_once = self._at_once(indices) if self.at_once else None
            return self._one_by_one(epoch, indices) if at_once is None else at_once

    def _collated(self, epoch: int, indices: Indices, samples: list[Any]) -> Any:
        try:
            return collated(self.collate, samples, self.seed, epoch, int(indices[0]))
        except Exception as cause:
            own = self.collate is not default_collate
            place = refusals.place_in_script(cause) or "mh.Data(collate=…)"
            said = f"{type(cause).__name__}: {cause}" if own else str(cause)
            raise DataError(
                f"samples {_few(indices)} of the {self.name} set cannot be put into one batch: {said}",
                where=place if own else "collate",
                fix="mend what collate does with these samples"
                if own
                else "make every sample the same shape and type, or pass mh.Data(collate=…)",
            ) from cause

    def _at_once(self, indices: Indices) -> list[Any] | None:
        """The samples, or None where the dataset drew random numbers for them."""
        before = randomness.states()
        try:
            samples: list[Any] = self.dataset.__getitems__(indices.tolist())  # type: ignore[attr-defined]
        except Exception as cause:
            raise self._unreadable(f"samples {_few(indices)}", cause) from cause
        if isinstance(samples, list | tuple) and len(samples) != len(indices):
            raise DataError(
                f"asked for {len(indices)} samples of the {self.name} set, {_few(indices)}, it gave {len(samples)}",
                where=f"{type(self.dataset).__name__}.__getitems__",
                fix="give one sample for each index, in their order; leave samples out in the dataset's length",
            )
        if randomness.drawn_since(before):
            # Its random numbers would depend on which samples are fetched together, so on the number of workers.
            self.at_once = False
            return None
        return samples

    def _one_by_one(self, epoch: int, indices: Indices) -> list[Any]:
        samples = []
        for index in indices.tolist():
            randomness.seed_all(self.seed, randomness.SAMPLE, epoch, index)
            try:
                samples.append(self.dataset[index])
            except Exception as cause:
                raise self._unreadable(f"sample {index}", cause) from cause
        return samples

    def _unreadable(self, which: str, cause: Exception) -> ManyhostsError:
        if isinstance(cause, ManyhostsError):
            return cause
        if (refused := refusals.explained(cause)) is not None:
            return refused
        place = refusals.place_in_script(cause)
        return DataError(
            f"{which} of the {self.name} set cannot be read: {type(cause).__name__}: {cause}",
            where=f"{type(self.dataset).__name__}.__getitem__" + (f", {place}" if place else ""),
            fix="read that sample alone to see the entire error",
        )


def collated(collate: Collate, samples: list[Any], seed: int, epoch: int, first: int) -> Any:
    """`samples` as one batch. What `collate` draws has the address of the batch: `first`, its first sample's number.

    A sample comes once in an epoch, so no two batches have the same first one. PyTorch's own `default_collate` draws
    nothing, and goes without.
    """
    if collate is not default_collate:
        randomness.seed_all(seed, randomness.COLLATE, epoch, first)
    return collate(samples)


def tensors_of(dataset: Dataset[Any]) -> tuple[Sequence[torch.Tensor], torch.Tensor | None] | None:
    """The tensors behind `dataset` and the rows of them that it has, where it is nothing but tensors."""
    if type(dataset) is TensorDataset:
        return dataset.tensors, None
    if type(dataset) is Subset and (inner := tensors_of(dataset.dataset)) is not None:
        tensors, rows = inner
        chosen, length = torch.as_tensor(dataset.indices, dtype=torch.int64), len(dataset.dataset)  # type: ignore[arg-type]
        if len(chosen) and not -length <= int(chosen.min()) <= int(chosen.max()) < length:
            return None  # which says where it is read
        if rows is not None:
            return tensors, rows[chosen]
        return tensors, torch.where(chosen < 0, chosen + len(tensors[0]), chosen)
    return None


def rows_of(tensor: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """`tensor[chosen]`, for `chosen` of shape (rows,) on the CPU.

    `index_select` copies full rows, five times as fast for small images. It gives contiguous tensors and wants both
    on one device, so others are indexed.
    """
    if tensor.is_cpu and tensor.is_contiguous():
        return tensor.index_select(0, chosen)
    return tensor[chosen]


def _few(indices: Indices) -> str:
    shown = ", ".join(map(str, indices[:8].tolist()))
    return f"[{shown}, …]" if len(indices) > 8 else f"[{shown}]"
