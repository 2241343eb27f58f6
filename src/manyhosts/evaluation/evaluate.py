"""Evaluation: each sample once, shared out over the workers; the same bits on any number with as many threads.

Each part of the samples (see `passes`) leaves its sum of losses and the states of the metrics (see `metrics`). Those
are sent to every worker and merged in the order of the parts, so no bit depends on who computed what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyhosts.communication.gathering import gather_plain
from manyhosts.data import randomness
from manyhosts.data.order import Indices
from manyhosts.errors import CommunicationError, ConfigError
from manyhosts.evaluation.dataset_forward import ForwardPasses
from manyhosts.evaluation.metrics import Metrics
from manyhosts.loss.compute import (
    EVALUATE,
    STEP,
    Loss,
    UserStep,
    check_count,
    check_names,
    loss_of_pair,
    named_terms,
    step_values,
    terms_of,
)
from manyhosts.loss.weighing import Weighing, is_by_number, rows_in
from manyhosts.model.trained_module import in_evaluation

if TYPE_CHECKING:  # it takes a second to load, so a script that has no metrics does without it
    from torchmetrics import Metric


class CutOff(Exception):
    """A worker was asked to stop while it evaluated."""

    def __init__(self, asked: Sequence[float] = ()) -> None:
        super().__init__("asked to stop")
        self.asked = asked
        """How many workers were asked, by each thing that may ask one."""


class Evaluation:
    """Evaluates models on one dataset."""

    def __init__(
        self,
        passes: ForwardPasses,
        *,
        loss: Loss | None,
        step: UserStep | None,
        metrics: Mapping[str, Metric],
        weighing: Weighing | None = None,
        has_counts: bool = False,
    ) -> None:
        """`weighing`: what samples count in the mean; None: each the same. `has_counts`: whether a value named `count`
        says what the samples of a batch count together.
        """
        self.has_counts = has_counts
        self._where = EVALUATE if has_counts else STEP
        self.passes, self.world, self.weighing = passes, passes.world, weighing
        self.loss, self.step = loss, step
        said = None if weighing is None else weighing.said  # by the script, which counts here as in training
        self._is_of_rows = step is None and said is None and is_by_number(loss)
        self.metrics = Metrics(metrics, passes.world, seed=passes.seed)

    @torch.no_grad()
    def __call__(self, model: nn.Module, *, asked: Callable[[], Sequence[float]] = tuple) -> dict[str, float]:
        """`loss` (mean over all samples) and every metric, equal on all workers.

        `asked`: what has asked this worker to stop, a number for each thing that may.

        Raises:
            CutOff: a worker was asked, on all of them alike.
        """
        passes = self.passes
        shares = passes.shares()
        requests = [passes.pieces(part) for part in shares[self.world.rank]]
        ghosts = passes.ghosts(shares)
        batches = passes.fetched(piece for part in (*requests, ghosts) for piece in part)
        self.metrics.begin()
        reported: dict[str, list[Any]] = {"asked": [], "parts": []}
        with in_evaluation(model, self.loss):
            try:
                for part in requests:
                    reported["parts"].append(self._part(model, part, batches, asked))  # what there is stays
                for piece in ghosts:
                    self._outputs(model, passes.on_device(next(batches), piece))
                    self._check_wanted(asked)
            except CutOff:
                reported["asked"] = self._asked(asked)
        found = gather_plain(self.world, reported)
        if who := [each["asked"] for each in found if each["asked"]]:
            raise CutOff([sum(counts) for counts in zip(*who, strict=True)])
        means = _means([part for each in found for part in each["parts"]])
        if terms := [mean for name, mean in means.items() if name.startswith("loss/") and not math.isnan(mean)]:
            means = {"loss": sum(terms), **means}
        self._see_that_named_apart(set(means))
        return {**means, **self.metrics.values()}

    def _see_that_named_apart(self, values: set[str]) -> None:
        if both := sorted(values & self.metrics.all.keys()):
            raise ConfigError(
                f"{both[0]!r} is a value that step returns, and the name of a metric",
                where="mh.Trainer(step=…, metrics=…)",
                fix="give one of them another name, or leave the metric out",
            )

    @property
    def samples(self) -> int:
        """Of the set."""
        return self.passes.samples

    @property
    def stateful_metrics(self) -> list[str]:
        """The metrics that keep something from one validation to the next."""
        return self.metrics.keeping

    @property
    def first(self) -> Evaluation:
        """This one: see `Evaluations`."""
        return self

    @torch.no_grad()
    def look(self, model: nn.Module) -> set[str]:
        """Evaluate the first two batches, the same on every worker, and throw away what comes out.

        Whatever cannot work fails here, before training begins, and on all workers alike. Returns the names of the
        values; nothing where the metrics cannot know them from two batches.
        """
        pieces = [piece for part in range(min(2, self.passes.parts)) for piece in self.passes.pieces(part)][:2]
        batches = self.passes.fetched(iter(pieces))
        self.metrics.begin()
        with randomness.kept(), in_evaluation(model, self.loss):
            # Layers within may be in training mode, whatever is asked for.
            models = [model, *(model.children() if self.has_counts else ())]
            trained = [each for each in models if each.training]  # on purpose: its train() keeps it so
            names = {"loss", *self._part(model, pieces, batches, tuple)}
            if [each for each in models if each.training] != trained:
                raise ConfigError(
                    "the script puts the model into training mode, and is called in a validation, too",
                    where=self._where,
                    fix="leave model.train() and model.eval() out: they are called here; or put it back: model.eval()",
                )
        self._see_that_named_apart(names)
        metrics = self.metrics.names()
        self.metrics.begin()
        return names | metrics if metrics is not None else set()

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
            rule = None if self.weighing is None else self.weighing.rule or self.weighing.classes
            given = len(piece) if rule is None else rule(on_host)
            values, outputs, targets = self._outputs(model, self.passes.on_device(on_host, piece))
            if self.has_counts and "count" in values:
                given = float(values.pop("count"))
                check_count(given, self._where)
            if rule is None and self._is_of_rows:
                given = rows_in(targets, len(piece))
            self.metrics.update(int(piece[0]), outputs, targets)
            terms = terms_of(values) or {}
            values = {**values, **named_terms(terms)}
            counted = dict.fromkeys(values, float(len(piece) if isinstance(given, Mapping) else given))
            if isinstance(given, Mapping):  # several losses, which are added when all of each is here
                check_names(terms, given)
                counted |= {f"loss/{name}": float(each) for name, each in given.items()}
                del values["loss"]
            for name, value in values.items():
                # The mean over nothing is no number, and counts nothing.
                count = counted[name]
                weighted = value.double() * count if count else torch.zeros_like(value, dtype=torch.float64)
                sums[name] = sums[name] + weighted if name in sums else weighted
                counts[name] = counts.get(name, 0.0) + count
            self._check_wanted(asked)
        self.metrics.end_part()
        return {name: (value.item(), counts[name]) for name, value in sums.items()}

    def _check_wanted(self, asked: Callable[[], Sequence[float]]) -> None:
        """A forward pass is over: see that somebody still wants what comes out.

        Raises:
            CommunicationError: workers were lost, so it is all done again.
            CutOff: this worker was asked to stop.
        """
        self.passes.on_progress()
        is_asked, together = any(asked()), self.passes.together
        # One that stopped alone would be waited for in the next pass.
        wants_to_stop = is_asked if together is None else together.any(is_asked)
        if wants_to_stop:
            raise CutOff
        if self.world.is_broken:
            raise CommunicationError(
                "workers were lost during an evaluation",
                where="recovery",
                fix="see what was printed about the others",
            )

    def _asked(self, asked: Callable[[], Sequence[float]]) -> list[float]:
        """How many workers were asked, as far as those that read the same samples know; all are cut off alike."""
        own, together = list(asked()), self.passes.together
        if together is None or together.size == self.world.size:
            return own
        rows = gather_plain(together, own)
        return [sum(counts) for counts in zip(*rows, strict=True)]

    def _outputs(self, model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], Any, Any]:
        """The values of one batch, and what metrics want to see of it."""
        with self.passes.context():
            if self.step is None:
                where = f"mh.Data({self.passes.name}=…)"
                loss, outputs, targets = loss_of_pair(model, self.loss, batch, where=where)
                return {"loss": loss}, outputs, targets
            try:
                result = self.step(model, batch)
            except RuntimeError as cause:
                if "does not require grad" not in str(cause):
                    raise
                raise ConfigError(
                    "the script asks for a gradient itself, with backward() say, and in a validation there is none",
                    where=self._where,
                    fix="return the loss, and leave backward() to the trainer; a gradient that is a part of the loss "
                    "is computed under torch.enable_grad()",
                ) from cause
            return step_values(result, self._where), *(_for_metrics(result) if self.metrics.all else (None, None))


class Evaluations:
    """Those of several sets, one after another: values are called by the name of the set, `clean/loss`."""

    def __init__(self, by_name: Mapping[str, Evaluation]) -> None:
        self.by_name = dict(by_name)

    def __call__(self, model: nn.Module, *, asked: Callable[[], Sequence[float]] = tuple) -> dict[str, float]:
        """Every value of every set; see `Evaluation`."""
        found = {name: each(model, asked=asked) for name, each in self.by_name.items()}
        return {f"{name}/{key}": value for name, values in found.items() for key, value in values.items()}

    def look(self, model: nn.Module) -> set[str]:
        """Evaluate the first two batches of each; see `Evaluation`. Nothing where one does not know its names."""
        found = {name: each.look(model) for name, each in self.by_name.items()}
        return {f"{name}/{key}" for name, keys in found.items() for key in keys} if all(found.values()) else set()

    @property
    def samples(self) -> int:
        """Of all sets."""
        return sum(each.samples for each in self.by_name.values())

    @property
    def stateful_metrics(self) -> list[str]:
        """The metrics that keep something from one validation to the next, each once."""
        return list(dict.fromkeys(name for each in self.by_name.values() for name in each.stateful_metrics))

    @property
    def first(self) -> Evaluation:
        """That of the first set."""
        return next(iter(self.by_name.values()))


OfAllSets = Evaluation | Evaluations


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
