"""Copies of a model that step alone, each kept in parts by several workers: a mesh of `replicate` and `shard`.

Within a copy a step is that of `fsdp`, over the samples of its workers. Copies synchronise as workers under
`local-sgd` and `diloco`, part by part: each worker with those that hold the same part, and what an outer optimizer
keeps of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from manyhosts.communication.nodes import Levels
from manyhosts.communication.world import World
from manyhosts.config.local_steps import DiLoCo, LocalSGD
from manyhosts.errors import ConfigError
from manyhosts.strategies.diloco import OuterSteps
from manyhosts.strategies.fsdp.strategy import FullySharded
from manyhosts.strategies.local_stepping import LocalStepping, LocalSteps
from manyhosts.strategies.local_updates import LocalGradient
from manyhosts.strategies.optimizer_step import stepping
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome
from manyhosts.strategies.traits import Traits


class GradientOfCopy(LocalGradient):
    """The gradient of the samples of one copy, in parts; of all copies in an exact beginning."""

    def __init__(self, sharded: FullySharded) -> None:
        super().__init__(sharded.world)
        self.sharded = sharded

    def levels(self, *, exact: bool) -> Levels:
        """Who steps together now: the workers of a copy, or all."""
        return Levels.one(self.world) if exact else Levels(tuple(self.sharded.mesh.groups("shard")))

    def regroup(self, levels: Levels | None, first: int) -> None:
        """Sum gradients from now on as `levels` says. Called by all workers."""
        assert levels is not None, "a worker never steps alone here"
        self.sharded.step_alone(len(levels.nodes) > 1)
        self.together, self.node_of = self.sharded.members, levels.node_of
        self.number = self.node_of[self.world.rank]

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Fill the gradients with the mean over the samples of this worker's copy."""
        self.begin(scale)
        assert self.together is not None, "place() comes before"
        own = self.share_of(self.together, sum(piece.weight for piece in pieces))
        outcome = self.sharded.forward_backward(model, pieces, compute, scale, control_flags)
        self.end(own)
        return outcome


class CopiesInParts(LocalStepping):
    """What both kinds of exchange have in common; each has its own besides."""

    traits = Traits(synchronous=False, communicates_in_forward=True, holds_full_model=False, survives_loss=False)

    def __init__(self, config: LocalSGD | DiLoCo, world: World) -> None:
        """A strategy for several workers.

        Raises:
            ConfigError: `shard` does not divide them.
        """
        super().__init__(config, world)
        self.sharded = FullySharded(config.copy, world)
        self.mesh, self.holding = self.sharded.mesh, self.sharded.holding
        self.misuse_told = self.sharded.misuse_told
        self.alone = GradientOfCopy(self.sharded)

    def place(self, model: nn.Module) -> nn.Module:
        """Keep this worker's part of `model`, equal to rank 0's.

        Raises:
            ConfigError: see `FullySharded.place`.
        """
        self.model = self.sharded.place(model)
        self.alone.place(self.model, exact=self.is_exact)
        return self.model

    def compare_copies(
        self, tensors: Mapping[str, Tensor], checksums: Callable[[Mapping[str, Tensor]], Mapping[str, str]]
    ) -> tuple[str, Mapping[str, Tensor]]:
        """See `CutModel`."""
        return self.sharded.compare_copies(tensors, checksums)

    def norm(self, model: nn.Module) -> Tensor:
        """That of the gradient of this worker's copy. All workers call this."""
        return self.sharded.norm(model)

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip by that norm. All workers call this."""
        return self.sharded.clip_gradients(model, max_norm)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, which knows of this worker's parts alone.

        Raises:
            ConfigError: it is the first step, and a copy has no sample in it.
        """
        if self.steps == 0 and self.world.any(bool(self.alone.share == 0)):
            copies = self.copies.size
            raise ConfigError(
                "the first batch is so small that a copy of the model has no sample of it, and its optimizer nothing "
                "that a snapshot must have",
                where="batch_size",
                fix=f"raise it: there are {copies} copies of {self.world.size // copies} workers each",
            )
        with stepping(optimizer):
            optimizer.step()


class MeanInParts(LocalSteps, CopiesInParts):
    """The strategy of `LocalSGD` with `shard`."""

    traits = CopiesInParts.traits


class OuterStepsInParts(OuterSteps, CopiesInParts):
    """The strategy of `DiLoCo` with `shard`."""

    traits = CopiesInParts.traits
