"""What the pieces of a global batch count in its mean: known to all workers before the first backward pass.

Pieces count by their samples unless the loss is known, found or said to be another mean: over targets that count, by
class weights, or by a rule of the user's, which says what one piece counts. The mean over a global batch is then the
sum of `count * loss` over the sum of the counts, however it was cut. Each step has one small exchange more: what all
pieces count together. It is added up exactly, so no bit of it depends on who computed what.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhosts.communication.mesh import Mesh
from manyhosts.communication.world import World
from manyhosts.config.settings import Settings
from manyhosts.data.data import Data
from manyhosts.data.fetch import tensors_of
from manyhosts.data.steps import DuePiece, LoadedPiece, Step
from manyhosts.errors import ConfigError, TrainingError

Rule = Callable[[Any], Any]
"""`rule(batch)`: what the batch of one piece counts, a number of at least 0; for several losses one for each."""
Weight = Rule | Literal["samples"]
_LABELS = ("labels", "label", "targets", "target", "tags", "y")
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)


class TargetMean:
    """A mean over the targets of a batch that are not left out, each by the weight of its class."""

    def __init__(self, weight: Tensor | None = None, ignored: int = -100, *, shifted: bool = False) -> None:
        """`weight`: of each class, shape (classes,). `ignored`: as PyTorch's cross-entropy has it unless given another.

        `shifted`: the first label of a sequence predicts nothing, so it does not count (causal language models).
        """
        self.weight = None if weight is None else weight.detach().cpu().double()
        self.ignored, self.shifted = ignored, shifted

    def __call__(self, batch: Any) -> float:
        """How many of them there are, or the sum of their class weights.

        Raises:
            ConfigError: the batch has no targets.
        """
        targets = targets_of(batch)
        if targets is None:
            raise ConfigError(
                "the loss was found to be a mean over labels, and this batch has none",
                where="mh.Trainer(step=…)",
                fix="give weight=function(batch) -> what the batch counts in the mean",
            )
        if targets.is_floating_point():  # a probability for each class, shape (N, C, ...): a plain mean
            return float(targets.numel() / (targets.shape[1] if targets.dim() > 1 else 1))
        targets = targets[..., 1:] if self.shifted else targets
        counted = targets[targets != self.ignored]
        # The loss itself says of a class that there is not.
        is_unknown = self.weight is not None and bool((counted >= len(self.weight)).any() or (counted < 0).any())
        return float(len(counted) if self.weight is None or is_unknown else self.weight[counted.cpu()].sum())

    def leaves_out(self, batch: Any) -> bool:
        """Whether a target of this batch does not count."""
        targets = targets_of(batch)
        return targets is not None and not targets.is_floating_point() and bool((targets == self.ignored).any())


LOOKED_FOR: Mapping[str, TargetMean] = {"labels": TargetMean(), "shifted labels": TargetMean(shifted=True)}
"""Rules that are found by trial: means over the labels that are not -100, as in the models of `transformers`."""
CLASSES = "classes"
"""As `RunState.counts_by` has it: targets were left out, or weighed, of a loss by class."""
has_ignored = LOOKED_FOR["labels"].leaves_out
"""Whether a label of a batch is -100."""


def rules_for(batch: Any) -> dict[str, TargetMean]:
    """Those of `LOOKED_FOR` that this batch could follow."""
    labels = targets_of(batch)
    if labels is None or labels.dtype not in (torch.int64, torch.int32):
        return {}
    return dict(list(LOOKED_FOR.items())[: labels.dim()])  # a label alone has no neighbours to be shifted to


def counted(rule: Rule, batch: Any) -> dict[str, float]:
    """What a batch counts by `rule`, for each loss by name; by `""` where there is one number for all."""
    given = rule(batch)
    return {name: float(each) for name, each in (given if isinstance(given, Mapping) else {"": given}).items()}


def targets_of(batch: Any) -> Tensor | None:
    """The targets of a batch, by the usual names or as the second of a pair; None where there are none."""
    found: Any = None
    if isinstance(batch, Mapping):
        found = batch.get(_place_of_labels(batch))
    elif isinstance(batch, list | tuple) and len(batch) == 2:
        found = batch[1]
    return found if isinstance(found, Tensor) and found.dim() else None


def _place_of_labels(batch: Any) -> str | int:
    return next((name for name in _LABELS if name in batch), _LABELS[0]) if isinstance(batch, Mapping) else 1


def class_mean(loss: Any) -> TargetMean | None:
    """The rule of a loss of PyTorch that is no mean over samples; None for any other."""
    function, given = _function(loss)
    is_by_class = isinstance(loss, _BY_CLASS) and type(loss).forward in [kind.forward for kind in _BY_CLASS]
    if is_by_class or function in (functional.cross_entropy, functional.nll_loss):
        return TargetMean(given.get("weight"), given.get("ignore_index", -100))
    return None


def is_plain(loss: Any) -> bool:
    """Whether `loss` is one of PyTorch's own, which but for those by class are all means over samples of one size."""
    function, _ = _function(loss)
    is_function = getattr(functional, getattr(function, "__name__", ""), None) is function
    return is_function or type(loss).__module__ == "torch.nn.modules.loss"


