"""What the mean of a loss is over: samples, targets that count, class weights, or what the user says.

A rule says what one piece counts. The mean over a global batch is then the sum of `count * loss` over the sum of the
counts, however the batch was cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhosts.errors import ConfigError

Rule = Callable[[Any], Any]
"""`rule(batch)`: what the batch of one piece counts, a number of at least 0."""

IGNORED = -100
"""The target that PyTorch's cross-entropy leaves out unless it is told another."""
_LABELS = ("labels", "label", "targets", "target")
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)


class TargetMean:
    """A mean over the targets of a batch that are not left out, each by the weight of its class."""

    def __init__(self, weight: Tensor | None = None, ignored: int = IGNORED, *, shifted: bool = False) -> None:
        """`weight`: of each class, shape (classes,).

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
            return float(targets.numel() / targets.shape[1])
        targets = targets[..., 1:] if self.shifted else targets
        counted = targets[targets != self.ignored]
        return float(len(counted) if self.weight is None else self.weight[counted.cpu()].sum())

    def differs(self, batch: Any) -> bool:
        """Whether what this batch counts may be anything but its samples times a constant."""
        targets = targets_of(batch)
        return targets is not None and not targets.is_floating_point() and (targets.dim() > 1 or self.leaves_out(batch))

    def leaves_out(self, batch: Any) -> bool:
        """Whether a target of this batch does not count."""
        targets = targets_of(batch)
        return targets is not None and not targets.is_floating_point() and bool((targets == self.ignored).any())


LOOKED_FOR: Mapping[str, TargetMean] = {"labels": TargetMean(), "shifted labels": TargetMean(shifted=True)}
"""Rules that are found by trial: means over the labels that are not -100, as in the models of `transformers`."""
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


def place_of_labels(batch: Any) -> str | int:
    """Where the targets of a batch are: a usual name, or the second of a pair."""
    return next((name for name in _LABELS if name in batch), _LABELS[0]) if isinstance(batch, Mapping) else 1


def targets_of(batch: Any) -> Tensor | None:
    """The targets of a batch, by the usual names or as the second of a pair; None where there are none."""
    found: Any = None
    if isinstance(batch, Mapping):
        found = batch.get(place_of_labels(batch))
    elif isinstance(batch, list | tuple) and len(batch) == 2:
        found = batch[1]
    return found if isinstance(found, Tensor) and found.dim() else None


def class_mean(loss: Any) -> TargetMean | None:
    """The rule of a loss of PyTorch that is no mean over samples; None for any other."""
    function, given = _function(loss)
    is_by_class = isinstance(loss, _BY_CLASS) and type(loss).forward in [kind.forward for kind in _BY_CLASS]
    if is_by_class or function in (functional.cross_entropy, functional.nll_loss):
        return TargetMean(given.get("weight"), given.get("ignore_index", IGNORED))
    return None


def is_plain(loss: Any) -> bool:
    """Whether `loss` is one of PyTorch's own, which but for those by class are all means over samples of one size."""
    if isinstance(loss, nn.Module):
        return type(loss).__module__ == "torch.nn.modules.loss"
    function, _ = _function(loss)
    return getattr(functional, getattr(function, "__name__", ""), None) is function


def refuse_sum(loss: Any) -> None:
    """Refuse a loss of PyTorch that adds its samples up.

    Raises:
        ConfigError: it does.
    """
    if _function(loss)[1].get("reduction") == "sum":
        raise ConfigError(
            "the loss adds up what its samples cost (reduction='sum'), but must be the mean over them",
            where="mh.Trainer(loss=…)",
            fix="use reduction='mean', and a learning rate as many times as large as a batch has samples",
        )


def _function(loss: Any) -> tuple[Any, Mapping[str, Any]]:
    """The function behind `functools.partial`, and what it is given by name, or a module has as attributes."""
    given: dict[str, Any] = {}
    while isinstance(loss, functools.partial):
        given = {**loss.keywords, **given}
        loss = loss.func
    held = ("weight", "ignore_index", "reduction")
    return loss, {name: getattr(loss, name) for name in held if hasattr(loss, name)} | given
