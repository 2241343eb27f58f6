"""DiLoCo: each worker steps alone; what all moved by, on the mean, is one step of an outer optimizer with momentum.

The model is cut into fragments, which take turns. When a fragment's turn comes, each worker sends how far it has moved
since the last time (the outer gradient, in int8, what is dropped kept for the next time), and continues with its inner
steps while that travels. When it has arrived, the outer optimizer (SGD with Nesterov's momentum) moves the fragment
that all share, and each worker mixes it with its own.

Source: Douillard et al. 2023, "DiLoCo", arXiv:2311.08105; Douillard et al. 2025, "Streaming DiLoCo", arXiv:2501.18512.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.communication.comm_queue import CommQueue, QueuedExchange
from manyhosts.communication.compression.exchange import Chunk, Compression
from manyhosts.communication.compression.table import make_compression
from manyhosts.communication.holding import Holding
from manyhosts.communication.layout import as_real, put_flat
from manyhosts.communication.link import Link
from manyhosts.communication.world import World
from manyhosts.config.local_steps import DiLoCo
from manyhosts.config.strategies import DDP
from manyhosts.strategies.local_stepping import LocalStepping
from manyhosts.strategies.local_updates import is_cut
from manyhosts.strategies.strategy import Steppable
from manyhosts.strategies.traits import Traits


@dataclass(slots=True)
class Fragment:
    """Some of the parameters, and what all workers share of them."""

    parameters: list[nn.Parameter]
    number: int
    """From 0: they take turns in this order."""
    compression: Compression
    holding: Holding
    shared: Tensor = field(init=False)
    """Shape (elements,): what this worker holds of the parameters after the last outer step, alike on all who do."""
    momentum: Tensor = field(init=False)
    residual: Tensor = field(init=False)
    """What the compression has dropped of this worker's outer gradients."""
    next_residual: Tensor = field(init=False)
    """What `residual` becomes when that which travels is taken."""
    moved: Tensor = field(init=False)
    """The outer gradient that travels; its sum, once the exchange is over."""
    queued: QueuedExchange | None = None
    arrives: int = -1
    """The step after which what travels is taken; -1 where nothing does."""
    outer_steps: int = 0
    """How many it has taken."""
    sent: int = 0
    """The step after which it was last sent."""
    reached: int = 0
    """The step up to which `shared` holds what the workers have learned."""
    again: bool = False
    """Whether the workers changed while it travelled, so that it is yet to be sent."""

    def __post_init__(self) -> None:
        self.shared = self.now()
        self.momentum, self.residual = torch.zeros_like(self.shared), torch.zeros_like(self.shared)
        self.next_residual, self.moved = torch.zeros_like(self.shared), torch.zeros_like(self.shared)

    @property
    def tensors(self) -> list[Tensor]:
        """What this worker holds of its own parameters."""
        return [as_real(self.holding.local(parameter).detach()) for parameter in self.parameters]

    def now(self) -> Tensor:
        """The same, one after the other."""
        return torch.cat([each.reshape(-1) for each in self.tensors])