_BY_NUMBER = {
    nn.MSELoss: functional.mse_loss,
    nn.L1Loss: functional.l1_loss,
    nn.SmoothL1Loss: functional.smooth_l1_loss,
    nn.HuberLoss: functional.huber_loss,
    nn.BCELoss: functional.binary_cross_entropy,
    nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
}


def is_by_number(loss: Any) -> bool:
    """Whether `loss` is one of PyTorch's that is the mean over all numbers of its targets."""
    function, given = _function(loss)
    return (type(loss) in _BY_NUMBER or function in _BY_NUMBER.values()) and given.get("reduction", "mean") == "mean"


def rows_in(targets: Any, samples: int) -> int:
    """What such targets of so many samples count: their rows, where a sample has several (the atoms of a molecule)."""
    if not isinstance(targets, Tensor) or not targets.dim() or len(targets) == samples:
        return samples
    return samples if targets.dim() > 1 and targets.shape[1] == samples else len(targets)  # samples may come second


def refuse_sum(loss: Any) -> None:
    """Refuse a loss of PyTorch that adds its samples up.

    Raises:
        ConfigError: it does.
    """
    forward = getattr(type(loss), "forward", None)
    is_own = is_plain(loss) or getattr(forward, "__module__", "") == "torch.nn.modules.loss"
    if is_own and _function(loss)[1].get("reduction") == "sum":
        raise ConfigError(
            "the loss adds up what its samples cost (reduction='sum'), but must be the mean over them",
            where="mh.Trainer(loss=…)",
            fix="use reduction='mean'; with SGD a learning rate as many times as large as a batch has samples, with "
            "Adam the same as before",
        )


def _function(loss: Any) -> tuple[Any, Mapping[str, Any]]:
    """The function behind `functools.partial`, and what it is given by name, or a module has as attributes."""
    given: dict[str, Any] = {}
    while isinstance(loss, functools.partial):
        given = {**loss.keywords, **given}
        loss = loss.func
    fields = ("weight", "ignore_index", "reduction")
    return loss, {name: getattr(loss, name) for name in fields if hasattr(loss, name)} | given


