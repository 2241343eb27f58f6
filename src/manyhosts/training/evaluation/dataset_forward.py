"""The forward passes over an entire dataset, for an evaluation or a prediction: the same on any number of workers.

The samples are cut into parts by a rule that knows only how many there are. Each part is passed through alone, in the
same forward passes whichever worker does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, cast

import numpy as np
from torch import nn

from manyhosts.communication.collectives import Collectives
from manyhosts.config.settings import Settings
from manyhosts.data import randomness
from manyhosts.data.data import Data
from manyhosts.data.fetch import Fetcher
from manyhosts.data.order import Indices, bounds
from manyhosts.data.steps import Loader, mapped
from manyhosts.device import is_asynchronous
from manyhosts.strategies.strategy import Strategy
from manyhosts.training.setup.precision import Precision
from manyhosts.training.setup.trained_module import collective_forward

FEWEST_PARTS, MOST_PARTS = 16, 128
"""A set is cut into at least 16 parts (or one per sample), so that up to 16 workers share even a small one."""


def number_of_parts(samples: int, batch: int) -> int:
    """Into how many parts a set is cut; a pure function of the set and the batch."""
    return min(samples, max(FEWEST_PARTS, min(-(-samples // batch), MOST_PARTS)))


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
        """`batch`: most samples in one pass. `world`: those that read different samples. `context`: of each pass.

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
        batch = settings.evaluation_batch_size or settings.micro_batch_size or settings.batch_size
        return cls(
            Fetcher(dataset, seed=seed, name=name, collate=data.collate),
            len(dataset),
            batch=batch or cast(int, settings.batch_size_per_worker),
            loader_workers=settings.loader_workers,
            world=strategy.mesh.data,
            context=Precision(settings.precision, strategy.mesh.world.device).context,
            together=strategy.passing(),
            on_progress=on_progress,
        )

    @property
    def parts(self) -> int:
        """Into how many parts the set is cut."""
        return number_of_parts(self.samples, self.batch)

    def shares(self) -> list[range]:
        """The parts of each worker, by rank."""
        return [range(*bounds(self.parts, self.world.size, rank)) for rank in range(self.world.size)]

    def pieces(self, part: int) -> list[Indices]:
        """The samples of each pass of one part."""
        begin, end = bounds(self.samples, self.parts, part)
        return [np.arange(start, min(start + self.batch, end)) for start in range(begin, end, self.batch)]

    def count(self, part: int) -> int:
        """How many passes one part has."""
        begin, end = bounds(self.samples, self.parts, part)
        return -(-(end - begin) // self.batch)

    def ghosts(self, turns: list[int]) -> list[Indices]:
        """What this worker computes besides its own, where all must make equally many passes: the first sample.

        `turns`: of how many passes each worker makes, by rank. What comes out counts nothing.
        """
        return [np.arange(1)] * (max(turns) - turns[self.world.rank]) if self.together is not None else []

    def fetched(self, pieces: Iterator[Indices]) -> Iterator[Any]:
        """The batch of each of `pieces`, on the CPU."""
        return self.loader.batches((0, piece) for piece in pieces)

    def on_device(self, on_host: Any, piece: Indices) -> Any:
        """The batch of `piece` where it is computed, with the random numbers of its address: a model may sample."""
        batch = mapped(on_host, lambda tensor: tensor.to(self.world.device, non_blocking=True))
        randomness.seed_compute(self.seed, randomness.COMPUTE, int(piece[0]))
        return batch


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """`model` in evaluation mode, called by all; afterwards every module is back in the mode that it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with collective_forward(model):
            yield
    finally:
        for module in training:
            module.training = True
