"""The forward passes over an entire dataset, for an evaluation or a prediction: the same on any number of workers.

The samples are cut into the batches of a plain loader, which make up parts, by a rule that knows only how many samples
there are. Each part is passed through alone, in the same forward passes whichever worker does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import numpy as np

from manyhosts.communication.collectives import Collectives
from manyhosts.config.settings import Settings
from manyhosts.data import randomness
from manyhosts.data.data import Data
from manyhosts.data.fetch import Fetcher
from manyhosts.data.order import Indices, bounds
from manyhosts.data.steps import Loader, mapped
from manyhosts.device import is_asynchronous
from manyhosts.loss.precision import Precision
from manyhosts.strategies.strategy import Strategy

_MOST_PARTS = 128
_SHARED_BY, _FEW = 16, 32
"""Unless a script says how many samples a pass has, up to 16 workers share a small set, but no pass has fewer than some
32 for that: metrics that tell logits from probabilities look at one batch, and a loss may compare the rows of one.
"""


def samples_of_a_pass(samples: int, most: int) -> int:
    """How many of a set's `samples` a pass has, where it may have so many at most; the last one may have fewer."""
    passes = max(-(-samples // most), min(_SHARED_BY, samples // _FEW), 1)
    return max(1, -(-samples // passes))


class ForwardPasses:
    """Those over one dataset."""

    def __init__(
        self,
        fetcher: Fetcher,
        samples: int,
        *,
        batch: int,
        loader_workers: int | Literal["auto"],
        world: Collectives,
        context: Callable[[], AbstractContextManager[Any]],
        together: Collectives | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`batch`: samples of each pass; the last one may have fewer. `world`: those that read different samples.
        `context`: of each pass.

        `together`: those that must make equally many passes, since they exchange something in each; None where no one
        does. `on_progress` is called after every pass, so that no one takes a long evaluation for a hang.
        """
        self.samples, self.batch, self.world, self.together = samples, batch, world, together
        self.name, self.seed, self.context, self.on_progress = fetcher.name, fetcher.seed, context, on_progress
        self.loader = Loader(fetcher, processes=loader_workers, pin=is_asynchronous(world.device))

    @classmethod
    def over(
        cls,
        dataset: Any,
        name: str,
        *,
        data: Data,
        settings: Settings,
        strategy: Strategy,
        on_progress: Callable[[], None],
    ) -> ForwardPasses:
        """Those over `dataset`, which errors call by `name`, read as those of `data` are."""
        seed = randomness.seed_at(settings.seed, randomness.EVALUATION)
        # A pure function of the settings, never of the number of workers: the forward passes must be the same.
        most = settings.micro_batch_size or settings.batch_size or cast(int, settings.batch_size_per_worker)
        return cls(
            Fetcher(dataset, seed=seed, name=name, collate=data.collate),
            len(dataset),
            batch=settings.evaluation_batch_size or samples_of_a_pass(len(dataset), most),
            loader_workers=settings.loader_workers,
            world=strategy.mesh.data,
            context=Precision(settings.precision, strategy.mesh.world.device).context,
            together=strategy.passing(),
            on_progress=on_progress,
        )

    @property
    def parts(self) -> int:
        """Into how many parts the set is cut."""
        return min(self._passes, _MOST_PARTS)

    @property
    def _passes(self) -> int:
        return -(-self.samples // self.batch)

    def shares(self) -> list[range]:
        """The parts of each worker, by rank."""
        return [range(*bounds(self.parts, self.world.size, rank)) for rank in range(self.world.size)]

    def bounds(self, part: int) -> tuple[int, int]:
        """The first sample of a part, and the one behind its last."""
        first, end = bounds(self._passes, self.parts, part)
        return first * self.batch, min(end * self.batch, self.samples)

    def pieces(self, part: int) -> list[Indices]:
        """The samples of each pass of one part."""
        begin, end = self.bounds(part)
        return [np.arange(start, min(start + self.batch, end)) for start in range(begin, end, self.batch)]

    def ghosts(self, shares: Sequence[Sequence[int]]) -> list[Indices]:
        """What this worker computes besides its own, where all must make equally many passes: the first sample.

        `shares`: the parts that each worker passes through, by rank. What comes out counts nothing.
        """
        passes = [sum(len(range(*self.bounds(part), self.batch)) for part in share) for share in shares]
        return [np.arange(1)] * (max(passes) - passes[self.world.rank]) if self.together is not None else []

    def fetched(self, pieces: Iterator[Indices]) -> Iterator[Any]:
        """The batch of each of `pieces`, on the CPU."""
        return self.loader.batches((0, piece) for piece in pieces)

    def on_device(self, on_host: Any, piece: Indices) -> Any:
        """The batch of `piece` where it is computed, with the random numbers of its address: a model may sample."""
        batch = mapped(on_host, lambda tensor: tensor.to(self.world.device, non_blocking=True))
        randomness.seed_compute(self.seed, randomness.COMPUTE, int(piece[0]))
        return batch