class Weighing:
    """How one trainer weighs its pieces."""

    def __init__(self, weight: Weight | None, loss: Any, *, data: Data, settings: Settings, world: World) -> None:
        """Find the rule, as far as it follows from what the script says.

        Raises:
            ConfigError: the loss is a sum, or the weight no function.
        """
        if not callable(weight) and not (weight is None or (isinstance(weight, str) and weight == "samples")):
            raise ConfigError(
                f"weight is {weight!r}",
                where="mh.Trainer(weight=…)",
                fix='give function(batch) -> what its batch counts in the mean; or weight="samples", or leave it out',
            )
        self.world = world
        self.mesh = Mesh(world)
        """How the workers are laid out, once there is a strategy: the counts of those are added that read different
        samples."""
        self.virtual_workers = settings.virtual_workers
        self.said = settings.weight or weight
        """What the user says."""
        if self.said is None:
            refuse_sum(loss)
        self.classes = class_mean(loss) if self.said is None else None
        all_count = None if self.classes is None else _all_count(self.classes, data)
        plain = self.said is None and self.classes is None and loss is not None and is_plain(loss)
        self.knows = self.said == "samples" or all_count is True or plain
        """Whether no worker need look at the loss."""
        self.rule: Rule | None = self.said if callable(self.said) else self.classes if all_count is False else None
        """What a piece counts; None: its samples."""
        self.must_look = self.classes is not None and all_count is None
        """Whether only batches show if targets are left out."""
        self.checks = False
        """Whether pieces that count by their samples are compared with the first step, where a batch is cut."""
        self.guard: Callable[[Any], bool] | None = None
        """Where no target was left out so far: whether one is in a batch."""
        self.rows: int | None = None
        """Of the first batch for each of its planned samples; 0 where samples have no equal numbers of rows."""
        self.names: tuple[str, ...] = ("",)
        """Of the losses that `weight` gives a number each for; one without a name where it gives one number."""

    def take_up(self, counts_by: str) -> None:
        """Count by what an earlier look has found, as `RunState.counts_by` has it, where the script does not say it."""
        if self.must_look and counts_by == CLASSES:
            self.rule, self.guard, self.must_look = self.classes, None, False
        elif self.said is None and self.classes is None and not self.knows:
            self.rule = LOOKED_FOR.get(counts_by)

    def look_at_targets(self, pieces: Sequence[LoadedPiece]) -> None:
        """Where a loss by class may or may not leave targets out: see whether this step's do. All workers call this."""
        assert self.classes is not None, "only such a loss has targets to look at"
        targets = [each for piece in pieces if (each := targets_of(piece.batch)) is not None]
        several = any(each.dim() > 1 and not each.is_floating_point() for each in targets)
        differs = several or any(self.classes.leaves_out(piece.batch) for piece in pieces)
        self.rule, self.guard = (self.classes, None) if self.world.any(differs) else (None, self.classes.leaves_out)

    def of(self, step: Step, number: int) -> tuple[Step, float]:
        """A step whose pieces have their weights in the mean, and what all of the batch counts.

        Raises:
            TrainingError: a weight is no number of at least 0, here or on another worker.
            ConfigError: a target does not count, or a sample is left out, which was not to be seen at the start.
        """
        if self.rule is None:
            checked = [DuePiece(piece.plan, self._checked, piece, number) for piece in step.pieces]
            return replace(step, pieces=checked), float(step.samples)
        fetched = step.fetched()  # what they count is in their batches
        try:
            counts, trouble = list(map(self._count, fetched)), ""
        except ValueError as unknown:  # no number, so that the others hear of it, and no worker waits
            counts, trouble = [dict.fromkeys(self.names, math.nan)] * len(fetched), str(unknown)
        by_part: list[list[Mapping[str, float]]] = [[] for _ in range(self.virtual_workers or 1)]
        for piece, count in zip(fetched, counts, strict=True):
            by_part[piece.plan.part if self.virtual_workers is not None else 0].append(count)
        sums = [[math.fsum(each[name] for each in own) for name in self.names] for own in by_part]
        own_sums = torch.tensor(sums, dtype=torch.float64)
        reported = self.world.stack(own_sums.flatten().to(self.world.device)).reshape(-1, *own_sums.shape)
        if bool(reported.isnan().any()):
            raise TrainingError(
                trouble or "the weight of a piece could not be found on another worker",
                where=f"weight, step {number}",
                fix="let weight(batch) return a finite number of at least 0: what the batch counts in the mean; for "
                "several losses one for each, always under the same names",
            )
        reported = reported[list(self.mesh.peers("replicate", "shard"))]
        totals = {name: math.fsum(reported[..., place].flatten().tolist()) for place, name in enumerate(self.names)}
        pieces = [self._weighed(piece, count, totals) for piece, count in zip(fetched, counts, strict=True)]
        by_all = reported.sum((0, 2)).tolist()
        audits = [  # of another worker's pieces, with the weights that they have there
            replace(each, pieces=[self._weighed(piece, self._count(piece), totals) for piece in each.pieces])
            for each in step.audits
            if by_all[each.audit.part]  # of a part that counts nothing, no worker computes anything
        ]
        return replace(step, pieces=pieces, audits=audits), sum(totals.values())

    def _weighed(self, piece: LoadedPiece, counts: Mapping[str, float], totals: Mapping[str, float]) -> LoadedPiece:
        """A piece with its share of each loss that counts anything, and as its weight the mean of these."""
        if not piece.plan.weight:
            return piece
        shares = {name: counts[name] / total if total else 0.0 for name, total in totals.items()}
        weight = math.fsum(shares.values()) / max(1, sum(map(bool, totals.values())))
        plan = replace(piece.plan, weight=weight, shares=None if self.names == ("",) else shares)
        return replace(piece, plan=plan)

    def _count(self, piece: LoadedPiece) -> dict[str, float]:
        """What a piece counts; a ghost counts nothing, whatever is in its batch.

        Raises:
            ValueError: why that cannot be known, in words.
        """
        assert self.rule is not None, "without a rule pieces count by their samples"
        try:
            count = counted(self.rule, piece.batch) if piece.plan.weight else dict.fromkeys(self.names, 0.0)
        except Exception as cause:
            raise ValueError(f"the weight of a piece cannot be found: {type(cause).__name__}: {cause}") from cause
        if wrong := [each for each in count.values() if not 0 <= each < math.inf]:
            raise ValueError(f"the weight of a piece is {wrong[0]}")
        if sorted(count) != list(self.names):
            given = ", ".join(sorted(count)) or "nothing"
            raise ValueError(f"weight gives numbers for {given}, and before for others")
        return count

    def _checked(self, piece: LoadedPiece | DuePiece, number: int) -> Any:
        """The batch of a piece that counts by its samples: it has all of them, and every target counts."""
        batch, planned = piece.batch, len(piece.plan.indices)
        if not piece.plan.weight:
            return batch
        rows = _rows_of(batch)
        if self.rows is None:
            self.rows = rows // planned if rows and rows % planned == 0 else 0
        if self.rows and rows is not None and rows != self.rows * planned:
            raise ConfigError(
                f"the batch of a piece of {planned} samples has {rows} rows, and the first had {self.rows} for each",
                where=f"mh.Data(collate=…), step {number}",
                fix="leave no sample out in collate or __getitem__, or give weight=function(batch) -> what is left; "
                'where the loss is a mean over samples all the same, weight="samples"',
            )
        if self.guard is not None and self.guard(batch):
            ignored = -100 if self.classes is None else self.classes.ignored
            raise ConfigError(
                f"a target of step {number} does not count in the loss (it is the ignored class), and at the start "
                "all did, so pieces were taken to count by their samples",
                where=f"mh.Trainer(loss=…), step {number}",
                fix=f"give weight=lambda batch: (batch[{_place_of_labels(batch)!r}] != {ignored}).sum(), or what else "
                "a piece counts in the mean",
            )
        return batch


def _rows_of(batch: Any) -> int | None:
    """The rows that all tensors of a batch have; None where they have others, or it holds something else."""
    fields = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    sizes = {each.shape[0] if isinstance(each, Tensor) and each.dim() else None for each in fields}
    return sizes.pop() if len(sizes) == 1 else None


def _all_count(classes: TargetMean, data: Data) -> bool | None:
    """Whether all targets of the training set count alike; None where only reading them would show it."""
    if classes.weight is not None:
        return False
    found = None if data.collate is not None or data.train is None else tensors_of(data.train)
    if found is None or len(found[0]) != 2:
        return None
    targets = found[0][1] if found[1] is None else found[0][1][found[1]]
    return not classes.leaves_out((None, targets))
