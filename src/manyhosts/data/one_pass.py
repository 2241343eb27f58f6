"""One pass over a stream: its samples in the order in which they come, each drawn under its own seed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from manyhosts.data import randomness

_END = object()


class Pass:
    """Reads a dataset once. Shards take the addresses `first`, `first + stride`, … for their random numbers."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        epoch: int,
        first: int = 0,
        stride: int = 1,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`state`: what `state` gave in an earlier pass, from where this one continues if the dataset can."""
        self.seed, self.dataset, self.epoch, self.first, self.stride = seed, dataset, epoch, first, stride
        self.read = 0
        """Samples read so far."""
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if state is not None and "dataset" in state and hasattr(dataset, "load_state_dict"):
            dataset.load_state_dict(state["dataset"])
            self.read = int(state["read"])
        with randomness.kept():
            randomness.seed_all(seed, randomness.PASS, epoch, first)  # what `__iter__` draws: an order, say
            self.samples = iter(dataset)

    def skip_to(self, read: int) -> bool:
        """Go to where `read` samples have been read. Whether there are so many."""
        # Read, not jumped over: what it draws on the way (a shuffle buffer, say) must be the same.
        for _ in self._next(read - self.read):
            pass
        return self.read >= read

    def take(self, count: int) -> list[Any]:
        """The next `count` samples, or as many as are left."""
        return list(self._next(count))

    def _next(self, count: int) -> Iterator[Any]:
        with randomness.kept():
            for _ in range(count):
                randomness.seed_all(self.seed, randomness.SAMPLE, self.epoch, self.read * self.stride + self.first)
                sample = next(self.samples, _END)
                if sample is _END:
                    return
                self.read += 1
                yield sample

    def state(self) -> dict[str, Any]:
        """What it takes to continue after the samples taken so far."""
        state: dict[str, Any] = {"read": self.read}
        if hasattr(self.dataset, "state_dict"):
            state["dataset"] = copy.deepcopy(self.dataset.state_dict())  # it may change as more is read
        return state
