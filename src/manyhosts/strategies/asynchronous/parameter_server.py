"""Parameter servers: workers that keep parts of the model, from whom all pull it and to whom they push gradients."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.communication.gathering import gather_plain, parted
from manyhosts.communication.layout import spread
from manyhosts.communication.world import World
from manyhosts.config.asynchronous import ParameterServer
from manyhosts.strategies.asynchronous.requests import PULL, PUSH, RANK_0, HandOut, Requests, receive, send
from manyhosts.strategies.asynchronous.served import Gradients, Served, described, like_described, owners_of
from manyhosts.strategies.asynchronous.sync_at_steps import ByMicroBatch, SyncAtSteps, put
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome, Steppable
from manyhosts.strategies.tally import StepMetrics
from manyhosts.strategies.traits import Traits


class Servers(SyncAtSteps):
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
        self.dropped: dict[str, Tensor] = {}
        """What compression has kept back of what this worker has pushed, by name."""
        self.gradients = Gradients(config, {})
        """Of the step under way."""
        self.kept: dict[int, dict[str, nn.Parameter]] = {}
        """What each worker keeps that keeps something, by rank and name."""

    def regroup(self) -> None:
        """See that there is something to keep for each server."""
        super().regroup()
        self.begin_step()

    @property
    def first(self) -> int:
        """The first worker that computes: those before it keep parameters, and do nothing else."""
        return min(self.config.servers or 0, self.world.size - 1) if self.config.dedicated else 0

    def begin_step(self) -> None:
        """Know who keeps which of the parameters that are trained now, and what was dropped of pushes before."""
        trained, self.kept = self.trained(), {}
        sizes = {name: each.nbytes for name, each in trained.items()}
        owners = owners_of(sizes, self.config.servers, self.first or self.world.size)
        for name in sorted(owners, key=lambda name: owners[name]):
            self.kept.setdefault(owners[name], {})[name] = trained[name]
        self.gradients = Gradients(self.config, self.dropped)  # separate from those, should the step break off

    def serve(self) -> Served:
        """What this worker serves in a step."""
        own = list(self.kept.get(self.world.rank, {}).values())
        looks_ahead = self.config.look_ahead and self.world.size > 1
        return Served(own, self.optimizer, self.gradients, looks_ahead=looks_ahead)

    def take_up(self, served: Served) -> None:
        """Have on every worker what each server holds, for the `update`. All workers call it."""
        world, mine = self.world, self.kept.get(self.world.rank, {})
        values = {name: torch.empty_like(each, requires_grad=False) for name, each in self.trained().items()}
        values |= dict(zip(mine, served.values, strict=True))
        states = {name: served.optimizer.state.get(values[name], {}) for name in mine}
        reported = gather_plain(world, {name: described(state) for name, state in states.items()})
        for owner, names in self.kept.items():
            if owner != world.rank:
                states |= {name: like_described(reported[owner][name], world.device) for name in names}
            sent = [each for name in names for each in (values[name], *states[name].values())]
            spread([each for each in sent if isinstance(each, Tensor)], world, owner)
        self.after = {name: (value, states[name]) for name, value in values.items()}

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """See `SyncAtSteps.update`. Now counts what was dropped of what was pushed in the step."""
        super().update(model, optimizer)
        self.dropped = self.gradients.kept

    def resync(self, source: int, *, new: bool, gone: int) -> str:
        """See `SyncAtSteps.resync`. What a lost worker has kept of gradients is lost with it."""
        lost = super().resync(source, new=new, gone=gone)
        kept = "what compression had kept back of lost workers' gradients" if gone and self.gradients.feeds_back else ""
        return " and ".join(filter(None, (lost, kept)))

    def state_dict(self) -> dict[str, Any]:
        """What compression has kept back."""
        return {"kept": self.dropped} if self.gradients.feeds_back else {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what every former worker kept back, shared out over those of now."""
        self.dropped = {}
        for former in states[self.world.rank :: self.world.size]:
            for name, tensor in former.get("kept", {}).items():
                self.dropped[name] = tensor + self.dropped.get(name, 0)


