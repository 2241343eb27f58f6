"""What strategies share whose workers each hold the whole model, and its gradient."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from manyhosts.communication.holding import WHOLE, Holding
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.world import World
from manyhosts.strategies.strategy import Shard
from manyhosts.strategies.traits import Traits


class WholeModel:
    """All workers stand along one axis, `replicate`: each reads its part of the batch."""

    traits: ClassVar[Traits]
    holding: Holding = WHOLE

    def __init__(self, world: World) -> None:
        self.world, self.mesh = world, Mesh(world)

    def shard(self) -> Shard:
        """One part for each worker."""
        return Shard(self.mesh.data.rank, self.mesh.data.size)

    def norm(self, model: nn.Module) -> Tensor:
        """That of this worker's gradient: where all step together it is the same one on every worker."""
        return norm_of([parameter.grad for parameter in model.parameters() if parameter.grad is not None])

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip by that norm."""
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


@torch.no_grad()
def norm_of(gradients: list[Tensor]) -> Tensor:
    """That of all `gradients` together, shape (). What `get_total_norm` gives, in half its time for small models."""
    if not gradients:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm
