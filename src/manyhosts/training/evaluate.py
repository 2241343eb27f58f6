"""Evaluation: each sample once, shared out over the workers, with the same bits on any number of them.

The samples are cut into parts by a rule that knows only how many there are. Each part is evaluated alone, in the same
forward passes whoever does it, and leaves its sum of losses and the states of the metrics. Those are sent to every
worker and merged in the order of the parts by the metrics' own reduction, so no bit depends on who computed what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from manyhosts.communication.gathering import gather_lists
from manyhosts.communication.world import World
from manyhosts.data import randomness
from manyhosts.data.fetch import Fetcher
from manyhosts.data.order import Indices, bounds
from manyhosts.data.steps import Loader, mapped
from manyhosts.errors import ConfigError
from manyhosts.training.compute import Loss, UserStep, pair, step_values

if TYPE_CHECKING:  # it takes a second to load, so whoever has no metrics does without it
    from torchmetrics import Metric, MetricCollection

FEWEST_PARTS, MOST_PARTS = 16, 128
"""A set is cut into at least 16 parts (or one per sample), so that up to 16 workers share even a small one."""


def number_of_parts(samples: int, batch: int) -> int:
    """Into how many parts an evaluation is cut; a pure function of the set and the batch."""
    return min(samples, max(FEWEST_PARTS, min(-(-samples // batch), MOST_PARTS)))


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
    ) -> None:
        self.samples, self.batch, self.world = samples, batch, world
        self.seed = fetcher.seed
        self.loader = Loader(fetcher, processes=loader_workers, pin=world.device.type == "cuda")
        self.loss, self.step, self.context = loss, step, context
        self.metrics = {name: alone(metric).to(world.device) for name, metric in metrics.items()}
        self.parts = number_of_parts(samples, batch)
        self.on_progress: Callable[[], None] = _nothing
        """Called after every forward pass, so that nobody takes a long evaluation for a hang."""

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """`loss` (mean over all samples) and every metric, equal on all workers."""
        first, last = bounds(self.parts, self.world.size, self.world.rank)
        requests = [list(self._pieces(part)) for part in range(first, last)]
        batches = self.loader.batches((0, piece) for part in requests for piece in part)
        merged = _Merged(list(self.metrics.values()))
        with in_evaluation(model), in_evaluation(self.loss) if isinstance(self.loss, nn.Module) else nullcontext():
            for part in requests:
                merged.add(self._part(model, part, batches))
        sums = merged.gather(self.world)
        values = {name: total / self.samples for name, total in sums.items()}
        for name, metric in self.metrics.items():
            values |= scalars(name, metric.compute())
        return values

    def _pieces(self, part: int) -> Iterator[Indices]:
        """The forward passes of one part."""
        begin, end = bounds(self.samples, self.parts, part)
        for start in range(begin, end, self.batch):
            yield np.arange(start, min(start + self.batch, end))

    def _part(self, model: nn.Module, pieces: Sequence[Indices], batches: Iterator[Any]) -> dict[str, Tensor]:
        """The sums over the samples of one part; the metrics are left with its states."""
        for metric in self.metrics.values():
            metric.reset()
        sums: dict[str, Tensor] = {}
        for piece in pieces:
            batch = mapped(next(batches), lambda tensor: tensor.to(self.world.device, non_blocking=True))
            randomness.seed_compute(self.seed, randomness.COMPUTE, int(piece[0]))  # a model may sample here, too
            for name, value in self._values(model, batch).items():
                weighted = value.double() * len(piece)
                sums[name] = sums[name] + weighted if name in sums else weighted
            self.on_progress()
        return sums

    def _values(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        with self.context():
            if self.step is not None:
                result = self.step(model, batch)
                outputs, targets = _for_metrics(result) if self.metrics else (None, None)
                values: Mapping[str, Tensor] = step_values(result)
            else:
                assert self.loss is not None, "a trainer has either a loss or a step"
                inputs, targets = pair(batch)
                outputs = model(inputs)
                values = {"loss": self.loss(outputs, targets)}
        for metric in self.metrics.values():
            metric.update(outputs, targets)
        return values


def _nothing() -> None:
    """What is done where nobody wants to know."""


class _Merged:
    """The sums and the metrics' states of the parts, in order."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.holders = [holder for metric in metrics for holder in _holders(metric)]
        self.sums: dict[str, list[Tensor]] = {}
        self.states: list[dict[str, list[Tensor]]] = [
            {name: [] for name in holder._defaults} for holder in self.holders
        ]

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Keep what one part found."""
        for name, value in sums.items():
            self.sums.setdefault(name, []).append(value)
        for holder, states in zip(self.holders, self.states, strict=True):
            for name, kept in states.items():
                state = getattr(holder, name)
                if isinstance(state, list):
                    kept += [_in_a_row(state)] if state else []
                elif kept and _order_free(holder, name, state):
                    kept[0] = kept[0] + state  # whole numbers add up alike in any order: one state to send, not many
                else:
                    kept.append(state.clone())

    def gather(self, world: World) -> dict[str, float]:
        """Put the merged states into the metrics, and return the sums over all parts."""
        names = self._names(world)
        sums = {name: _in_order(_joined(world, self.sums.get(name, []))) for name in names}
        for holder, states in zip(self.holders, self.states, strict=True):
            for name, kept in states.items():
                _restore(holder, name, _joined(world, kept))
            holder._update_count = 1
            holder._computed = None
        return sums

    def _names(self, world: World) -> list[str]:
        """The names of the sums, known also to a worker that had no part."""
        own = [torch.tensor(list(name.encode()), dtype=torch.uint8) for name in self.sums]
        theirs = next(found for found in gather_lists(world, own) if found)
        return [bytes(word.tolist()).decode() for word in theirs]


def _holders(metric: Metric) -> list[Metric]:
    """`metric` and those inside it."""
    from torchmetrics import Metric

    return [module for module in metric.modules() if isinstance(module, Metric)]


def _in_a_row(states: list[Tensor]) -> Tensor:
    from torchmetrics.utilities import dim_zero_cat

    joined: Tensor = dim_zero_cat(states)
    return joined


def _order_free(holder: Metric, name: str, state: Tensor) -> bool:
    from torchmetrics.utilities import dim_zero_sum

    return holder._reductions[name] is dim_zero_sum and not state.is_floating_point()


def _joined(world: World, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of all workers; parts are contiguous, so the order of ranks is the order of parts."""
    return [tensor for found in gather_lists(world, tensors) for tensor in found]