class Synchronous(Servers):
    """Each step is one update: every server adds the gradients of all workers, in the order of their ranks."""

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Have the gradients of what this worker keeps, summed over all; it has none of what others keep."""
        model.zero_grad()
        tally = StepMetrics(control_flags, self.agreed, self.world)
        for number, piece in enumerate(pieces, start=1):
            scale(tally.add(compute(model, piece), piece.weight)).backward()
            self.tried = sum(each.samples for each in pieces[:number]), 0
        begin = time.perf_counter()
        self.begin_step()
        for owner, kept in self.kept.items():
            self._to_owner(owner, kept)
        if self.world.size > 1:
            self.world.exchange_s += time.perf_counter() - begin
        return self.outcome(tally, {})

    def _to_owner(self, owner: int, kept: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients of `kept` on their owner. All workers call it."""
        world, side, parameters = self.world, self.side, list(kept.values())
        if side is None:
            return
        sums: list[Tensor | None] = [None] * len(parameters)
        for rank in range(world.size) if world.rank == owner else ():
            found = [each.grad for each in parameters]
            if rank != owner:
                found = self.gradients.unpacked(receive(side, rank, 0)[2], parameters)
            sums = [_added(*pair) for pair in zip(sums, found, strict=True)]
        if world.rank != owner:
            send(side, owner, 0, payload=self.gradients.packed(kept, exact=False))
            world.count_sent(side.uncounted())
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total.coalesce() if total is not None and total.is_sparse else total

    def norm(self, model: nn.Module) -> Tensor:
        """That of the entire gradient, from the norm of each parameter's, in the model's order."""
        gradients = [each.grad for each in self.trained().values()]  # none of what others keep
        numbers = [each._values() if each is not None and each.is_sparse else each for each in gradients]
        norms = [0.0 if each is None else float(torch.linalg.vector_norm(each)) for each in numbers]
        norm: Tensor = torch.linalg.vector_norm(self.world.all_reduce(torch.tensor(norms)))
        return norm

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip what this worker keeps by that norm."""
        norm = self.norm(model)
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        return norm

    def prepare_update(self) -> None:
        """Step a copy of what this worker keeps, and have from the others what they keep."""
        served = self.serve()
        served.update([each.grad for each in self.kept.get(self.world.rank, {}).values()])
        self.take_up(served)


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one + other


class Asynchronous(Servers, ByMicroBatch):
    """Each micro-batch is an update of its own: a free worker takes the next, and waits for others only by a bound."""

    def begin(self, pieces: int) -> tuple[Requests, Sequence[Tensor]]:
        """Serve what this worker keeps, and compute in memory of its own."""
        self.begin_step()
        self._versions, self._stale = dict[int, int](), list[int]()
        hand_out = HandOut(pieces, self.world.size, self.config.staleness, first=self.first)
        memory = [each.detach().clone() for each in self.trained().values()]
        return Requests(self.serve(), hand_out, self.side, self.kept), memory

    def pull(self, requests: Requests) -> None:
        """Have the values of now of all servers."""
        for server, parameters in self.kept.items():
            self._versions[server], payload = requests.ask(server, PULL)
            put(parameters.values(), parted(payload))

    def push(self, requests: Requests) -> None:
        """Have all servers make an update."""
        stale = 0
        for server, kept in self.kept.items():
            payload = self.gradients.packed(kept, exact=server == self.world.rank)
            stale = max(stale, requests.ask(server, PUSH, self._versions[server], payload)[0])
        self._stale.append(stale)

    def end(self, requests: Requests) -> dict[str, Tensor]:
        """See `ByMicroBatch.end`. What is logged is how stale the gradients were, and who was how far ahead."""
        if requests.side is not None:
            self.world.count_sent(requests.side.uncounted())
        assert requests.served is not None, "each worker serves, though it may be nothing"
        self.take_up(requests.served)
        stale = (len(self._stale), sum(self._stale), max(self._stale, default=0))
        found = self.world.stack(torch.tensor([*stale, *requests.hand_out.most_ahead], dtype=torch.float64))
        (pieces, updates, most), ahead = found[:, :3].unbind(1), found[RANK_0, 3:]  # rank 0 alone has handed out
        values = {"staleness": updates.sum() / pieces.sum(), "staleness_max": most.max(), "ahead_max": ahead.max()}
        by_rank = {"pieces": pieces, "ahead": ahead, "staleness": updates / pieces.clamp(min=1)}
        return values | {f"{name}/rank{rank}": row[rank] for name, row in by_rank.items() for rank in range(len(ahead))}
