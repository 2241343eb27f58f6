"""BatchNorm layers that ask the trainer which is computing what their batch is.

The layers stay the objects that they are, with their parameters, hooks and names; their class becomes one that derives
from PyTorch's. While a trainer computes a step, they normalise as it says: over the batch of all workers, over one part
of it, over this worker's own samples. At all other times they do what PyTorch's do, and so do their copies and what is
read from a file: both are of PyTorch's own class. So one model can be trained by several trainers in turn.

A checkpoint computes a layer's output a second time in the backward pass. Its samples have been counted then: the
running values are left alone.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn


class Batch(Protocol):
    """What BatchNorm layers take for their batch while a trainer computes."""

    def normalise(self, layer: nn.modules.batchnorm._BatchNorm, input: Tensor, *, track: bool) -> Tensor:
        """Normalise `input` of shape `(N, C, …)`. `track`: its samples count in the layer's running values."""


_batch: Batch | None = None
"""That of the trainer which computes now."""


@contextmanager
def acting(batch: Batch | None) -> Iterator[None]:
    """Within, BatchNorm layers of models that a trainer has prepared have this `batch`."""
    global _batch
    before, _batch = _batch, batch
    try:
        yield
    finally:
        _batch = before


class _Shared(nn.modules.batchnorm._BatchNorm):
    plain: ClassVar[type[nn.Module]]
    """PyTorch's class that this one stands for."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` of shape `(N, C, …)`."""
        if _batch is None or not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        counts = self.training and self.running_mean is not None
        return _batch.normalise(self, input, track=counts and not _computed_again())

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return (copyreg._reconstructor, (self.plain, object, None), *reduced[2:])  # type: ignore[attr-defined]


def _computed_again() -> bool:
    """Whether a backward pass is running, so that this forward pass is a checkpoint's second one."""
    return bool(torch._C._current_graph_task_id() != -1)


class SharedBatchNorm1d(_Shared, nn.BatchNorm1d):
    """In place of `nn.BatchNorm1d`."""

    plain = nn.BatchNorm1d


class SharedBatchNorm2d(_Shared, nn.BatchNorm2d):
    """In place of `nn.BatchNorm2d`."""

    plain = nn.BatchNorm2d


class SharedBatchNorm3d(_Shared, nn.BatchNorm3d):
    """In place of `nn.BatchNorm3d`."""

    plain = nn.BatchNorm3d


_SHARED: dict[type[nn.Module], type[_Shared]] = {
    kind.plain: kind for kind in (SharedBatchNorm1d, SharedBatchNorm2d, SharedBatchNorm3d)
}


def prepare(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Let the BatchNorm layers of `model` ask the trainer that computes. Returns them. May be called several times."""
    for module in model.modules():
        if type(module) in _SHARED:
            module.__class__ = _SHARED[type(module)]
    return [module for module in model.modules() if isinstance(module, _Shared)]


class OwnBatch:
    """The samples of this worker alone, as in PyTorch."""

    def normalise(self, layer: nn.modules.batchnorm._BatchNorm, input: Tensor, *, track: bool) -> Tensor:
        """See `Batch`."""
        if track or layer.running_mean is None or layer.running_var is None:
            return nn.modules.batchnorm._BatchNorm.forward(layer, input)
        # Copies take the change: a checkpoint wants to see as many tensors saved as the first time.
        running = layer.running_mean.clone(), layer.running_var.clone()
        return nn.functional.batch_norm(input, *running, layer.weight, layer.bias, training=True, eps=layer.eps)
