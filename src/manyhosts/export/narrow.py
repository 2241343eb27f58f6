"""Weights in eight or sixteen bits: of int8, matrices and kernels are integers with one scale for each row.

Symmetric, by the largest value of each row of the first dimension (each output channel), as in torchao's weight-only
int8; decision 0103 says why it is not torchao's. Inside a program the weight is made again where it is used, so any
runtime computes it with ordinary operations, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

_SCALE = ".scale"
_LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Narrow(nn.Module):
    """A weight that is kept in fewer bits: as int8 and a scale for each row, or as bfloat16."""

    def __init__(self, weight: Tensor, precision: str) -> None:
        super().__init__()
        kept, scale = rounded(weight) if precision == "int8" else (weight.to(torch.bfloat16), None)
        self.register_buffer("kept", kept)
        self.register_buffer("scale", scale)

    def forward(self) -> Tensor:
        """The weight, nearly."""
        weight, scale = self.get_buffer("kept").float(), self._buffers["scale"]
        return weight if scale is None else weight * scale


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight`, of shape (rows, …), as int8 of that shape and a scale of shape (rows, 1, …)."""
    scale = weight.abs().amax(dim=tuple(range(1, weight.dim())), keepdim=True).clamp(min=1e-12) / 127
    return torch.round(weight / scale).clamp(-127, 127).to(torch.int8), scale


def _of_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, _LAYERS)]


@torch.no_grad()
def narrow(model: nn.Module, precision: str) -> nn.Module:
    """`model` itself, its linear, convolution and embedding weights kept in fewer bits. Tied weights stay tied."""
    shared: dict[int, _Narrow] = {}
    for _, layer in _of_layers(model):
        weight: Any = layer.weight
        kept = shared.setdefault(id(weight), _Narrow(weight, precision))
        del layer._parameters["weight"]
        layer.add_module("narrow_weight", kept)
        kind = type(layer)
        # A property: models also read the weights of layers that they do not call
        weight_of = property(lambda self: self.get_submodule("narrow_weight")())
        layer.__class__ = type(kind.__name__, (kind,), {"weight": weight_of})
    return model


def quantised_state(model: nn.Module) -> dict[str, Tensor]:
    """The `state_dict` of `model`, with int8 for the weights of those layers and `name.scale` next to each."""
    state = dict(model.state_dict())
    for name, _ in _of_layers(model):
        weight = f"{name}.weight".removeprefix(".")
        state[weight], state[weight + _SCALE] = rounded(state[weight])
    return state


def dequantised(read: Callable[[str], Tensor], name: str, names: Collection[str]) -> Tensor:
    """The tensor `name` of a file with these `names`, multiplied by its scale where it has one."""
    tensor = read(name)
    return tensor.float() * read(name + _SCALE) if name + _SCALE in names else tensor
