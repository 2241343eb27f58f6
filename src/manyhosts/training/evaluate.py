"""Evaluation: each sample once, shared out over the workers, with the same bits on any number of them.

The samples are cut into parts by a rule that knows only how many there are. Each part is evaluated alone, in the same
forward passes whoever does it, and leaves its sum of losses and the states of the metrics (see `metrics`). Those are
sent to every worker and merged in the order of the parts, so no bit depends on who computed what.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from manyhosts.communication.gathering import gather_words
from manyhosts.communication.world import World
from manyhosts.data import randomness
from manyhosts.data.fetch import Fetcher
from manyhosts.data.order import Indices, bounds
from manyhosts.data.steps import Loader, mapped
from manyhosts.device import is_asynchronous
from manyhosts.errors import CommunicationError, ConfigError
from manyhosts.training.compute import Loss, UserStep, one_number, pair, step_values
from manyhosts.training.metrics import Metrics
from manyhosts.training.weighing import Weighing

if TYPE_CHECKING:  # it takes a second to load, so whoever has no metrics does without it
    from torchmetrics import Metric

FEWEST_PARTS, MOST_PARTS = 16, 128
"""A set is cut into at least 16 parts (or one per sample), so that up to 16 workers share even a small one."""


def number_of_parts(samples: int, batch: int) -> int:
    """Into how many parts an evaluation is cut; a pure function of the set and the batch."""
    return min(samples, max(FEWEST_PARTS, min(-(-samples // batch), MOST_PARTS)))


class CutOff(Exception):
    """A worker was asked to stop while it evaluated."""

    def __init__(self, asked: Sequence[float] = ()) -> None:
        super().__init__("asked to stop")
        self.asked = asked
        """How many workers were asked, by each thing that may ask one."""


class Evaluation:
    """Evaluates models on one dataset."""

    def __init__(  # noqa: PLR0913  # made in one place, by name
        self,
        fetcher: Fetcher,
        samples: int,
        *,
        batch: int,
        loader_workers: int | Literal["auto"],
        world: World,
        loss: Loss | None,
        step: UserStep | None,
        metrics: Mapping[str, Metric],
        context: Callable[[], AbstractContextManager[Any]],
        weighing: Weighing | None = None,
    ) -> None:
        """`weighing`: what samples count in the mean; None: each the same."""
        self.samples, self.batch, self.world = samples, batch, world
        self.seed, self.weighing = fetcher.seed, weighing
        self.loader = Loader(fetcher, processes=loader_workers, pin=is_asynchronous(world.device))
        self.loss, self.step, self.context = loss, step, context
        self.metrics = Metrics(metrics, world, seed=fetcher.seed)
        self.parts = number_of_parts(samples, batch)
        self.on_progress: Callable[[], None] = _nothing
        """Called after every forward pass, so that nobody takes a long evaluation for a hang."""

    @torch.no_grad()
    def __call__(self, model: nn.Module, *, asked: Callable[[], Sequence[float]] = tuple) -> dict[str, float]:
        """`loss` (mean over all samples) and every metric, equal on all workers.

        `asked`: what has asked this worker to stop, a number for each thing that may.

        Raises:
            CutOff: a worker was asked, on all of them alike.
        """
        first, last = bounds(self.parts, self.world.size, self.world.rank)
        requests = [list(self._pieces(part)) for part in range(first, last)]
        batches = self.loader.batches((0, piece) for part in requests for piece in part)
        self.metrics.begin()
        with in_evaluation(model), in_evaluation(self.loss) if isinstance(self.loss, nn.Module) else nullcontext():
            parts: list[dict[str, tuple[float, float]]] = []
            with suppress(CutOff):
                for part in requests:
                    parts.append(self._part(model, part, batches, asked))  # what there is stays
        told = {"asked": list(asked()) if len(parts) < len(requests) else [], "parts": parts}
        found = [json.loads(word) for word in gather_words(self.world, json.dumps(told))]
        if who := [each["asked"] for each in found if each["asked"]]:
            raise CutOff([sum(counts) for counts in zip(*who, strict=True)])
        return {**_means([part for each in found for part in each["parts"]]), **self.metrics.values()}

    @torch.no_grad()
    def look(self, model: nn.Module) -> set[str]:
        """Evaluate the first two batches, the same on every worker, and throw away what comes out.

        Whatever cannot work fails here, before training begins, and on all workers alike. Returns the names of the
        values; nothing where the metrics cannot tell them from two batches.
        """
        pieces = [piece for part in range(min(2, self.parts)) for piece in self._pieces(part)][:2]
        batches = self.loader.batches((0, piece) for piece in pieces)
        self.metrics.begin()
        with (
            randomness.kept(),
            in_evaluation(model),
            in_evaluation(self.loss) if isinstance(self.loss, nn.Module) else nullcontext(),
        ):
            names = {*self._part(model, pieces, batches, tuple)}
        metrics = self.metrics.names()
        self.metrics.begin()
        return names | metrics if metrics is not None else set()

    def _pieces(self, part: int) -> Iterator[Indices]:
        """The forward passes of one part."""
        begin, end = bounds(self.samples, self.parts, part)
        for start in range(begin, end, self.batch):
            yield np.arange(start, min(start + self.batch, end))

    def _part(
        self,
        model: nn.Module,
        pieces: Sequence[Indices],
        batches: Iterator[Any],
        asked: Callable[[], Sequence[float]],
    ) -> dict[str, tuple[float, float]]:
        """By name, the sum over the samples of one part that had it, and what these count."""
        self.metrics.begin_part()
        sums: dict[str, Tensor] = {}
        counts: dict[str, float] = {}
        for piece in pieces:
            on_host = next(batches)
            rule = None if self.weighing is None else self.weighing.evaluation
            count = len(piece) if rule is None else float(rule(on_host))
            batch = mapped(on_host, lambda tensor: tensor.to(self.world.device, non_blocking=True))
            randomness.seed_compute(self.seed, randomness.COMPUTE, int(piece[0]))  # a model may sample here, too
            for name, value in self._values(model, batch, int(piece[0])).items():
                # The mean over nothing is no number, and counts nothing.
                weighted = value.double() * count if count else torch.zeros_like(value, dtype=torch.float64)
                sums[name] = sums[name] + weighted if name in sums else weighted
                counts[name] = counts.get(name, 0.0) + count
            self.on_progress()
            self._check_wanted(asked)
        self.metrics.end_part()
        return {name: (value.item(), counts[name]) for name, value in sums.items()}

    def _check_wanted(self, asked: Callable[[], Sequence[float]]) -> None:
        """See that somebody still wants what comes out.

        Raises:
            CommunicationError: workers were lost, so it is all done again.
            CutOff: this worker was asked to stop.
        """
        if any(asked()):
            raise CutOff
        if self.world.is_broken:
            raise CommunicationError(
                "workers were lost during an evaluation",
                where="recovery",
                fix="see what was printed about the others",
            )

    def _values(self, model: nn.Module, batch: Any, first: int) -> Mapping[str, Tensor]:
        with self.context():
            if self.step is not None:
                result = self.step(model, batch)
                outputs, targets = _for_metrics(result) if self.metrics.all else (None, None)
                values: Mapping[str, Tensor] = step_values(result)
            else:
                assert self.loss is not None, "a trainer has either a loss or a step"
                inputs, targets = pair(batch)
                outputs = model(inputs)
                values = {"loss": one_number(self.loss(outputs, targets), where="mh.Trainer(loss=…)")}
        self.metrics.update(first, outputs, targets)
        return values


def _nothing() -> None:
    """What is done where nobody wants to know."""


def _means(rows: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Of every name, the mean over the samples that had it, from the sums and counts of each part, in their order."""
    means = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        own = [row[name] for row in rows if name in row]
        counted = sum(count for _, count in own)
        means[name] = sum((total for total, _ in own), 0.0) / counted if counted else math.nan
    return means


def _for_metrics(result: Any) -> tuple[Any, Any]:
    if isinstance(result, Mapping) and "outputs" in result and "targets" in result:
        return result["outputs"], result["targets"]
    raise ConfigError(
        "metrics are given, but step returned no 'outputs' and 'targets' to feed them with",
        where="mh.Trainer(step=…, metrics=…)",
        fix='return {"loss": loss, "outputs": outputs, "targets": targets}, or leave metrics out',
    )


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """`model` in evaluation mode; afterwards every module is back in the mode that it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