class OuterSteps(LocalStepping):
    """The strategy of `DiLoCo`."""

    traits = Traits(synchronous=False)
    config: DiLoCo

    def __init__(self, config: DiLoCo, world: World) -> None:
        super().__init__(config, world)
        among = None if self.traits.holds_full_model else lambda: [*self.mesh.groups("replicate")]
        self.comm_queue = CommQueue(world, by_node=config.inside_node == "exact", among=among)
        outer = DDP(compression=config.outer_compression, inside_node=config.inside_node)
        self.compression: Compression = make_compression(outer) or _as_it_is
        self.fragments: list[Fragment] = []
        self.began = 0
        """The step after which the round under way began."""

    def place(self, model: nn.Module) -> nn.Module:
        """Move `model` to this worker's device, make it equal to rank 0's, and cut it into fragments."""
        placed = super().place(model)
        trained = [parameter for parameter in placed.parameters() if parameter.requires_grad]
        cut = [each for each in trained if self.traits.holds_full_model or is_cut(each, self.holding)]
        full = [each for each in trained if not any(each is one for one in cut)]
        count = min(self.config.fragments, len(cut))
        found = enumerate(even_parts(cut, count))
        self.fragments = [Fragment(each, number, self.compression, self.holding) for number, each in found]
        if full:  # what all workers of a copy hold must stay alike there: it travels as it is, and not with parts
            self.fragments.append(Fragment(full, max(0, count - 1), _as_it_is, self.holding))
        return placed

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Step alone; the first step away from the weights that the run begins with, which came after `place`."""
        for fragment in self.fragments if self.steps == 0 else ():
            fragment.shared = fragment.now()
        super().update(model, optimizer)

    def exchange(self, model: nn.Module) -> None:
        """Take what has arrived, and send the fragment whose turn it is."""
        for fragment in self.fragments:
            if fragment.arrives == self.steps:
                self._take(fragment)
        self.comm_queue.ready()
        if self.steps <= self.config.sync_warmup:
            self.end_exact_step()
            self._begin()
            return
        for fragment in self.fragments:
            if fragment.again or self.steps - self.began == self._turn(fragment):
                self._send(fragment)
                if self.config.overlap_steps == 0:
                    self._take(fragment)
        if self.steps - self.began >= self.rounds.length:
            self.began = self.steps
            self.rounds.next()

    def _begin(self) -> None:
        """The first round begins from where all are."""
        for fragment in self.fragments:
            fragment.shared, fragment.reached = fragment.now(), self.steps
            fragment.momentum.zero_()
        self.began = self.steps

    def _turn(self, fragment: Fragment) -> int:
        """After which step of the round under way it is sent; the last one after its last step."""
        return self.rounds.length * (fragment.number + 1) // (self.fragments[-1].number + 1)

    @torch.no_grad()
    def _send(self, fragment: Fragment) -> None:
        # Shares of the samples are all but equal over a round, and a fragment's round is no other's: all count alike.
        fragment.moved = (fragment.shared - fragment.now()).div_(self.copies.size)
        fragment.queued = self.comm_queue.submit(partial(self._exchange, fragment))
        fragment.arrives = self.steps + self.config.overlap_steps
        fragment.sent, fragment.again = self.steps, False

    def _exchange(self, fragment: Fragment, link: Link) -> None:
        """The way of an outer gradient, in a communication queue."""
        full = fragment.moved + fragment.residual
        fragment.moved.copy_(full)
        chunk = Chunk(fragment.moved, [each.shape for each in fragment.tensors], [fragment.number])
        sent = fragment.compression(chunk, link)
        fragment.next_residual.copy_(torch.zeros_like(full) if sent is None else full - sent)

    @torch.no_grad()
    def _take(self, fragment: Fragment) -> None:
        """One step of the outer optimizer, with the outer gradient that has arrived."""
        self._arrive(fragment)
        config = self.config
        fragment.arrives, fragment.reached = -1, fragment.sent
        fragment.outer_steps += 1
        fragment.residual, fragment.next_residual = fragment.next_residual, fragment.residual
        fragment.momentum.mul_(config.outer_momentum).add_(fragment.moved)
        ahead = fragment.moved + config.outer_momentum * fragment.momentum
        fragment.shared.sub_(ahead, alpha=config.outer_lr)
        self._mix(fragment)

    def _mix(self, fragment: Fragment) -> None:
        """Bring this worker's own parameters nearer to the shared ones, which have just moved."""
        own = self.config.mixing if self.config.overlap_steps else 0.0
        put_flat(fragment.shared if own == 0 else torch.lerp(fragment.shared, fragment.now(), own), fragment.tensors)

    def _arrive(self, fragment: Fragment) -> None:
        if fragment.queued is not None:
            self.comm_queue.wait(fragment.queued)
            self.world.exchange_s += fragment.queued.seconds
            fragment.queued = None

    # Workers that go and come.

    def let_go(self) -> None:
        """Wait for the communication queues."""
        self.comm_queue.abandon()

    def shared_state(self) -> dict[str, Any]:
        """The position of the run and of its rounds; the fragments follow at the next synchronisation."""
        return {**super().shared_state(), "began": self.began}

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Take up what `shared_state` gave on another worker."""
        super().take_shared(state)
        self.began = state["began"]

    @torch.no_grad()
    def resync(self, source: int, *, new: bool, gone: int) -> str:
        """Let all continue from the mean of the models, and from the outer optimizer of those that have come farthest.

        What the survivors have moved by since a fragment was sent is in that mean, and sent when its turn comes. A
        fragment that was on its way is sent again.
        """
        oldest = min(fragment.reached for fragment in self.fragments)
        anybody_trained = self._resync_fragments(new=new or self.is_new)
        lost = self.resync_models(source, new=new)
        place = torch.tensor([self.began, self.rounds.length], device=self.world.device)
        self.began, self.rounds.length = (int(number) for number in self.world.broadcast(place, source).tolist())
        if self.steps <= self.config.sync_warmup or not anybody_trained:
            self._begin()
            return lost.reported()
        return f"what {lost.who} learned alone in up to {self.steps - oldest} steps" if lost.who else ""

    def _resync_fragments(self, *, new: bool) -> bool:
        """Give every worker what is shared of each fragment, by one that has taken the most outer steps.

        Returns whether there is one that has trained.
        """
        rows = [[-1 if new else one.outer_steps, one.again or one.arrives >= 0, one.reached] for one in self.fragments]
        local_progress = self.world.stack(torch.tensor(rows, device=self.world.device)).cpu()
        for number, fragment in enumerate(self.fragments):
            counts = local_progress[:, number, 0]
            farthest, most = int(counts.argmax()), int(counts.max())
            for tensor in (fragment.shared, fragment.momentum):
                self.world.broadcast(tensor, farthest)
            if not new and fragment.outer_steps < most:
                self._mix(fragment)
                # Where its own exchange broke off, no one can say what of it arrived, but that little is missing.
                known = fragment.queued is None or fragment.queued.error is None
                fragment.residual.copy_(fragment.next_residual if known else torch.zeros_like(fragment.residual))
            fragment.outer_steps, fragment.reached = max(most, 0), int(local_progress[farthest, number, 2])
            fragment.again = most >= 0 and bool(local_progress[counts == most, number, 1].any())
            fragment.arrives, fragment.queued = -1, None
        return bool((local_progress[:, :, 0] >= 0).any())

    @property
    def counts_alike(self) -> bool:
        """After the warm-up all count alike, as in an outer gradient."""
        return self.steps > self.config.sync_warmup

    def state_dict(self) -> dict[str, Any]:
        """This worker's own model and optimizer, the fragments as all share them, and what is on its way."""
        for fragment in self.fragments:
            self._arrive(fragment)
        return {
            **super().state_dict(),
            "began": self.began,
            "fragments": [
                {
                    "shared": fragment.shared.clone(),
                    "momentum": fragment.momentum.clone(),
                    "kept": (fragment.residual if fragment.arrives < 0 else fragment.next_residual).clone(),
                    "moved": fragment.moved.clone(),
                    "arrives": fragment.arrives,
                }
                for fragment in self.fragments
            ],
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what `state_dict` gave; where the workers changed, all continue from the mean."""
        if not states or not states[0]:
            return
        super().load_state_dict(states)
        every = self.config.sync_every
        self.began = states[0].get("began", self.steps // every * every)
        for fragment in self.fragments:
            fragment.residual.zero_()
            fragment.sent = fragment.reached = self.began
        rank, size = self.copies.rank, self.copies.size
        parts = self.world.size // size
        alike = range(self.world.rank % parts, len(states), parts)  # those that had this part, of the copies then
        formers = alike[rank::size]  # whose place this worker takes; with as many as before its own
        for former in formers or [alike[rank % len(alike)]]:
            self._take_up(states[former]["fragments"], residual=bool(formers))
        for fragment in self.fragments:
            fragment.next_residual.copy_(fragment.residual)

    def _take_up(self, given: Sequence[Mapping[str, Any]], *, residual: bool) -> None:
        """Take up what a worker had of the fragments: what is equal on all and, where `residual`, its residual."""
        for fragment, one in zip(self.fragments, given, strict=True):
            for name in ("shared", "momentum", "moved"):
                getattr(fragment, name).copy_(one[name])
            fragment.arrives = one["arrives"]
            if residual:
                fragment.residual.add_(one["kept"])


def even_parts(parameters: Sequence[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """`parameters` in `count` runs of about equal size, none of them empty."""
    total = sum(parameter.numel() for parameter in parameters)
    parts: list[list[nn.Parameter]] = [[] for _ in range(count)]
    before = number = 0
    for place, parameter in enumerate(parameters):
        full = before >= total * (number + 1) / count
        needed = len(parameters) - place <= count - 1 - number
        if parts[number] and number + 1 < count and (full or needed):
            number += 1
        parts[number].append(parameter)
        before += parameter.numel()
    return parts


def _as_it_is(chunk: Chunk, link: Link) -> None:
    """No compression."""
    link.all_reduce(chunk.values)
