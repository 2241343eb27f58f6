"""A pipeline that is emptied at the end of a step alone: within it each stage makes many updates, as gradients come.

All stages synchronise at a step of the trainer: its batch passes through as micro-batches, in the order 1f1b, and after
each `accumulate` of them a stage updates its own weights and asks no one. Which weights a pass finds follows from that
order and from no clock, so two runs have the same bits. With two versions it does not depend on the stages, either.

A pass that needs an older version than the newest computes with parameters of its own, which have the memory of that
version; an update then goes to new memory. So a version costs what its weights take, and only from when an update would
have overwritten it until the last pass that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.config.asynchronous import PipeDream
from manyhosts.errors import ConfigError
from manyhosts.strategies.pipeline.owners import places_of, put_parameter
from manyhosts.strategies.pipeline.stage import Stage
from manyhosts.strategies.pipeline.strategy import Pipelined
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome, Steppable
from manyhosts.strategies.traits import Traits


@dataclass(slots=True)
class Versions:
    """Those of this worker's stage, in one step."""

    config: PipeDream
    update: Callable[[], None]
    """Changes the parameters of the stage by one step, by the gradients that they have."""
    places: Mapping[nn.Parameter, Sequence[tuple[nn.Module, str]]]
    """Where each parameter is that is trained."""
    micro_batches: int
    """Of this step."""
    newest: int = 0
    """The number of the newest version: how many updates there were in this step."""
    most: int = 1
    """How many versions were kept at a time, the newest among them."""
    stalest: int = 0
    """The most updates that came between the forward pass of a micro-batch and the update that it is a part of."""
    under_way: dict[int, int] = field(default_factory=dict)
    """Micro-batch → the version of its forward pass."""
    kept: dict[int, list[nn.Parameter]] = field(default_factory=dict)
    """Version → what passes compute with in place of the parameters."""

    @contextmanager
    def forward(self, number: int) -> Iterator[None]:
        """Within, the model has the weights with which micro-batch `number` is computed."""
        group = number // self.config.accumulate
        version = max(group - 1, 0) if self.config.versions == "two" else self.newest
        self.under_way[number] = version
        if self.config.versions == "one":
            yield
            return
        self._put(self._as_parameters(version))
        try:
            yield
        finally:
            self._put(self.places)

    def before_backward(self, number: int) -> None:
        """Begin to add up gradients, where `number` is the first of an update."""
        if number % self.config.accumulate == 0:
            for parameter in self.places:
                parameter.grad = None

    def after_backward(self, number: int) -> None:
        """Add what micro-batch `number` has found to the gradients, and update where it is the last one."""
        version, group = self.under_way.pop(number), number // self.config.accumulate
        self.stalest = max(self.stalest, group - version)
        for parameter, own in zip(self.places, self.kept.get(version, ()), strict=False):
            if own.grad is not None:
                parameter.grad = own.grad if parameter.grad is None else parameter.grad.add_(own.grad)
                own.grad = None
        if (number + 1) % self.config.accumulate == 0 or number + 1 == self.micro_batches:
            self._update()

    def _update(self) -> None:
        before = self.newest
        needed = set(self.under_way.values())
        if self.config.versions == "two" and (before + 1) * self.config.accumulate < self.micro_batches:
            needed.add(before)  # the next micro-batches compute with it
        self.kept = {version: each for version, each in self.kept.items() if version in needed}
        if self.config.versions != "one" and before in needed:
            self._as_parameters(before)
            for parameter in self.places:
                parameter.data = parameter.data.clone()
        unseen = self.places if self.config.versions == "one" else ()
        with _unsafe_preserve_version_counter(tuple(unseen)):  # autograd lets passes under way continue with new values
            self.update()
        self.newest += 1
        self.most = max(self.most, len(self.kept) + 1)

    def _as_parameters(self, version: int) -> list[nn.Parameter]:
        """What the passes of a version compute with. It has the memory of the parameters, as long as it is the newest.

        Autograd notes the parameter itself that a pass has used, and so would find its newest values.
        """
        if version not in self.kept:
            assert version == self.newest, f"version {version} was let go of, and {self.newest} is the newest"
            self.kept[version] = [nn.Parameter(each.data) for each in self.places]
        return self.kept[version]

    def _put(self, parameters: Iterable[nn.Parameter]) -> None:
        for places, parameter in zip(self.places.values(), parameters, strict=True):
            for module, key in places:
                put_parameter(module, key, parameter)


