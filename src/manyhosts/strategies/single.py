"""One process: no exchange at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from manyhosts.communication.world import World
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome, Steppable
from manyhosts.strategies.tally import Agreed, StepMetrics
from manyhosts.strategies.traits import TRAITS
from manyhosts.strategies.whole_model import WholeModel


class SingleProcess(WholeModel):
    """The plain strategy that every other one is compared with."""

    traits = TRAITS["single"]

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.parameters: list[nn.Parameter] = []
        self.agreed = Agreed()
        self.agreed_of: defaultdict[int, Agreed] = defaultdict(Agreed)

    def place(self, model: nn.Module) -> nn.Module:
        """Move `model` to this worker's device."""
        model = model.to(self.world.device)
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
            scale(tally.add(compute(model, piece), piece.weight)).backward()
        return tally.outcome()

    def make_group(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """See `strategy.SumsByGroup`."""
        return parameters

    def use_group(self, group: Sequence[nn.Parameter] | None, call: int) -> None:
        """See `strategy.SumsByGroup`."""
        self.parameters, self.agreed = list(group or ()), self.agreed_of[call]

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Step the optimizer."""
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: it remembers nothing."""
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Nothing to take up."""
