"""What strategies share in which each micro-batch is an update of its own: a free worker takes the next one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.communication.world import World
from manyhosts.strategies.asynchronous.full_between_steps import MeetsAtSteps
from manyhosts.strategies.asynchronous.hand_out import HandOut
from manyhosts.strategies.asynchronous.requests import LEADER, Asks, RequestHandler
from manyhosts.strategies.asynchronous.served import Served
from manyhosts.strategies.strategy import Compute, Piece, Scale, Shard, StepOutcome
from manyhosts.strategies.tally import StepMetrics


class ByMicroBatch(MeetsAtSteps):
    """A step: the model has memory that is the step's own, until all have met."""

    def __init__(self, config: Any, world: World) -> None:
        super().__init__(config, world)
        self.taken: Callable[[int], None] = lambda _: None
        self.computed: list[int] = []
        self._desk: RequestHandler | None = None
        self._before: list[Tensor] = []
        """What the parameters are between two steps, while a step is under way."""

    def shard(self) -> Shard:
        """Every worker is given all pieces of a batch, and fetches those that it takes."""
        return Shard(0, 1)

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Train on this worker's share of the pieces; what comes out is taken up by `update`."""
        self.check_scale(scale)
        world, tally = self.world, StepMetrics(control_flags, self.agreed, self.world)
        served, bound, sizes = self.begin()
        hand_out = HandOut(len(pieces), world.size, bound) if world.rank == LEADER else None
        self._desk = desk = RequestHandler(served, hand_out, self.side)
        desk.open()
        asks, self.computed = Asks(desk, world.rank, sizes), []
        while (number := asks.take()) >= 0:
            self.taken(number)
            self.pull(asks)
            model.zero_grad()
            values = compute(model, pieces[number])
            tally.add(values, pieces[number].weight)
            values["loss"].backward()  # of the mean over the micro-batch
            self.push(asks)
            asks.pushed()
            self.computed.append(number)
            handed_out = pieces[: hand_out.taken] if hand_out is not None else ()
            own = sum(pieces[number].samples for number in self.computed)
            self.tried = own, sum(piece.samples for piece in handed_out)
        asks.end()
        desk.close()
        found = self.end(served, [0] * world.size if hand_out is None else hand_out.most_ahead)
        world.wait(tally.start_sum())  # last: who has it knows that every worker has all
        outcome = tally.outcome()
        outcome.values = {**outcome.values, **found, **self.lost_values}
        return outcome

    @abstractmethod
    def begin(self) -> tuple[Served, int | None, Sequence[int]]:
        """Compute from now on with what all change.

        Returns what this worker serves, the bound, and the bytes that each worker serves.
        """

    @abstractmethod
    def pull(self, asks: Asks) -> None:
        """Have the values of now."""

    @abstractmethod
    def push(self, asks: Asks) -> None:
        """Make an update by the gradients of now."""

    @abstractmethod
    def end(self, served: Served, ahead: Sequence[int]) -> dict[str, Tensor]:
        """Have what came of all updates, in `_after`, and the parameters as before the step.

        `ahead`: see `HandOut.most_ahead`, of the leader alone. Returns what is logged.
        """

    def norm(self, model: nn.Module) -> Tensor:
        """There is none: a step is many updates, each by a gradient of its own."""
        return torch.full((), torch.nan)

    def let_go(self) -> None:
        """Wait for the threads that answer."""
        if self._desk is not None:
            self._desk.abandon()

    def step_back(self) -> None:
        """Have the parameters as before the step under way."""
        super().step_back()
        self.leave()

    def enter(self, memory: Sequence[Tensor]) -> None:
        """Have the parameters be what is in `memory`."""
        parameters = list(self.trained().values())
        self._before = [each.data for each in parameters]
        for parameter, tensor in zip(parameters, memory, strict=True):
            parameter.data = tensor

    def leave(self) -> None:
        """Have them be what they were before the step."""
        for parameter, own in zip(self.trained().values(), self._before, strict=False):
            parameter.data = own
        self._before = []
