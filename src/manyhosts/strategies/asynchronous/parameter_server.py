"""Parameter servers: workers that keep parts of the model, from whom all pull it and to whom they push gradients."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.communication.world import World
from manyhosts.config.asynchronous import ParameterServer
from manyhosts.strategies.asynchronous.by_micro_batch import ByMicroBatch
from manyhosts.strategies.asynchronous.full_between_steps import After, MeetsAtSteps, check_groups
from manyhosts.strategies.asynchronous.pushed import Gradients, unpack
from manyhosts.strategies.asynchronous.requests import LEADER, Asks
from manyhosts.strategies.asynchronous.served import Served, owners_of
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome
from manyhosts.strategies.tally import StepMetrics
from manyhosts.strategies.traits import Traits


class Servers(MeetsAtSteps):
    """What both forms share: who keeps which parameter, and how gradients are pushed there."""

    traits = Traits(takes_sparse_gradients=True)
    config: ParameterServer

    def __new__(cls, config: ParameterServer, world: World) -> Servers:
        """One of the form that `config` asks for."""
        if cls is Servers:
            cls = Asynchronous if config.many_updates else Synchronous
        return super().__new__(cls)

    def __init__(self, config: ParameterServer, world: World) -> None:
        super().__init__(config, world)
        self.gradients = Gradients(config)

    def regroup(self) -> None:
        """See that there is something to keep for each server."""
        self.owners()

    def owners(self) -> list[int]:
        """Who keeps each of the parameters that are trained now, by rank."""
        sizes = {name: each.nbytes for name, each in self.trained().items()}
        return owners_of(sizes, self.config.servers, self.world.size)

    def kept(self) -> dict[int, dict[str, nn.Parameter]]:
        """What each worker keeps that keeps something, by rank and name."""
        found: dict[int, dict[str, nn.Parameter]] = {rank: {} for rank in sorted(set(self.owners()))}
        for (name, parameter), owner in zip(self.trained().items(), self.owners(), strict=True):
            found[owner][name] = parameter
        return found

    def serve(self) -> Served:
        """What this worker serves in a step."""
        own = list(self.kept().get(self.world.rank, {}).values())
        self.gradients.begin()
        looks_ahead = self.config.look_ahead and self.world.size > 1
        return Served(own, self.optimizer, self.gradients, looks_ahead=looks_ahead)

    def of_all(self, served: Served) -> After:
        """What every server holds, in the order of the parameters."""
        owners = self.owners()
        values: list[Tensor] = [torch.empty_like(each, requires_grad=False) for each in self.trained().values()]
        states: list[dict[str, Any]] = [{} for _ in values]
        mine = [number for number, owner in enumerate(owners) if owner == self.world.rank]
        for number, value, state in zip(mine, served.values, served.states(), strict=True):
            values[number], states[number] = value.detach(), state
        self.share(values, states, owners)
        return values, states

    def step_back(self) -> None:
        """Keep what was kept of gradients before the step under way."""
        super().step_back()
        self.gradients.step_back()

    def meet(self, source: int, *, new: bool, gone: int) -> str:
        """See `MeetsAtSteps.meet`. What a lost worker has kept of gradients is lost with it."""
        lost = super().meet(source, new=new, gone=gone)
        kept = "what compression had kept back of lost workers' gradients" if gone and self.gradients.feeds_back else ""
        return " and ".join(filter(None, (lost, kept)))

    def state_dict(self) -> dict[str, Any]:
        """What compression has kept back."""
        return {"kept": self.gradients.kept} if self.gradients.feeds_back else {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what every former worker kept back, shared out over those of now."""
        self.gradients.kept = {}
        for former in states[self.world.rank :: self.world.size]:
            for name, tensor in former.get("kept", {}).items():
                self.gradients.kept[name] = tensor + self.gradients.kept.get(name, 0)


