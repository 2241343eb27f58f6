"""Parameter servers: workers that keep parts of the model, from whom all pull it and to whom they push gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.communication.world import World
from manyhosts.config.asynchronous import ParameterServer
from manyhosts.strategies.asynchronous.hand_out import HandOut
from manyhosts.strategies.asynchronous.requests import LEADER, Asks, RequestHandler
from manyhosts.strategies.asynchronous.served import (
    Served,
    gradients_bytes,
    gradients_packed,
    owners_of,
    unpack,
    unpack_gradients,
)
from manyhosts.strategies.asynchronous.whole_between_steps import MeetsAtSteps, check_groups
from manyhosts.strategies.strategy import Compute, Piece, Scale, Shard, StepOutcome, Steppable
from manyhosts.strategies.tally import StepMetrics
from manyhosts.strategies.traits import TRAITS


@dataclass(frozen=True, slots=True)
class Layout:
    """Who keeps which parameter in a step."""

    parameters: list[nn.Parameter]
    owners: list[int]
    """Of each, by rank."""

    def kept_by(self, rank: int) -> list[nn.Parameter]:
        """The parameters that one worker keeps."""
        return [each for each, owner in zip(self.parameters, self.owners, strict=True) if owner == rank]

    @property
    def kept(self) -> dict[int, list[nn.Parameter]]:
        """The same of all that keep some."""
        return {rank: self.kept_by(rank) for rank in sorted(set(self.owners))}


After = tuple[list[Tensor], list[dict[str, Any]]]
"""Of each parameter its value, and what the optimizer keeps of it."""


class Servers(MeetsAtSteps):
    """What both forms share: who keeps which parameter."""

    traits = TRAITS["parameter-server"]
    config: ParameterServer
    _after: After = ([], [])
    """What an update takes up."""

    def __new__(cls, config: ParameterServer, world: World) -> Servers:
        """One of the form that `config` asks for."""
        if cls is Servers:
            cls = Asynchronous if config.is_asynchronous else Synchronous
        return super().__new__(cls)

    def regroup(self) -> None:
        """See that there is something to keep for each server."""
        self.layout()

    def of_all(self, served: Served, like: Sequence[Tensor], owners: Sequence[int]) -> After:
        """What every server holds, in the order of the parameters, which are tensors `like` these."""
        values: list[Tensor] = [torch.empty_like(each, requires_grad=False) for each in like]
        states: list[dict[str, Any]] = [{} for _ in like]
        mine = [number for number, owner in enumerate(owners) if owner == self.world.rank]
        for number, value, state in zip(mine, served.values, served.states(), strict=True):
            values[number], states[number] = value.detach(), state
        self.share(values, states, owners)
        return values, states

    def layout(self) -> Layout:
        """Who keeps which of the parameters that are trained now."""
        trained = self.trained()
        sizes = {name: each.nbytes for name, each in trained.items()}
        return Layout(list(trained.values()), owners_of(sizes, self.config.servers, self.world.size))


class Synchronous(Servers):
    """Each step is one update: every server adds the gradients of all workers, in the order of their ranks."""

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Have the gradients of what this worker keeps, summed over all; it has none of what others keep."""
        self.check_scale(scale)
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = None
        tally = StepMetrics(control_flags, self.agreed, self.world)
        for piece in pieces:
            tally.add(compute(model, piece), piece.weight).backward()
            self.tried = (self.tried[0] + piece.samples, 0)
        begin = time.perf_counter()
        for owner, kept in self.layout().kept.items():
            self._to_owner(owner, kept)
        if self.world.size > 1:
            self.world.exchange_s += time.perf_counter() - begin
        self.world.wait(tally.start_sum())
        outcome = tally.outcome()
        outcome.values = {**outcome.values, **self.lost_values}
        return outcome

    def _to_owner(self, owner: int, kept: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of `kept` on their owner. All workers call it."""
        world, side = self.world, self.side
        if side is None:
            return
        if world.rank != owner:
            payload = gradients_packed(kept)
            side.send(payload, owner)
            world.count_sent(payload.nbytes)
            for parameter in kept:
                parameter.grad = None
            return
        sums: list[Tensor | None] = [None] * len(kept)
        for rank in range(world.size):
            found = [each.grad for each in kept]
            if rank != owner:
                payload = side.receive(torch.empty(gradients_bytes(kept), dtype=torch.uint8), rank)
                found = unpack_gradients(payload, kept)
            sums = [
                one if other is None else other if one is None else one + other
                for one, other in zip(sums, found, strict=True)
            ]
        for parameter, total in zip(kept, sums, strict=True):
            parameter.grad = total

    def norm(self, model: nn.Module) -> Tensor:
        """That of the whole gradient, from the norm of each parameter's, in the model's order."""
        parameters = [each for each in model.parameters() if each.requires_grad]
        norms = torch.zeros(len(parameters), device=self.world.device)
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None:
                norms[number] = torch.linalg.vector_norm(parameter.grad)
        norm: Tensor = torch.linalg.vector_norm(self.world.all_reduce(norms))
        return norm

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip what this worker keeps by that norm."""
        norm = self.norm(model)
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        return norm

    def prepare_update(self) -> None:
        """Step a copy of what this worker keeps, and have from the others what they keep."""
        assert self.optimizer is not None, "hold() comes before prepare_update()"
        layout, rank = self.layout(), self.world.rank
        served = Served(layout.kept_by(rank), self.optimizer)
        for value, parameter in zip(served.values, layout.kept_by(rank), strict=True):
            value.grad = parameter.grad
        if served.optimizer.param_groups:
            served.optimizer.step()
        self._after = self.of_all(served, layout.parameters, layout.owners)

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Take up what all servers have made."""
        assert self.optimizer is not None, "hold() comes before update()"
        take_up(self.optimizer, self.layout().parameters, *self._after)
        self.is_done()


class Asynchronous(Servers):
    """Each micro-batch is an update of its own: whoever is free takes the next, and waits for nobody but by a bound."""

    def __init__(self, config: ParameterServer, world: World) -> None:
        super().__init__(config, world)
        self.taken: Callable[[int], None] = lambda _: None
        self._desk: RequestHandler | None = None
        self._before: list[Tensor] = []

    def shard(self) -> Shard:
        """Every worker is given all pieces of a batch, and fetches those that it takes."""
        return Shard(0, 1)

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Train on this worker's share of the pieces; what comes out is taken up by `update`."""
        self.check_scale(scale)
        assert self.optimizer is not None, "hold() comes before forward_backward()"
        world = self.world
        layout = self.layout()
        parameters, owners = layout.parameters, layout.owners
        self._before = [each.detach().clone() for each in parameters]
        tally = StepMetrics(control_flags, self.agreed, world)
        served = Served(layout.kept_by(world.rank), self.optimizer)
        hand_out = HandOut(len(pieces), world.size, self.config.staleness) if world.rank == LEADER else None
        self._desk = desk = RequestHandler(served, hand_out, self.side)
        desk.open()
        staleness = self._train(model, pieces, compute, tally, desk, layout.kept)
        desk.close()
        check_groups(self.optimizer, served.optimizer)
        self._after = self.of_all(served, self._before, owners)
        put(parameters, self._before)
        ahead = [0] * world.size if hand_out is None else hand_out.most_ahead
        found = world.stack(torch.tensor([*staleness, *ahead], dtype=torch.float64))
        world.wait(tally.start_sum())  # last: who has it knows that every worker has all
        outcome = tally.outcome()
        outcome.values = {**outcome.values, **measured(found), **self.lost_values}
        return outcome

    def _train(
        self,
        model: nn.Module,
        pieces: Sequence[Piece],
        compute: Compute,
        tally: StepMetrics,
        desk: RequestHandler,
        kept: Mapping[int, Sequence[nn.Parameter]],
    ) -> list[float]:
        """Compute pieces until none is left.

        Returns how many, and the mean and the largest staleness of their pushes.
        """
        sizes = [sum(each.nbytes for each in kept.get(rank, ())) for rank in range(self.world.size)]
        asks = Asks(desk, self.world.rank, sizes)
        computed, stale = [], []
        while (number := asks.take()) >= 0:
            self.taken(number)
            versions = {}
            for server, parameters in kept.items():
                versions[server], payload = asks.pull(server)
                unpack(payload, parameters)
            model.zero_grad()
            values = compute(model, pieces[number])
            tally.add(values, pieces[number].weight)
            values["loss"].backward()  # of the mean over the micro-batch
            pushed = [
                asks.push(server, versions[server], gradients_packed(parameters)) for server, parameters in kept.items()
            ]
            asks.pushed()
            computed.append(number)
            self.tried = count_tried(pieces, computed, desk)
            stale.append(max(pushed))
        asks.end()
        if desk.side is not None:
            self.world.count_sent(desk.side.uncounted())
        return [len(stale), sum(stale) / max(len(stale), 1), max(stale, default=0)]

    def norm(self, model: nn.Module) -> Tensor:
        """There is none: a step is many updates, each by a gradient of its own."""
        return torch.full((), torch.nan)

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Take up what all updates of the step have made."""
        assert self.optimizer is not None, "hold() comes before update()"
        take_up(self.optimizer, list(self.trained().values()), *self._after)
        self._before = []
        self.is_done()

    def let_go(self) -> None:
        """Wait for the threads that answer."""
        if self._desk is not None:
            self._desk.abandon()

    def step_back(self) -> None:
        """Have the parameters as before the step under way."""
        super().step_back()
        if self._before:
            put(list(self.trained().values()), self._before)


def measured(found: Tensor) -> dict[str, Tensor]:
    """What is logged of a step, from (pieces, mean and largest staleness, how far each was ahead) of each worker.

    The last `len(found)` columns are known to who hands out alone.
    """
    (pieces, mean, most), ahead = found[:, :3].unbind(1), found[LEADER, 3:]
    values = {"staleness": (pieces * mean).sum() / pieces.sum().clamp(min=1), "staleness_max": most.max()}
    values["ahead_max"] = ahead.max()
    for rank in range(len(found)):
        values[f"pieces/rank{rank}"], values[f"staleness/rank{rank}"] = pieces[rank], mean[rank]
        values[f"ahead/rank{rank}"] = ahead[rank]
    return values


def count_tried(pieces: Sequence[Piece], computed: Sequence[int], desk: RequestHandler) -> tuple[int, int]:
    """The samples of the pieces that this worker has computed, and of all that it has handed out."""
    taken = desk.hand_out.taken if desk.hand_out is not None else 0
    return sum(pieces[number].samples for number in computed), sum(piece.samples for piece in pieces[:taken])


def take_up(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    values: Sequence[Tensor],
    states: Sequence[Mapping[str, Any]],
) -> None:
    """Have these values, and the optimizer these states; a schedule is to know that it has stepped."""
    put(parameters, values)
    take_states(optimizer, parameters, states)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # PyTorch's own mark


def take_states(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], states: Sequence[Mapping[str, Any]]
) -> None:
    """Have the optimizer keep these, in the order of the parameters: snapshots go by it, and it must be one on all."""
    for parameter, state in zip(parameters, states, strict=True):
        optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[parameter] = dict(state)


@torch.no_grad()
def put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy `values` into `parameters`."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
