"""Local SGD: each worker steps alone, and every `sync_every` steps all take the mean of their models.

The mean is weighted by the samples that each has seen since the last one, so with `sync_every=1` and plain SGD it is
data parallelism, however the batch is cut. Optimizers keep their own state: it is not averaged.

Source: Stich 2018, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767; the exact start
("post-local"): Lin et al. 2018, arXiv:1808.07217.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from manyhands.communication.world import World
from manyhands.config.local_steps import LocalSGD
from manyhands.strategies.alone import Alone, Own, drifting, weighted_mean
from manyhands.strategies.rounds import Rounds
from manyhands.strategies.strategy import Compute, Piece, Scale, Shard, StepOutcome, Steppable


class LocalSteps:
    """The strategy of `LocalSGD`."""

    def __init__(self, config: LocalSGD, world: World) -> None:
        self.config, self.world = config, world
        by_node = config.inside_node == "exact"
        self.alone, self.own = Alone(world, by_node=by_node), Own(world)
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
        """Step alone; take the mean when it is time."""
        self.own.step(optimizer)
        self.steps += 1
        self.rounds.saw(optimizer)
        if self.steps <= self.config.sync_warmup or self.alone.steps >= self.rounds.length:
            self.average(model)
            self.alone.met()
            self.rounds.next()

    def average(self, model: nn.Module) -> None:
        """Replace the model of every worker by the mean over all of them."""
        weighted_mean(drifting(model), self.alone.weight, self.world)

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