def _in_order(values: Sequence[Tensor]) -> float:
    return sum((float(value) for value in values), 0.0)


def _restore(holder: Metric, name: str, parts: list[Tensor]) -> None:
    """What torchmetrics does with the states of several processes, done with those of several parts."""
    reduction = holder._reductions[name]
    if isinstance(holder._defaults[name], list):
        setattr(holder, name, [_in_a_row(parts)] if parts else [])
    else:
        stacked = torch.stack(parts)
        setattr(holder, name, reduction(stacked) if reduction is not None else stacked)


def alone(metric: Metric) -> Metric:
    """A copy of `metric` that never talks to other processes by itself: the evaluation does it."""
    copy = metric.clone()
    for holder in _holders(copy):
        holder.sync_on_compute = False
        holder._to_sync = False
    return copy


def flattened(metrics: Mapping[str, Metric | MetricCollection]) -> dict[str, Metric]:
    """Collections taken apart: their members share states in ways that cannot be merged part by part.

    Raises:
        ConfigError: something in it is no torchmetrics metric.
    """
    if not metrics:
        return {}
    from torchmetrics import Metric, MetricCollection

    flat: dict[str, Metric] = {}
    for name, metric in metrics.items():
        if isinstance(metric, MetricCollection):
            flat |= dict(metric.items(keep_base=False, copy_state=False))
        elif isinstance(metric, Metric):
            flat[name] = metric
        else:
            raise ConfigError(
                f"the metric {name!r} is a {type(metric).__name__}",
                where="mh.Trainer(metrics=…)",
                fix="give metrics of torchmetrics, such as MulticlassAccuracy(num_classes=10)",
            )
    return flat


def scalars(name: str, value: Any) -> dict[str, float]:
    """A computed metric as numbers: `name`, or `name/part` for each part of one that has several."""
    if isinstance(value, Mapping):
        return {
            key: number for inner, part in value.items() for key, number in scalars(f"{name}/{inner}", part).items()
        }
    if isinstance(value, Tensor) and value.dim():
        return {key: n for i, part in enumerate(value) for key, n in scalars(f"{name}/{i}", part).items()}
    if isinstance(value, list | tuple):
        return {key: n for i, part in enumerate(value) for key, n in scalars(f"{name}/{i}", part).items()}
    return {name: float(value)}


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
