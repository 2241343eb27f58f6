"""A strategy that cuts every parameter over the workers and puts it together for each forward pass, for tests.

It is what fully sharded training is, without anything that makes that fast: each gathered tensor lives until its
gradient is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Cut

from manyhosts.communication.dtensors import DTensors
from manyhosts.communication.layout import spread
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.world import World
from manyhosts.config.strategy_settings import StrategySettings
from manyhosts.strategies.cut_model import CutModel
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome, Steppable
from manyhosts.strategies.table import STRATEGIES
from manyhosts.strategies.tally import Agreed, StepMetrics
from manyhosts.strategies.traits import Traits


@dataclass(frozen=True, kw_only=True, slots=True)
class ByHand(StrategySettings):
    """What the settings say."""

    name: ClassVar[str] = "cut-by-hand"
    shard: int = 1


class CutByHand(CutModel):
    """Over the axis `shard`; those along `replicate` hold the same."""

    traits = Traits(communicates_in_forward=True, holds_full_model=False, survives_loss=False)

    def __init__(self, config: ByHand, world: World) -> None:
        mesh = Mesh(world, shard=config.shard)
        super().__init__(mesh, DTensors(mesh))
        self.agreed = Agreed()

    def place(self, model: nn.Module) -> nn.Module:
        model = model.to(self.world.device)
        spread([*model.parameters(), *model.buffers()], self.world)
        over = self.mesh.device_mesh("shard")
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                cut = distribute_tensor(parameter.detach(), over, [Cut(0)])
                setattr(module, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        model.register_forward_pre_hook(lambda *_: self._put_together(model))
        model.register_forward_hook(lambda *_: self._take_apart(), always_call=True)
        return model

    def _put_together(self, model: nn.Module) -> None:
        self._apart: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                self._apart.append((module, name, parameter))
                del module._parameters[name]
                setattr(module, name, _Gather.apply(parameter, self))

    def _take_apart(self) -> None:
        for module, name, parameter in self._apart:
            delattr(module, name)
            module._parameters[name] = parameter
        self._apart = []

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        for parameter in model.parameters():
            parameter.grad = None
        tally = StepMetrics(control_flags, self.agreed, self.world)
        for piece in pieces:
            scale(tally.add(compute(model, piece), piece.weight)).backward()
        self.world.wait(tally.start_sum())
        return tally.outcome()

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        pass


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor, strategy: CutByHand) -> Tensor:
        ctx.parameter, ctx.strategy = parameter, strategy
        own = strategy.holding.local(parameter)
        return torch.cat(strategy.mesh.along("shard").gather(own))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parameter, strategy = ctx.parameter, ctx.strategy
        total = strategy.mesh.data.all_reduce(gradients[0].clone())
        block = strategy.holding.block(parameter)
        begin = block.offset[0]
        return strategy.holding.like(parameter, total[begin : begin + len(block.local)].clone()), None


def known() -> None:
    """Let the trainer know the strategy, in this process."""
    STRATEGIES.own[ByHand.name] = f"{__name__}:{CutByHand.__name__}"  # type: ignore[index]  # a dict underneath
