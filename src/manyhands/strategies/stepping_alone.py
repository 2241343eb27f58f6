"""What `local-sgd` and `diloco` have in common: workers that step alone, and exchange something now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.communication.world import World
from manyhands.config.local_steps import DiLoCo, LocalSGD
from manyhands.strategies import rate_alone
from manyhands.strategies.alone import Alone, Own, drifting, weighted_mean
from manyhands.strategies.rounds import Rounds
from manyhands.strategies.strategy import Compute, Piece, Scale, Shard, StepOutcome, Steppable


@dataclass(frozen=True, slots=True)
class Stood:
    """How far a worker had stepped alone when the workers changed."""

    since: int
    """Steps since the last exchange; -1 for a worker that has not trained yet."""
    share: float
    """Its part of the samples of those steps, in batches."""


def lost_workers(count: int) -> str:
    """In words."""
    return "the lost worker" if count == 1 else f"the {count} lost workers"


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
        """Step alone. What is exchanged comes behind it: see `exchange`."""
        by = self._lr_factor(optimizer)
        if by != 1 and isinstance(optimizer, torch.optim.Optimizer):
            with rate_alone.multiplied(optimizer, by, decay=False):
                self.own.step(optimizer)
        else:
            self.own.step(optimizer)
        self.steps += 1
        self.rounds.saw(optimizer)

    def _lr_factor(self, optimizer: Steppable) -> float:
        """What the learning rate is multiplied by: it follows the number of those that step alone now."""
        return rate_alone.factor(self.config.local_lr_scaling, optimizer, len(set(self.alone.node_of)))

    def about_rate(self, optimizer: Steppable) -> str:
        """What this does to the learning rate, in a sentence for the user; empty where it does nothing."""
        by = self._lr_factor(optimizer)
        if by == 1:
            return ""
        return (
            f"{self.config.name}: {type(optimizer).__name__} steps at {by:.3g} times the learning rate, the root of "
            f"how many step alone ({len(set(self.alone.node_of))}); local_lr_scaling=None leaves it as it is"
        )

    # Workers that go and come.

    @property
    def survives(self) -> bool:
        """Whoever steps alone is enough for a new one to begin; but in a node that does, optimizers are alike."""
        return self.alone.node is None

    @property
    def whole(self) -> bool:
        """Whether this worker's gradient of the step under way is here."""
        return self.alone.whole

    def let_go(self) -> None:
        """Nothing is under way between two steps."""

    def step_back(self) -> None:
        """Count the samples of the step under way as not seen."""
        self.alone.step_back()

    def shared_state(self) -> dict[str, Any]:
        """Where the run and its rounds stand."""
        return {"steps": self.steps, **self.rounds.shared_state()}

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Take up what `shared_state` gave on another worker."""
        self.steps = state["steps"]
        self.rounds.take_shared(state)

    def meet(self, source: int, *, new: bool, gone: int) -> str:
        """Let all go on from the mean of the models of those that trained, weighted by the samples each has seen.

        Where one of them has the mean that was due already, with the part of a lost worker in it, all take that.
        """
        assert self.model is not None, "place() comes before meet()"
        alone = self.alone
        row = torch.tensor([-1 if new else alone.steps, alone.share], dtype=torch.float64, device=self.world.device)
        stood = [Stood(int(since), share) for since, share in self.world.stack(row).tolist()]
        since = max(each.since for each in stood)
        share = sum(each.share for each in stood if each.since > 0)
        have_met = [rank for rank, each in enumerate(stood) if each.since == 0]
        if have_met:
            for tensor in drifting(self.model):
                self.world.broadcast(tensor.data, have_met[0])
        else:
            weighted_mean(drifting(self.model), self.part_of_mean(stood), self.world)
        alone.met()
        if have_met or not gone:
            return ""
        return f"what {lost_workers(gone)} learned alone from {since - share:.3g} batches in {since} steps"

    def part_of_mean(self, stood: Sequence[Stood]) -> float:
        """What this worker's model counts in the mean of those that trained; of all together 1."""
        share = sum(each.share for each in stood if each.since > 0)
        own = stood[self.world.rank]
        if own.since < 0:
            return 0.0
        return own.share / share if share else 1 / sum(each.since >= 0 for each in stood)

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
