"""Batches of any number of samples, as a step would be given them, to compute with again and again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manyhosts.data import randomness
from manyhosts.data.fetch import Fetcher
from manyhosts.data.steps import mapped
from manyhosts.training.setup.build import Components
from manyhosts.training.state.run_state import RunState


class Batches:
    """Of one training set, on the worker's device. A stream gives the samples of its first piece, and no more."""

    def __init__(self, components: Components, state: RunState) -> None:
        self._device = components.world.device
        self._fetcher: Fetcher | None = getattr(getattr(components.batches.source, "loader", None), "fetcher", None)
        self._epoch = state.position.epoch
        self._known: dict[int, Any] = {}
        if self._fetcher is not None:
            self._indices = components.batches.source.order.at(state.position)  # type: ignore[attr-defined]  # one with an index
            self.most = len(self._indices)
        else:
            steps = components.batches.source.steps(state.position, state.stream)
            first = next(steps).fetched(1)[0]
            self._first, self.most = first.batch, len(first.plan.indices)

    def can_be(self, samples: int) -> bool:
        """Whether there can be a batch of so many."""
        if not 1 <= samples <= self.most:
            return False
        return self._fetcher is not None or samples == self.most or _is_cuttable(self._first, self.most)

    def of(self, samples: int) -> Any:
        """A batch of so many samples, the same at every call."""
        if samples not in self._known:
            self._known[samples] = mapped(self._made(samples), lambda tensor: tensor.to(self._device))
        return self._known[samples]

    def _made(self, samples: int) -> Any:
        if self._fetcher is not None:
            with randomness.undisturbed():
                return self._fetcher(self._epoch, self._indices[:samples])
        if samples == self.most:
            return self._first
        return mapped(self._first, lambda tensor: tensor[:samples])

    def forget(self) -> None:
        """Let go of all that was made."""
        self._known.clear()


def _is_cuttable(batch: Any, samples: int) -> bool:
    """Whether every tensor in `batch` has a row for each sample."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    mapped(batch, note)
    return bool(tensors) and all(torch.is_tensor(each) and each.dim() and len(each) == samples for each in tensors)
