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
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from manyhosts.errors import ConfigError


class Batch(Protocol):
    """What BatchNorm layers take for their batch while a trainer computes."""

    def normalise(self, layer: nn.modules.batchnorm._BatchNorm, input: Tensor, *, track: bool) -> Tensor:
        """Normalise `input` of shape `(N, C, …)`. `track`: its samples count in the layer's running values."""


_batch: Batch | None = None
"""That of the trainer which computes now."""


class acting:  # called as a function is
    """Within, BatchNorm layers of models that a trainer has prepared have this `batch`. Entered in every step."""

    __slots__ = ("_batch", "_before")

    def __init__(self, batch: Batch | None) -> None:
        self._batch = batch

    def __enter__(self) -> None:
        global _batch
        self._before, _batch = _batch, self._batch

    def __exit__(self, *_: object) -> None:
        global _batch
        _batch = self._before


class _Shared(nn.modules.batchnorm._BatchNorm):
    plain: ClassVar[type[nn.Module]]
    """PyTorch's class that this one replaces."""

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


def _in_place_of(kind: type[nn.Module], base: type[_Shared]) -> type[_Shared]:
    return type(f"Shared{kind.__name__}", (base, kind), {"plain": kind, "__module__": __name__})


_SHARED: dict[type[nn.Module], type[_Shared]] = {
    kind: _in_place_of(kind, _Shared)
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # the last one asks for a GPU
}


def _shared(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class in place of `kind`; None where `kind` is no BatchNorm, or is in the place of one already.

    In place of a class that derives from PyTorch's comes one that derives from both: what it adds to `forward` calls
    PyTorch's, which is ours there.
    """
    if issubclass(kind, _Shared):
        return None
    if kind not in _SHARED:
        base = next((ours for plain, ours in list(_SHARED.items()) if issubclass(kind, plain)), None)
        if base is None or issubclass(kind, torch.jit.ScriptModule):
            return None
        _SHARED[kind] = type(f"Shared{kind.__name__}", (kind, base), {"plain": kind, "__module__": __name__})
    return _SHARED[kind]


def prepare(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Let the BatchNorm layers of `model` ask the trainer that computes. Returns them. May be called several times."""
    for module in model.modules():
        if (kind := _shared(type(module))) is not None:
            module.__class__ = kind
    return [module for module in model.modules() if isinstance(module, _Shared)]


def running_of(layer: nn.modules.batchnorm._BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """The running mean and variance of a layer that keeps them, and how many batches they are of."""
    return cast(tuple[Tensor, Tensor, Tensor], (layer.running_mean, layer.running_var, layer.num_batches_tracked))


def check_values(input: Tensor) -> None:
    """See that `input`, of shape `(N, C, …)`, the entire batch of a layer, has a variance.

    Raises:
        ConfigError: it has one value for each channel.
    """
    if input.numel() == input.shape[1]:
        raise ConfigError(
            f"BatchNorm is given one value for each of {input.shape[1]} channels, which has no variance: the batch, or "
            "the micro-batch, is of one sample",
            where="mh.Data(batch_size=…)",
            fix="set drop_last=True, or choose sizes with which no batch and no micro-batch is of one sample",
        )


class OwnBatch:
    """The samples of this worker alone, as in PyTorch."""

    def normalise(self, layer: nn.modules.batchnorm._BatchNorm, input: Tensor, *, track: bool) -> Tensor:
        """See `Batch`.

        Raises:
            ConfigError: see `check_values`.
        """
        check_values(input)
        if track or layer.running_mean is None or layer.running_var is None:
            return nn.modules.batchnorm._BatchNorm.forward(layer, input)
        # Copies take the change: a checkpoint wants to see as many tensors saved as the first time.
        running = layer.running_mean.clone(), layer.running_var.clone()
        return nn.functional.batch_norm(input, *running, layer.weight, layer.bias, training=True, eps=layer.eps)