class Synchronous(Servers):
    """Each step is one update: every server adds the gradients of all workers, in the order of their ranks."""

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Have the gradients of what this worker keeps, summed over all; it has none of what others keep."""
        self.check_scale(scale)
        for parameter in model.parameters():
            parameter.grad = None
        tally = StepMetrics(control_flags, self.agreed, self.world)
        for piece in pieces:
            tally.add(compute(model, piece), piece.weight).backward()
            self.tried = (self.tried[0] + piece.samples, 0)
        begin = time.perf_counter()
        self.gradients.begin()
        for owner, kept in self.kept().items():
            self._to_owner(owner, kept)
        if self.world.size > 1:
            self.world.exchange_s += time.perf_counter() - begin
        self.world.wait(tally.start_sum())
        outcome = tally.outcome()
        outcome.values = {**outcome.values, **self.lost_values}
        return outcome

    def _to_owner(self, owner: int, kept: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients of `kept` on their owner. All workers call it."""
        world, side, parameters = self.world, self.side, list(kept.values())
        if side is None:
            return
        if world.rank != owner:
            payload = self.gradients.packed(kept, exact=False)
            side.send(torch.tensor([payload.numel()]), owner)
            side.send(payload, owner)
            world.count_sent(side.uncounted())
            for parameter in parameters:
                parameter.grad = None
            return
        sums: list[Tensor | None] = [None] * len(parameters)
        for rank in range(world.size):
            found = [each.grad for each in parameters]
            if rank != owner:
                size = side.receive(torch.empty(1, dtype=torch.int64), rank)
                payload = side.receive(torch.empty(int(size), dtype=torch.uint8), rank)
                found = self.gradients.unpacked(payload, parameters)
            sums = [
                one if other is None else other if one is None else one + other
                for one, other in zip(sums, found, strict=True)
            ]
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total.coalesce() if total is not None and total.is_sparse else total

    def norm(self, model: nn.Module) -> Tensor:
        """That of the entire gradient, from the norm of each parameter's, in the model's order."""
        parameters = [each for each in model.parameters() if each.requires_grad]
        norms = torch.zeros(len(parameters), device=self.world.device)
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None:
                norms[number] = torch.linalg.vector_norm(_numbers(parameter.grad))
        norm: Tensor = torch.linalg.vector_norm(self.world.all_reduce(norms))
        return norm

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip what this worker keeps by that norm."""
        norm = self.norm(model)
        for parameter in model.parameters():
            if parameter.grad is not None:
                _numbers(parameter.grad).mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))  # as PyTorch does
        return norm

    def prepare_update(self) -> None:
        """Step a copy of what this worker keeps, and have from the others what they keep."""
        served = self.serve()
        for value, parameter in zip(served.values, self.kept().get(self.world.rank, {}).values(), strict=True):
            value.grad = parameter.grad
        if served.optimizer.param_groups:
            served.optimizer.step()
        self._after = self.of_all(served)


def _numbers(gradient: Tensor) -> Tensor:
    """Those of a gradient that need not be zero, in its own memory."""
    return gradient._values() if gradient.is_sparse else gradient


class Asynchronous(Servers, ByMicroBatch):
    """Each micro-batch is an update of its own: a free worker takes the next, and waits for others only by a bound."""

    def begin(self) -> tuple[Served, int | None, Sequence[int]]:
        """Serve what this worker keeps, and compute in memory of its own."""
        served, self._kept = self.serve(), self.kept()
        self.enter([each.detach().clone() for each in self.trained().values()])
        self._versions, self._stale = dict[int, int](), list[int]()
        sizes = [sum(each.nbytes for each in self._kept.get(rank, {}).values()) for rank in range(self.world.size)]
        return served, self.config.staleness, sizes

    def pull(self, asks: Asks) -> None:
        """Have the values of now of all servers."""
        for server, parameters in self._kept.items():
            self._versions[server], payload = asks.pull(server)
            unpack(payload, list(parameters.values()))

    def push(self, asks: Asks) -> None:
        """Have all servers make an update."""
        self._stale.append(
            max(
                asks.push(server, self._versions[server], self.gradients.packed(kept, exact=server == self.world.rank))
                for server, kept in self._kept.items()
            )
        )

    def end(self, served: Served, ahead: Sequence[int]) -> dict[str, Tensor]:
        """See `ByMicroBatch.end`. What is logged is how stale the gradients were, and who was how far ahead."""
        if self.side is not None:
            self.world.count_sent(self.side.uncounted())
        check_groups(self.optimizer, served.optimizer)
        self._after = self.of_all(served)
        self.leave()
        stale = self._stale
        own = [len(stale), sum(stale) / max(len(stale), 1), max(stale, default=0)]
        return measured(self.world.stack(torch.tensor([*own, *ahead], dtype=torch.float64)))


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
