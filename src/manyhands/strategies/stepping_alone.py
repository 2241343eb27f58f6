"""What `local-sgd` and `diloco` have in common: workers that step alone, and exchange something now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from manyhands.communication.world import World
from manyhands.config.local_steps import DiLoCo, LocalSGD
from manyhands.strategies.alone import Alone, Own
from manyhands.strategies.rounds import Rounds
from manyhands.strategies.strategy import Compute, Piece, Scale, Shard, StepOutcome, Steppable


class SteppingAlone:
    """All of such a strategy but the exchange, which each adds."""

    def __init__(self, config: LocalSGD | DiLoCo, world: World) -> None:
        self.config, self.world = config, world
        self.alone, self.own = Alone(world, by_node=config.inside_node == "exact"), Own(world)
        self.rounds = Rounds(config)
        self.model: nn.Module | None = None
        self.steps = 0
        """Of the run."""

    def shard(self) -> Shard:
        """One part for each worker."""
        return Shard(self.world.rank, self.world.size)

    def place(self, model: nn.Module) -> nn.Module:
        """Move `model` to this worker's device and make it equal to the leader's."""
        self.model = model.to(self.world.device)
        for tensor in [*model.parameters(), *model.buffers()]:
            self.world.broadcast(tensor.data)
        self.alone.place(self.model)
        return self.model

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, riders: Sequence[float]
    ) -> StepOutcome:
        """Fill the gradients with the mean over one's own samples: the worker's, or its node's."""
        return self.alone.forward_backward(model, pieces, compute, scale, riders)

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip by the norm of one's own gradient: the worker's, or its node's."""
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Step alone, and exchange what is due."""
        self.own.step(optimizer)
        self.steps += 1
        self.rounds.saw(optimizer)
        self.exchange(model)

    def exchange(self, model: nn.Module) -> None:
        """Exchange what is due after the last step."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """This worker's own model and optimizer, where they differ from the others'."""
        return {
            "steps": self.steps,
            **self.rounds.state_dict(),
            **self.alone.state_dict(),
            **self.own.state_dict(self.model),
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what `state_dict` gave; where the workers changed, all go on from the mean."""
        if not states or not states[0]:
            return
        assert self.model is not None, "place() comes before load_state_dict()"
        self.steps = states[0]["steps"]
        self.rounds.load_state_dict(states[0])
        self.alone.load_state_dict(states)
        self.own.load_state_dict(self.model, states, same=self.alone.same(states))