class VersionedStage(Stage):
    """A stage that updates its weights while micro-batches are under way."""

    versions: Versions

    def forward(self, number: int, inputs: Any, then: Callable[[], None] = lambda: None) -> Any:
        """That of a pipeline, with the weights of this micro-batch; an evaluation (-1) has the newest."""
        if number < 0:
            return super().forward(number, inputs, then)
        with self.versions.forward(number):
            return super().forward(number, inputs, then)

    def backward(self, number: int, loss: Tensor | None, then: Callable[[], None]) -> None:
        """That of a pipeline, with the weights of its forward pass; and an update, where it is time for one."""
        self.versions.before_backward(number)
        super().backward(number, loss, then)
        if loss is not None:
            loss.detach_()  # what holds it holds no version with it
        self.versions.after_backward(number)


class PipeDreamed(Pipelined):
    """The strategy of `PipeDream`."""

    traits = Traits(communicates_in_forward=True, holds_full_model=False, survives_loss=False)
    config: PipeDream
    stage_kind = VersionedStage
    stage: VersionedStage
    """That of this worker. After `place`."""
    optimizer: Optimizer
    """This worker's. After `hold`."""

    def __init__(self, config: PipeDream, world: World) -> None:
        """A strategy for any number of workers; one is a stage that has the entire model.

        Raises:
            ConfigError: they are too many for the versions that are kept, or compute on GPUs.
        """
        with _in_own_words():
            super().__init__(config, world)
        config.check_stages(self.stages)
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
        self.stage = cast(VersionedStage, self.own[0])
        shared = gather_plain(self.world, [each.name for each in self.stage.tied])
        if names := sorted({name for found in shared for name in found}):
            raise _several(
                f"the weight {names[0]!r} is used by several stages",
                "name cuts that leave the blocks that use it in one stage: mh.PipeDream(cuts=[…])",
            )
        self.places = {each: places_of(placed, name) for name, each in placed.named_parameters() if not each.is_meta}
        kept = [self.config.most_versions(number, self.stages) for number in range(self.stages)]
        self.world.notes.append(
            f"each stage updates its weights after every {self.config.accumulate} micro-batches of a batch, and keeps "
            f"at most {', '.join(map(str, kept))} versions of them at a time (versions={self.config.versions!r})"
        )
        return placed

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Send the micro-batches through, and update as their gradients come."""
        trained, shares = {each: at for each, at in self.places.items() if each.requires_grad}, self._shares(pieces)
        self.stage.versions = versions = Versions(self.config, self._update, trained, len(pieces))
        outcome = super().forward_backward(
            model, pieces, compute, lambda loss: scale(loss) * next(shares), control_flags
        )
        found = torch.tensor([versions.most, versions.stalest], dtype=torch.float64)
        most, stalest = self.world.stack(found).amax(0)
        outcome.values = {**outcome.values, "versions_max": most, "staleness_max": stalest}
        return outcome

    def _shares(self, pieces: Sequence[Piece]) -> Iterator[float]:
        """What the weighted loss of each micro-batch is multiplied by, so that an update has the mean over its own."""
        size = self.config.accumulate
        weights = self.mesh.data.all_reduce(torch.tensor([each.weight for each in pieces], dtype=torch.float64))
        sums = [weights[begin : begin + size].sum().item() for begin in range(0, len(pieces), size)]
        return (1 / sums[number // size] if sums[number // size] else 0.0 for number in range(len(pieces)))

    def _update(self) -> None:
        """One update of this stage, by the gradients of it and its copies."""
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
