"""What strategies share whose workers hold parts of each tensor: the norm of a gradient that nobody holds whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manyhosts.communication.holding import Holding
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.parts import TensorPart
from manyhosts.device import by_device
from manyhosts.strategies.strategy import Shard
from manyhosts.strategies.traits import Traits


def sum_together(given: Sequence[Tensor], summed: Callable[[Tensor], Tensor]) -> None:
    """Have their sums over workers in place of `given`, by a message for each dtype. `summed` makes one of them."""
    for dtype in dict.fromkeys(each.dtype for each in given):
        own = [each for each in given if each.dtype == dtype]
        flat = summed(torch.cat([each.reshape(-1) for each in own]))
        for each, part in zip(own, flat.split([each.numel() for each in own]), strict=True):
            each.copy_(part.view_as(each))


class CutModel:
    """The model lies over the workers of `mesh` as `holding` says."""

    traits: ClassVar[Traits]

    def __init__(self, mesh: Mesh, holding: Holding) -> None:
        self.mesh, self.world, self.holding = mesh, mesh.world, holding

    def state_dict(self) -> dict[str, Any]:
        """Nothing: it remembers nothing."""
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Nothing to take up."""

    def shard(self) -> Shard:
        """One part for each worker that reads samples of its own."""
        return Shard(self.mesh.data.rank, self.mesh.data.size)

    @torch.no_grad()
    def norm(self, model: nn.Module) -> Tensor:
        """That of the whole gradient. All workers call this: each adds what it gives, and every element counts once."""
        given = []
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            part = self.holding.part(parameter.grad)
            if isinstance(part, TensorPart):
                given.append(part.local)
            elif self.world.is_leader:
                given.append(part)
        squares = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for where, own in by_device(given).items():
            here = torch.zeros((), dtype=torch.float64, device=where)
            for norm in torch._foreach_norm(own):
                here += norm.double().square()
            squares += here.to(self.world.device)
        return self.world.all_reduce(squares).sqrt().float()

    @torch.no_grad()
    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale what this worker holds of the gradient as PyTorch's `clip_grad_norm_` would scale all of it."""
        norm = self.norm(model)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        held = [self.holding.local(each.grad) for each in model.parameters() if each.grad is not None]
        for where, own in by_device(held).items():
            here = factor.to(where)
            for gradient in own:
                gradient.mul_(here.to(gradient.dtype))
        return norm
