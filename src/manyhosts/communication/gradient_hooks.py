"""How buckets hear of gradients that autograd has computed, and what they say of those that they cannot take."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from manyhosts.errors import ConfigError


class Buckets(Protocol):
    """What wants to hear of gradients."""

    def ready(self, number: int, parameter: Tensor) -> None:
        """There is a gradient of `parameter`, which has this number."""


def watch(buckets: Buckets, parameters: Sequence[nn.Parameter]) -> None:
    """Have `buckets` hear of every gradient of `parameters`, which are numbered in their order.

    A model may outlive its buckets, and be given to another trainer, which has buckets of its own: its parameters do
    not keep old ones in memory, and forget them when they are gone.
    """
    reference = weakref.ref(buckets)
    handles = [
        parameter.register_post_accumulate_grad_hook(_teller(reference, number))
        for number, parameter in enumerate(parameters)
    ]
    weakref.finalize(buckets, _forget, handles).atexit = False


def _teller(reference: weakref.ref[Buckets], number: int) -> Callable[[Tensor], None]:
    def tell(parameter: Tensor) -> None:
        buckets = reference()
        if buckets is not None:
            buckets.ready(number, parameter)

    return tell


def _forget(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def move(views: list[Tensor], gradients: list[Tensor]) -> None:
    """Copy `gradients` into `views`.

    Raises:
        ConfigError: one of them is sparse.
    """
    try:
        torch._foreach_copy_(views, gradients)
    except RuntimeError:
        for gradient in gradients:
            check_dense(gradient)
        raise


def check_dense(gradient: Tensor) -> None:
    """Raise ConfigError where `gradient` is sparse."""
    if gradient.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of a parameter of shape {tuple(gradient.shape)} is sparse, and workers sum dense ones",
            where="backward",
            fix="leave sparse=True out of embeddings, and take Adam or SGD in place of SparseAdam",
        )


def came_late(parameter: Tensor) -> ConfigError:
    """What to raise where more of a gradient comes after it has been sent to the other workers."""
    return ConfigError(
        f"the gradient of a parameter of shape {tuple(parameter.shape)} grew after it was sent: this backward pass "
        "adds to it several times, and the first one did not",
        where="backward",
        fix="use checkpoint(..., use_reentrant=False), and the same checkpoints in every step",
    )
