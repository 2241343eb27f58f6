"""The one order of the samples, and how a global batch is cut: both know nothing of workers, loaders or restarts.

Epoch e of seed s is one permutation. Step k takes the next `batch` samples of it, the last partial batch included. The
samples of a step are cut into contiguous parts, as evenly as integers allow: the first ones get one more. Contiguous,
because then a worker with several neighbouring parts reads one range, and parts in order are the batch in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhosts.data.drawing import Weights, drawn

Indices = NDArray[np.int64]


class Position(NamedTuple):
    """How far the data was read: `sample` samples of epoch `epoch`, both counted from 0."""

    epoch: int = 0
    sample: int = 0


def permutation(
    length: int, *, seed: int, epoch: int, shuffle: bool = True, generator: np.random.RandomState | None = None
) -> Indices:
    """The order of `length` samples in `epoch`; shape `(length,)`.

    Made by NumPy's legacy generator, whose stream NumPy has promised never to change (NEP 19): a run can be resumed
    and reproduced under a newer version. `generator`: one to seed, which takes a tenth of the time to make one.
    """
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    generator = generator or np.random.RandomState(0)
    generator.seed([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch])
    return generator.permutation(length).astype(np.int64)


def bounds(count: int, parts: int, index: int) -> tuple[int, int]:
    """Begin and end of part `index` of `count` things cut into `parts`, sizes differing by at most one."""
    size, rest = divmod(count, parts)
    begin = index * size + min(index, rest)
    return begin, begin + size + (index < rest)


class Order:
    """Which samples each step takes, for a dataset of known length."""

    def __init__(
        self,
        length: int,
        *,
        batch: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        weights: Weights | None = None,
        own: Callable[[int], Indices] | None = None,
    ) -> None:
        """`weights`: by which samples are drawn, with repeats; `own` says those of an epoch; neither: each once."""
        self.weights, self._own = weights, own
        self.repeats = weights is not None or own is not None
        """Whether a sample may come more than once in an epoch."""
        self.length = length
        self.batch, self.drop_last = batch, drop_last
        self.seed = seed
        self.shuffle = shuffle
        self.used = length // batch * batch if drop_last else length
        """Samples of an epoch that are taken."""
        self.steps_per_epoch = -(-self.used // batch)
        self._behind = length - batch + 1 if drop_last else length
        """No step begins at this sample or after it."""
        self._epoch = -1
        self._generator = np.random.RandomState(0)
        self._permutation: Indices = np.empty(0, dtype=np.int64)

    def at(self, position: Position) -> Indices:
        """The samples of the step that begins at `position`; shape `(batch,)`, or fewer at the end of an epoch."""
        if position.epoch != self._epoch:
            self._permutation = self._of_epoch(position.epoch)
            self._epoch = position.epoch
        return self._permutation[position.sample : position.sample + self.batch]

    def _of_epoch(self, epoch: int) -> Indices:
        if self._own is not None:
            return self._own(epoch)
        if self.weights is not None:
            return drawn(self.weights, seed=self.seed, epoch=epoch)
        return permutation(self.length, seed=self.seed, epoch=epoch, shuffle=self.shuffle, generator=self._generator)

    def after(self, position: Position) -> Position:
        """Where the step that begins at `position` ends; the end of an epoch is the beginning of the next."""
        sample = position.sample + self.batch
        return self.begin(Position(position.epoch, sample))

    def begin(self, position: Position) -> Position:
        """Where the next step begins: there, or with the next epoch where too few samples are left for one.

        A position may be one that steps of another size have led to.
        """
        return position if position.sample < self._behind else Position(position.epoch + 1, 0)
