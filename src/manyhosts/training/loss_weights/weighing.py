"""What the pieces of a global batch count in its mean: known to all workers before the first backward pass.

Pieces count by their samples unless the loss is known, found or said to be another mean. Then each step has one small
exchange more: what all pieces count together. It is added up exactly, so no bit of it depends on who computed what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from manyhosts.communication.mesh import Mesh
from manyhosts.communication.world import World
from manyhosts.config.settings import Settings
from manyhosts.data.data import Data
from manyhosts.data.fetch import tensors_of
from manyhosts.data.steps import DuePiece, LoadedPiece, Step
from manyhosts.errors import ConfigError, TrainingError
from manyhosts.training.loss_weights.means import (
    LOOKED_FOR,
    Rule,
    TargetMean,
    class_mean,
    counted,
    has_ignored,
    is_plain,
    place_of_labels,
    refuse_sum,
)

Weight = Rule | Literal["samples"]


class Weighing:
    """How one trainer weighs its pieces."""

    def __init__(self, weight: Weight | None, loss: Any, *, data: Data, settings: Settings, world: World) -> None:
        """Find the rule, as far as it follows from what the script says.

        Raises:
            ConfigError: the loss is a sum, or the weight no function.
        """
        if weight is not None and weight != "samples" and not callable(weight):
            raise ConfigError(
                f"weight is {weight!r}",
                where="mh.Trainer(weight=…)",
                fix="give function(batch) -> what its batch counts in the mean, or leave it out",
            )
        self.world = world
        self.mesh = Mesh(world)
        """How the workers are laid out, once there is a strategy: the counts of those are added that read different
        samples."""
        self.parts = settings.virtual_workers or 1
        self.by_part = settings.virtual_workers is not None
        self.said = settings.weight or weight
        """What the user says."""
        if self.said is None:
            refuse_sum(loss)
        self.classes = class_mean(loss) if self.said is None else None
        all_count = None if self.classes is None else _all_count(self.classes, data)
        plain = self.said is None and self.classes is None and loss is not None and is_plain(loss)
        self.knows = self.said == "samples" or all_count is True or plain
        """Whether nobody need look at the loss."""
        self.rule: Rule | None = None if self.said in (None, "samples") else self.said  # type: ignore[assignment]
        """What a piece counts; None: its samples."""
        self.evaluation: Rule | None = self.rule or self.classes
        """The same in an evaluation, where to count costs no exchange."""
        self.guard: Callable[[Any], bool] | None = None
        """Where pieces count by their samples because no target was left out so far: what would change that."""
        self.names: tuple[str, ...] = ("",)
        """Of the losses that `weight` gives a number each for; one without a name where it gives one number."""
        self.looks: Callable[[LoadedPiece], str] | None = None
        """Tells of a piece why its loss is no mean over its planned samples; empty where it is one."""
        self.rows = 0
        """Of a batch for each of its planned samples; 0 before the first one."""
        self.must_look = self.classes is not None and all_count is None
        """Whether only batches show if targets are left out."""

    def use(self, name: str) -> None:
        """Count by the rule of this name from now on, which was found by trial."""
        self.rule = self.evaluation = LOOKED_FOR.get(name)
        self.guard = has_ignored if name == "samples" else None

    def look_at_targets(self, pieces: Sequence[LoadedPiece]) -> None:
        """Where a loss by class may or may not leave targets out: see whether this step's do. All workers call this."""
        assert self.classes is not None, "only such a loss has targets to look at"
        if not self.must_look:
            self.rule = self.classes
            return
        differs = self.world.any(any(self.classes.differs(piece.batch) for piece in pieces))
        self.rule, self.guard = (self.classes, None) if differs else (None, self.classes.leaves_out)

    @property
    def counts_samples(self) -> bool:
        """Whether no piece need be looked at."""
        return self.rule is None and self.guard is None and self.looks is None

    def of(self, step: Step, number: int) -> tuple[Step, float]:
        """A step whose pieces have their weights in the mean, and what all of the batch counts.

        Raises:
            TrainingError: a weight is no number of at least 0, here or on another worker.
            ConfigError: a target does not count, which was not to be seen at the start.
        """
        if self.rule is None:
            guarded = [DuePiece(piece.plan, self._checked, piece, number) for piece in step.pieces]
            return replace(step, pieces=guarded), float(step.samples)
        fetched = step.fetched()  # what they count is in their batches
        real = [piece for piece in fetched if piece.plan.weight]
        counts, trouble = self._counts(real)
        by_part = torch.zeros(self.parts, len(self.names), dtype=torch.float64)
        for part in {piece.plan.part for piece in real} if not trouble else ():
            own = [count for piece, count in zip(real, counts, strict=True) if piece.plan.part == part]
            sums = [math.fsum(each[name] for each in own) for name in self.names]
            by_part[part if self.by_part else 0] = torch.tensor(sums, dtype=torch.float64)
        if trouble:
            by_part[:] = math.nan  # so that the others hear of it, and nobody waits
        reported = self.world.stack(by_part.flatten().to(self.world.device)).reshape(-1, *by_part.shape)
        is_known = not bool(reported.isnan().any())
        reported = reported[list(self.mesh.peers("replicate", "shard"))]
        totals = {name: math.fsum(reported[..., place].flatten().tolist()) for place, name in enumerate(self.names)}
        if not is_known:
            raise TrainingError(
                trouble or "the weight of a piece could not be found on another worker",
                where=f"weight, step {number}",
                fix="let weight(batch) return a finite number of at least 0: what the batch counts in the mean; for "
                "several losses one for each, always under the same names",
            )
        weighed = iter([self._weighed(piece, count, totals) for piece, count in zip(real, counts, strict=True)])
        pieces = [next(weighed) if piece.plan.weight else piece for piece in fetched]
        counted = reported.sum((0, 2)).tolist()
        audits = [
            replace(each, pieces=[self._share(piece, totals) for piece in each.pieces])
            for each in step.audits
            if counted[each.audit.part]  # of a part that counts nothing, nobody computes anything
        ]
        return replace(step, pieces=pieces, audits=audits), sum(totals.values())

    def _weighed(self, piece: LoadedPiece, counts: Mapping[str, float], totals: Mapping[str, float]) -> LoadedPiece:
        """A piece with its share of each loss that counts anything, and as its weight the mean of these."""
        shares = {name: counts[name] / total if total else 0.0 for name, total in totals.items()}
        weight = math.fsum(shares.values()) / max(1, sum(map(bool, totals.values())))
        several = None if self.names == ("",) else shares
        return replace(piece, plan=replace(piece.plan, weight=weight, shares=several))

    def _share(self, piece: LoadedPiece, totals: Mapping[str, float]) -> LoadedPiece:
        """A piece of another worker's, which is computed here once more: with the weight that it has there."""
        if not piece.plan.weight or not any(totals.values()):
            return piece
        return self._weighed(piece, self._counts([piece])[0][0], totals)

    def _counts(self, pieces: Sequence[LoadedPiece]) -> tuple[list[dict[str, float]], str]:
        """What each piece counts; in words, why that cannot be known."""
        assert self.rule is not None, "without a rule pieces count by their samples"
        counts = []
        for piece in pieces:
            try:
                count = counted(self.rule, piece.batch)
            except Exception as cause:
                return [], f"the weight of a piece cannot be found: {type(cause).__name__}: {cause}"
            if wrong := [each for each in count.values() if not 0 <= each < math.inf]:
                return [], f"the weight of a piece is {wrong[0]}"
            if sorted(count) != list(self.names):
                return [], f"weight gives numbers for {', '.join(sorted(count)) or 'nothing'}, and before for others"
            counts.append(count)
        return counts, ""

    def _checked(self, piece: LoadedPiece | DuePiece, number: int) -> Any:
        """The batch of a piece, of which every target counts."""
        batch = piece.batch
        if piece.plan.weight:
            planned, rows = len(piece.plan.indices), rows_of(batch)
            has_others = self.looks is not None and self._has_other_rows(planned, rows)
            if has_others and self.looks and (what := self.looks(LoadedPiece(piece.plan, batch))):
                raise ConfigError(
                    f"the batch of a piece of {planned} samples has {rows} rows, and {what}",
                    where=f"mh.Data(collate=…), step {number}",
                    fix="leave no sample out in collate or __getitem__, or give weight=function(batch) -> what is left",
                )
            if self.guard is not None and self.guard(batch):
                raise ConfigError(
                    f"a target of step {number} does not count in the loss (it is the ignored class), and at the start "
                    "all did, so pieces were taken to count by their samples",
                    where=f"mh.Trainer(loss=…), step {number}",
                    fix=f"give weight=lambda batch: (batch[{place_of_labels(batch)!r}] != -100).sum(), or what else a "
                    "piece counts in the mean",
                )
        return batch

    def _has_other_rows(self, planned: int, rows: int | None) -> bool:
        """Whether a batch has other rows for each planned sample than the first one had."""
        if rows is None or self.said is not None:
            return False
        self.rows = self.rows or rows // planned
        return rows != self.rows * planned


def rows_of(batch: Any) -> int | None:
    """The rows that all tensors of a batch have; None where they have others, or it holds something else."""
    held = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    sizes = {each.shape[0] if isinstance(each, Tensor) and each.dim() else None for each in held}
    return sizes.pop() if len(sizes) == 1 else None


def _all_count(classes: TargetMean, data: Data) -> bool | None:
    """Whether all targets of the training set count alike; None where only reading them would tell."""
    if classes.weight is not None:
        return False
    if data.collate is not None or data.train is None or (found := tensors_of(data.train)) is None:
        return None
    tensors, rows = found
    if len(tensors) != 2:
        return None
    targets = tensors[1] if rows is None else tensors[1][rows]
    return targets.is_floating_point() or not bool((targets == classes.ignored).any())
