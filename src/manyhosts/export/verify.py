"""Whether what was exported answers as the trained model does, on real samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyhosts.errors import TrainingError
from manyhosts.export.description import TensorSpec

# Largest difference of an output, as a share of the largest value of that output, or of 1 where that is smaller
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
SAME_ANSWERS = 0.99
# The same, for an int8 model whose outputs are no scores to take the highest of
_INT8_NUMBERS = 5e-2


class NotTheSame(TrainingError):
    """What was written does not answer as the trained model."""


def compare(
    wanted: Sequence[tuple[Tensor, ...]],
    found: Sequence[tuple[Tensor, ...]],
    outputs: Sequence[TensorSpec],
    *,
    precision: str,
    where: str,
) -> dict[str, Any]:
    """Compare answers batch by batch. Returns what was seen.

    Raises:
        NotTheSame: they differ by more than `precision` allows.
    """
    gaps, same = [0.0], torch.zeros(0, dtype=torch.bool)
    for rows, others in zip(wanted, found, strict=True):
        for spec, one, other in zip(outputs, rows, others, strict=True):
            place = f"{spec.name}, batch of {len(one)}"
            gap = _gap(one, other, place, where)
            dim = _scores(one, spec)
            if precision != "int8" or dim is None:
                allowed = TOLERANCE.get(precision, _INT8_NUMBERS)
                if gap > allowed:
                    raise _wrong(f"a difference of {gap:.2g}, and {allowed:g} is allowed", place, where)
            else:
                same = torch.cat([same, (one.argmax(dim) == other.argmax(dim)).reshape(-1)])
            gaps.append(gap)
    reported: dict[str, Any] = {"samples": sum(len(row[0]) for row in wanted), "largest_difference": max(gaps)}
    if not len(same):
        return reported
    share = float(same.double().mean())
    if share < SAME_ANSWERS:
        raise _wrong(f"the same first answer in {share:.1%} of {len(same)} cases, and 99 % are wanted", "int8", where)
    return reported | {"same_first_answers": share}


def _gap(one: Tensor, other: Tensor, place: str, where: str) -> float:
    """The largest difference, as a share of the largest value or of 1; integers that differ are infinitely far.

    Raises:
        NotTheSame: the shapes differ, or one has NaN or infinity where the other has a number.
    """
    if one.shape != other.shape:
        raise _wrong(f"shape {tuple(other.shape)} in place of {tuple(one.shape)}", place, where)
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        raise _wrong("NaN or infinity in the place of numbers", place, where)
    wanted, found = one[finite].double(), other[finite].double()
    return float((wanted - found).abs().max() / max(1.0, float(wanted.abs().max()))) if len(wanted) else 0.0


def _scores(output: Tensor, spec: TensorSpec) -> int | None:
    """The dim of the classes; None for an output that has none. CrossEntropyLoss wants them in the second one.

    With more dims the one whose size never changes is taken, the last of them for transformers' `logits`.
    """
    if output.dim() < 2 or output.shape[1:].numel() < 2:
        return None
    return output.dim() - 1 if spec.name in ("logits", "last_hidden_state") else 1


def _wrong(what: str, place: str, where: str) -> NotTheSame:
    return NotTheSame(
        f"the export does not answer as the trained model: {what} ({place}); nothing was kept",
        where=where,
        fix="choose another format or precision, such as --format safetensors in fp32",
    )
