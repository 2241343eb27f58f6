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
from manyhosts.training.loop.compute import pair

Rule = Callable[[Any], Any]
"""`rule(batch)`: what the batch of one piece counts, a number of at least 0."""

IGNORED = -100
"""The target that PyTorch's cross-entropy leaves out unless it is told another."""
_LABELS = ("labels", "label", "targets", "target")
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)


class ClassMean:
    """The mean of PyTorch's cross-entropy and negative log-likelihood: over targets that count, by class weight."""

    def __init__(self, weight: Tensor | None, ignore_index: int) -> None:
        self.weight = None if weight is None else weight.detach().cpu().double()
        """Of each class, shape (classes,)."""
        self.ignore_index = ignore_index

    def __call__(self, batch: Any) -> float:
        """The sum of the class weights of the targets that are not left out."""
        targets = pair(batch)[1]
        if (
            targets.is_floating_point()
        ):  # a probability for each class, shape (N, C, ...): a plain mean, as PyTorch has it
            return float(targets.numel() / targets.shape[1])
        counted = targets != self.ignore_index
        if self.weight is None:
            return float(counted.sum())
        return float(self.weight[targets[counted].cpu()].sum())

    def differs(self, batch: Any) -> bool:
        """Whether what this batch counts may be anything but its samples times a constant."""
        targets = pair(batch)[1]
        if targets.is_floating_point():
            return False
        return targets.dim() > 1 or self.leaves_out(batch)

    def leaves_out(self, batch: Any) -> bool:
        """Whether a target of this batch does not count."""
        targets = pair(batch)[1]
        return bool((targets == self.ignore_index).any())


class LabelMean:
    """A mean over the labels of a batch that are not -100, as in the models of `transformers`."""

    def __init__(self, *, shifted: bool) -> None:
        """`shifted`: the first label of a sequence predicts nothing, so it does not count (causal language models)."""
        self.shifted = shifted

    def __call__(self, batch: Any) -> float:
        """How many of them there are.

        Raises:
            ConfigError: the batch has no labels.
        """
        labels = labels_of(batch)
        if labels is None:
            raise ConfigError(
                "the loss was found to be a mean over labels, and this batch has none",
                where="mh.Trainer(step=…)",
                fix="give weight=function(batch) -> what the batch counts in the mean",
            )
        return float((labels[..., 1:] if self.shifted else labels).ne(IGNORED).sum())


def rules_for(batch: Any) -> dict[str, LabelMean]:
    """Those of `LOOKED_FOR` that this batch could follow."""
    labels = labels_of(batch)
    most = 0 if labels is None else min(labels.dim(), 2)  # a label alone has no neighbours to be shifted to
    return dict(list(LOOKED_FOR.items())[:most])


LOOKED_FOR: Mapping[str, LabelMean] = {"labels": LabelMean(shifted=False), "shifted labels": LabelMean(shifted=True)}
"""Rules that are found by trial."""


def place_of_labels(batch: Any) -> str | int:
    """Where the targets of a batch are: a usual name, or the second of a pair."""
    return next((name for name in _LABELS if name in batch), _LABELS[0]) if isinstance(batch, Mapping) else 1


def labels_of(batch: Any) -> Tensor | None:
    """The integer targets of a batch, by the usual names or as the second of a pair; None where there are none."""
    found: Any = None
    if isinstance(batch, Mapping) or (isinstance(batch, list | tuple) and len(batch) == 2):
        place: Any = place_of_labels(batch)
        found = batch.get(place) if isinstance(batch, Mapping) else batch[place]
    is_integer = isinstance(found, Tensor) and found.dtype in (torch.int64, torch.int32)
    return found if is_integer and found.dim() else None


def has_ignored(batch: Any) -> bool:
    """Whether a label of this batch is -100."""
    labels = labels_of(batch)
    return labels is not None and bool((labels == IGNORED).any())


def class_mean(loss: Any) -> ClassMean | None:
    """The rule of a loss of PyTorch that is no mean over samples; None for any other."""
    if isinstance(loss, _BY_CLASS) and type(loss).forward in [kind.forward for kind in _BY_CLASS]:
        return ClassMean(loss.weight, loss.ignore_index)
    function, given = _function(loss)
    if function in (functional.cross_entropy, functional.nll_loss):
        return ClassMean(given.get("weight"), given.get("ignore_index", IGNORED))
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
    _, given = _function(loss)
    if given.get("reduction", getattr(loss, "reduction", None)) == "sum":
        raise ConfigError(
            "the loss adds up what its samples cost (reduction='sum'), but must be the mean over them",
            where="mh.Trainer(loss=…)",
            fix="use reduction='mean', and a learning rate as many times as large as a batch has samples",
        )


def _function(loss: Any) -> tuple[Any, Mapping[str, Any]]:
    """The function behind `functools.partial`, and what it is given by name."""
    given: dict[str, Any] = {}
    while isinstance(loss, functools.partial):
        given = {**loss.keywords, **given}
        loss = loss.func
    return loss, given
