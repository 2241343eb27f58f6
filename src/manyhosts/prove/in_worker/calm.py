"""Takes chance and rounding out of a script: no dropout, float64, BatchNorm with its running statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.data import randomness
from manyhosts.data.steps import mapped
from manyhosts.loss.set_draws import MADE, SetDraws
from manyhosts.prove.conduct import TrialConfig

_BY_ROW = (
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "uniform",
    "normal",
    "bernoulli",
    "randint",
    "randint_like",
    "exponential",
    "log_normal",
    "cauchy",
    "geometric",
)
"""Operators that draw a number for each place of a tensor."""
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class RemoveNondeterminism:
    """What a trial leaves out, as `conduct` says."""

    def __init__(self, conduct: TrialConfig) -> None:
        self.double = conduct.double
        self.no_dropout = conduct.no_dropout or conduct.double
        self.freezes = conduct.freeze_batch_norm
        self.sets_draws, self.draws_rows = conduct.set_draws, conduct.draw_rows
        self.samples: list[list[int]] = [[]]
        """Of each piece of this step."""
        self.passes = 0
        """Forward passes of this step."""
        self.left = ""
        """What was drawn and could not be set."""
        self.drawn: set[str] = set()
        """The shapes that were drawn in each forward pass of this step."""
        self.ends: set[str] = set()
        """Where NumPy's and Python's generators were after the forward passes of this step."""
        self.norms: list[nn.Module] = []
        self.model: nn.Module | None = None

    def put_in_place(self) -> None:
        """Before the script: dropout that is called as a function, and the type of what is made without one."""
        if self.double:
            torch.set_default_dtype(torch.float64)
            Tensor.float = Tensor.double  # type: ignore[method-assign]  # as norms do that count in float32
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
        """For one piece: after the seed that it has by its address."""
        calm = self.calm
        sizes, samples = set(map(len, calm.samples)), calm.samples[calm.passes % len(calm.samples)]
        calm.passes += 1
        draws = RowDraws(samples, sizes) if calm.draws_rows else SetDraws(0.3, sizes)
        randomness.seed_compute(0)
        with self.context(), draws:
            yield
        if isinstance(draws, RowDraws):
            calm.drawn.add(" ".join(draws.shapes))
        calm.left = calm.left or draws.left
        calm.ends.add(hashlib.sha256(repr(randomness.states()[1:]).encode()).hexdigest()[:16])


class RowDraws(SetDraws):
    """Within, each sample has random numbers of its own, whichever others are in its piece; all else that is drawn has
    an address, too.

    Two samples then differ by what is drawn for them, which one value for all does not show.
    """

    def __init__(self, samples: Sequence[int], sizes: Collection[int]) -> None:
        super().__init__(0.3, sizes)
        self.samples = samples
        self.shapes: list[str] = []
        """That were drawn: of a row, and of what has no row for each sample."""

    def _made(self, name: str, given: Mapping[str, Any]) -> Any:
        one = super()._made(name, given)
        if name not in _BY_ROW or one is None:
            return one
        shape = (
            given["size"]
            if "size" in given
            else next(given[each].shape for each in ("self", "mean", "std") if isinstance(given.get(each), Tensor))
        )
        by_row = len(shape) > 0 and shape[0] == len(self.samples)
        self.shapes.append(f"rows of {tuple(shape[1:])}" if by_row else f"{tuple(shape)}")
        rows = [self._drawn(shape[1:], 1 + sample) for sample in self.samples] if by_row else []
        value = torch.stack(rows) if rows else self._drawn(shape, 0)
        if name.startswith("randint"):
            low = given.get("low", 0)
            return low + (value * (given["high"] - low)).long()
        return MADE[name](given, value)

    def _drawn(self, shape: Sequence[int], sample: int) -> Tensor:
        random = torch.Generator().manual_seed(randomness.seed_at(len(self.shapes), sample))
        return torch.rand(tuple(shape), generator=random, dtype=torch.float64)


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
