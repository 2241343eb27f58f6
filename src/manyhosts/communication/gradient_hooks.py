"""How buckets hear of gradients that autograd has computed, and what they say of those that they cannot take."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from manyhosts.errors import ConfigError


class Buckets(ABC):
    """What hears of every gradient of the `parameters` that are trained, numbered in their order.

    A model may outlive its buckets, and be given to another trainer, which has buckets of its own: its parameters do
    not keep old ones in memory, and forget them when they are gone.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        reference = weakref.ref(self)
        for number, parameter in enumerate(self.parameters):
            hook = parameter.register_post_accumulate_grad_hook(partial(_notify, reference, number))
            weakref.finalize(self, hook.remove).atexit = False

    @abstractmethod
    def ready(self, number: int, parameter: Tensor) -> None:
        """Called by autograd when there is a gradient of `parameter`, which has this number: mostly the final one."""

    @abstractmethod
    def rest(self) -> None:
        """A step has broken off: nothing is sent before the next `arm`."""

    def backward(self, loss: Tensor) -> None:
        """The backward pass of `loss`."""
        try:
            loss.backward()
        except BaseException:
            self.rest()  # the model may be trained by another trainer, whose gradients are not for these buckets
            raise


def _notify(reference: weakref.ref[Buckets], number: int, parameter: Tensor) -> None:
    if (buckets := reference()) is not None:
        buckets.ready(number, parameter)


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
