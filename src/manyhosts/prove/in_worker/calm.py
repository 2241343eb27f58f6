"""Takes chance and rounding out of a script: no dropout, float64, BatchNorm with its running statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.data import randomness
from manyhosts.data.steps import mapped
from manyhosts.prove.conduct import TrialConfig
from manyhosts.training.loss_weights.set_draws import SetDraws

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class RemoveNondeterminism:
    """What a trial leaves out, as `conduct` says."""

    def __init__(self, conduct: TrialConfig) -> None:
        self.double = conduct.double
        self.no_dropout = conduct.no_dropout or conduct.double
        self.freezes = conduct.freeze_batch_norm
        self.sets_draws = conduct.set_draws
        self.sizes: set[int] = set()
        """Samples of the pieces of this step."""
        self.left = ""
        """What was drawn and could not be set."""
        self.ends: set[str] = set()
        """Where NumPy's and Python's generators stood after the forward passes of this step."""
        self.norms: list[nn.Module] = []
        self.model: nn.Module | None = None

    def put_in_place(self) -> None:
        """Before the script: dropout that is called as a function, and the type of what is made without one."""
        if self.double:
            torch.set_default_dtype(torch.float64)
        if self.no_dropout:
            for name in _DROPOUTS:
                setattr(nn.functional, name, _unchanged)
            attention = nn.functional.scaled_dot_product_attention
            nn.functional.scaled_dot_product_attention = _without_dropout(attention)

    def change(self, model: nn.Module) -> None:
        """The model, before it is placed."""
        self.model = model
        if self.double:
            model.double()
        for module in model.modules() if self.no_dropout else ():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
                module.dropout = 0.0

    def change_compute(self, compute: Any) -> None:
        """A loss that holds tensors of its own, such as the weights of classes."""
        for part in (compute.loss, compute.step):
            if self.double and isinstance(part, nn.Module):
                part.double()
        if self.sets_draws and not isinstance(compute.context, _Set):
            compute.context = _Set(compute.context, self)

    def change_batch(self, batch: Any) -> Any:
        """A batch, before it is computed."""
        return mapped(batch, _doubled) if self.double else batch

    def freeze(self, model: nn.Module) -> None:
        """Have BatchNorm use its running statistics in the next forward pass."""
        for module in model.modules() if self.freezes else ():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


class _Set:
    """Makes the context of a forward pass, in which all that it draws is one value for all samples."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]], calm: RemoveNondeterminism) -> None:
        self.context, self.calm = context, calm

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """For one piece: behind the seed that it has by its address."""
        calm, draws = self.calm, SetDraws(0.3, self.calm.sizes)
        randomness.seed_compute(0)
        with self.context(), draws:
            yield
        calm.left = calm.left or draws.left
        calm.ends.add(hashlib.sha256(repr(randomness.states()[1:]).encode()).hexdigest()[:16])


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _unchanged(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input


def _without_dropout(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *more: Any,
        **named: Any,
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, *more, **named)

    return call
