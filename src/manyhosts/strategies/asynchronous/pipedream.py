"""A pipeline that is emptied at the end of a step alone: within it each stage makes many updates, as gradients come.

A step of the trainer is where all stages meet: its batch passes through as micro-batches, in the order 1f1b, and after
each `accumulate` of them a stage updates its own weights and asks nobody. Which weights a pass finds follows from that
order and from no clock, so two runs have the same bits. With two versions it does not depend on the stages, either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.config.pipedream import PipeDream
from manyhosts.errors import ConfigError
from manyhosts.strategies.asynchronous.versions import Versions
from manyhosts.strategies.pipeline.stage import Stage
from manyhosts.strategies.pipeline.strategy import Pipelined
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome, Steppable
from manyhosts.strategies.traits import TRAITS


class VersionedStage(Stage):
    """A stage that updates its weights while micro-batches are under way."""

    versions: Versions

    def forward(self, number: int, inputs: Any) -> Any:
        """That of a pipeline, with the weights of this micro-batch; an evaluation (-1) has the newest."""
        if number < 0:
            return super().forward(number, inputs)
        with self.versions.forward(number):
            return super().forward(number, inputs)

    def backward(self, number: int, loss: Tensor | None) -> None:
        """That of a pipeline, with the weights of its forward pass; and an update, where it is time for one."""
        self.versions.before_backward(number)
        super().backward(number, loss)
        if loss is not None:
            loss.detach_()  # whoever holds it holds no version with it
        self.versions.after_backward(number)


class PipeDreamed(Pipelined):
    """The strategy of `PipeDream`."""

    traits = TRAITS["pipedream"]
    config: PipeDream
    stage_kind = VersionedStage

    def __init__(self, config: PipeDream, world: World) -> None:
        """A strategy for any number of workers; one is a stage that has the whole model.

        Raises:
            ConfigError: they are too many for the versions that are kept, or compute on GPUs.
        """
        with _in_own_words():
            super().__init__(config, world)
        config.check_stages(self.stages)
        self.optimizer: Optimizer | None = None
        self.before_update: Callable[[], None] = lambda: None

    def place(self, model: nn.Module) -> nn.Module:
        """Place it as a pipeline does.

        Raises:
            ConfigError: the same, or several stages would have to know of an update of one tensor.
        """
        loss = model.children() if getattr(model, "is_never_called", False) else ()
        for part in [*loss][1:]:
            if any(True for _ in (*part.parameters(), *part.buffers())):
                raise _several("the loss has parameters or buffers, which every worker keeps", "give it none")
        with _in_own_words():
            placed = super().place(model)
        shared = gather_plain(self.world, [each.name for each in self.versioned.tied])
        if names := sorted({name for found in shared for name in found}):
            raise _several(
                f"the weight {names[0]!r} is used by several stages",
                "name cuts that leave the blocks that use it in one stage: mh.PipeDream(cuts=[…])",
            )
        self.versioned.versions = Versions(self.config, placed, self._update)
        kept = [self.config.most_versions(number, self.stages) for number in range(self.stages)]
        self.world.notes.append(
            f"each stage updates its weights after every {self.config.accumulate} micro-batches of a batch, and keeps "
            f"at most {', '.join(map(str, kept))} versions of them at a time (versions={self.config.versions!r})"
        )
        return placed

    @property
    def versioned(self) -> VersionedStage:
        """The stage of this worker. After `place`."""
        [stage] = self.own
        assert isinstance(stage, VersionedStage), f"a pipeline has made a {type(stage)}"
        return stage

    def hold(self, optimizer: Optimizer) -> None:
        """Know this worker's optimizer."""
        self.optimizer = optimizer

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Send the micro-batches through, and update as their gradients come."""
        versions, shares = self.versioned.versions, iter(self._shares(pieces))
        versions.begin(len(pieces))
        outcome = super().forward_backward(
            model, pieces, compute, lambda loss: scale(loss) * next(shares), control_flags
        )
        found = torch.tensor([versions.most, versions.stalest], dtype=torch.float64)
        most, stalest = self.world.stack(found).amax(0)
        outcome.values = {**outcome.values, "versions_max": most, "staleness_max": stalest}
        return outcome

    def _shares(self, pieces: Sequence[Piece]) -> list[float]:
        """What the weighted loss of each micro-batch is multiplied by, so that an update has the mean over its own."""
        size = self.config.accumulate
        weights = self.mesh.data.all_reduce(torch.tensor([each.weight for each in pieces], dtype=torch.float64))
        sums = [weights[begin : begin + size].sum().item() for begin in range(0, len(pieces), size)]
        return [1 / sums[number // size] if sums[number // size] else 0.0 for number in range(len(pieces))]

    def _update(self) -> None:
        """One update of this stage, by the gradients of it and its copies."""
        assert self.optimizer is not None, "hold() comes before forward_backward()"
        super().sum_copies()
        self.before_update()
        super().update(nn.Module(), self.optimizer)

    def sum_copies(self) -> None:
        """Nothing is left to be summed at the end of a step."""

    def norm(self, model: nn.Module) -> Tensor:
        """There is none: a step is many updates, each by a gradient of its own."""
        return torch.full((), torch.nan)

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """The stages have updated their weights already."""


@contextmanager
def _in_own_words() -> Iterator[None]:
    """Within, what a pipeline refuses names this strategy."""
    try:
        yield
    except ConfigError as error:
        where, fix = (
            words.replace("Pipeline(", "PipeDream(").replace("'pipeline'", "'pipedream'")
            for words in (error.where, error.fix)
        )
        raise ConfigError(error.what, where=where, fix=fix) from error.__cause__


def _several(what: str, fix: str) -> ConfigError:
    return ConfigError(
        f"{what}, and each would have to wait for all others to know its newest value",
        where="strategy='pipedream'",
        fix=f'{fix}; or choose strategy="pipeline"',
    )
