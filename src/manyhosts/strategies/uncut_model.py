"""What strategies share whose workers each hold the entire model, and its gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manyhosts.communication.holding import UNCUT
from manyhosts.communication.layout import spread
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.world import World
from manyhosts.device import backward_from
from manyhosts.strategies.materialise import is_meta, materialise, places_of
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome, Steppable, Strategy
from manyhosts.strategies.tally import Agreed, StepMetrics
from manyhosts.strategies.traits import Traits


class UncutModel(Strategy):
    """All workers are along one axis, `replicate`: each reads its part of the batch."""

    def __init__(self, world: World) -> None:
        super().__init__(Mesh(world), UNCUT)
        self.agreed = Agreed()
        self.agreed_of: defaultdict[int, Agreed] = defaultdict(Agreed)
        """By the number of a pass, where a step has several."""

    def place(self, model: nn.Module) -> nn.Module:
        """Give it values where it has none, move it to this worker's device, and make it equal to rank 0's."""
        if is_meta(model):
            materialise(model.modules(), places_of(model))
        model = model.to(self.world.device)
        spread([*model.parameters(), *model.buffers()], self.world)
        return model

    def norm(self, model: nn.Module) -> Tensor:
        """That of this worker's gradient: where all step together it is the same one on every worker."""
        return norm_of(
            [
                gradient.coalesce().values() if gradient.is_sparse else gradient
                for each in model.parameters()
                if (gradient := each.grad) is not None
            ]
        )

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip by that norm."""
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Step the optimizer; equal gradients keep the workers equal."""
        optimizer.step()


@torch.no_grad()
def norm_of(gradients: list[Tensor]) -> Tensor:
    """That of all `gradients` together, shape (). What `get_total_norm` gives, in half its time for small models."""
    if not gradients:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


class SingleProcess(UncutModel):
    """The plain strategy that every other one is compared with."""

    traits = Traits(survives_loss=False)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.parameters: list[nn.Parameter] = []

    def place(self, model: nn.Module) -> nn.Module:
        """Move `model` to this worker's device."""
        model = super().place(model)
        self.parameters = list(model.parameters())  # to walk through the modules in every step costs 30 µs
        return model

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Accumulate the gradients of all pieces."""
        for parameter in self.parameters:
            parameter.grad = None
        tally = StepMetrics(control_flags, self.agreed, self.world)
        for piece in pieces:
            backward_from(scale(tally.add(compute(model, piece), piece.weight)))
        return tally.outcome()

    def make_group(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """See `Strategy`."""
        return parameters

    def use_group(self, group: Sequence[nn.Parameter] | None, call: int) -> None:
        """See `Strategy`."""
        self.parameters, self.agreed = list(group or ()), self.agreed_of[call]
