"""What strategies share whose workers step alone: their own gradient, and the mean of their models."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from manyhosts.communication.buckets import GradientBuckets
from manyhosts.communication.collectives import Collectives
from manyhosts.communication.layout import as_real, without_repeats
from manyhosts.communication.nodes import Levels, Node, find_levels
from manyhosts.communication.packing import packed
from manyhosts.communication.world import World
from manyhosts.device import is_asynchronous
from manyhosts.errors import ConfigError
from manyhosts.strategies.strategy import Compute, HoldsOptimizer, Piece, Scale, StepOutcome, Steppable
from manyhosts.strategies.tally import Agreed, StepMetrics

BUCKET_BYTES = 25_000_000
"""Of tensors that travel together: the gradients inside a node, the models to their mean."""


@runtime_checkable
class LocalUpdates(HoldsOptimizer, Protocol):
    """A strategy whose workers hold different models between two exchanges."""

    def exchange(self, model: nn.Module) -> None:
        """Exchange what is due after the last step. If that breaks off, it is called again among those left."""

    def average(self, model: nn.Module) -> None:
        """Replace the model of every worker by the mean over all of them."""

    def about_rate(self, optimizer: Steppable) -> str:
        """What it does to the learning rate, in a sentence for the user; empty where it does nothing."""

    @property
    def givers(self) -> Sequence[int]:
        """When the workers have met: for each, by rank, whose optimizer it takes; itself, where it keeps its own."""


@contextmanager
def averaged_parameters(strategy: Any, model: nn.Module) -> Iterator[None]:
    """Within, `model` is the same on every worker: the mean, where the strategy lets them drift apart."""
    if not isinstance(strategy, LocalUpdates):
        yield
        return
    own = [tensor.detach().clone() for tensor in local_tensors(model)]
    strategy.average(model)
    try:
        yield
    finally:
        put(local_tensors(model), own)


def local_tensors(model: nn.Module) -> list[Tensor]:
    """The parameters and buffers that differ from worker to worker."""
    return [
        *(parameter for parameter in model.parameters() if parameter.requires_grad),
        *(without_repeats(buffer) for buffer in model.buffers() if buffer.is_floating_point() or buffer.is_complex()),
    ]


@torch.no_grad()
def put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy `values` into `tensors`."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


@torch.no_grad()
def weighted_mean(tensors: Sequence[Tensor], weight: float | Tensor, world: World) -> None:
    """Replace each tensor by the sum over the workers of `weight` times it; the weights of all sum to 1.

    Small tensors travel together: a message of few bytes costs as much as one of many. All of the tensors are replaced
    or, where the exchange breaks off, none.
    """
    begin = time.perf_counter()
    tensors = [as_real(tensor) for tensor in tensors]
    under_way = []
    for group in packed(tensors, range(len(tensors)), bucket_bytes=BUCKET_BYTES):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group]).mul_(weight)
        under_way.append((group, flat, world.start_all_reduce(flat)))
    for _, _, work in under_way:
        world.wait(work)
    for group, flat, _ in under_way:
        for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view_as(tensor))
    if world.size > 1 and world.device.type == "cpu":
        world.exchange_s += time.perf_counter() - begin


class LocalGradient:
    """The gradient of one's own samples, and how many of all samples they were.

    Where nodes step alone, "one" is a node: its workers sum their gradients in every step, and stay equal. So do all
    workers in an exact beginning, which is that of data parallelism.
    """

    def __init__(self, world: World, *, by_node: bool = False) -> None:
        """`by_node`: nodes step alone and not workers, where there are several nodes of several workers each."""
        self.world, self.by_node = world, by_node
        self.parameters: list[nn.Parameter] = []
        self.agreed = Agreed()
        self.together: Collectives | None = None
        """Those that sum their gradients with this worker; None where it steps by itself."""
        self.buckets: GradientBuckets | None = None
        self.node_of: list[int] = []
        """For each worker, by rank, the number of what steps alone: its node, or the worker, or 0 where all
        step together. Where workers have gone or come, that of before, until `regroup`."""
        self.number = 0
        """This worker's own among these."""
        self.later = 1
        """How many step alone after an exact beginning, as far as was known when the run began."""
        self.share: float | Tensor = 0.0
        """Samples since the last exchange, in batches: over all that step alone it sums to the steps. Shape () on a GPU
        where a node steps alone: its workers find their sum there, and it is read when the model is exchanged."""
        self.steps = 0
        """Since the last exchange."""
        self.complete = False
        """Whether the gradient of the step under way is here, and lacking is only the word that others have theirs."""
        self._before: tuple[float | Tensor, int] = (0.0, 0)

    def place(self, model: nn.Module, *, exact: bool) -> None:
        """Make ready to sum the gradients of `model` over those that step together. Called by all workers."""
        self.parameters = list(model.parameters())
        levels = self.levels(exact=False)
        self.later = self.world.size if levels is None else len(levels.nodes)
        self.regroup(self.levels(exact=True) if exact else levels, 0)

    def levels(self, *, exact: bool) -> Levels | None:
        """Who steps together now; None where every worker steps alone. Called by all workers.

        `exact`: all of them.
        """
        if exact:
            return Levels.one(self.world) if self.world.size > 1 else None
        return find_levels(self.world) if self.by_node else None

    @property
    def count(self) -> int:
        """How many step alone now."""
        return len(set(self.node_of))

    def regroup(self, levels: Levels | None, first: int) -> None:
        """Sum gradients from now on over the workers of a node of `levels`. Called by all workers.

        `first`: the worker of this node, from 0, in whose order gradients travel there.
        """
        self.agreed.forget()
        if levels is None:
            self.together = None
        else:
            self.together = self.world if len(levels.nodes) == 1 else Node(self.world, levels)
        if self.buckets is not None:
            self.buckets.rest()
        if self.together is not None:
            if self.buckets is None:
                self.buckets = GradientBuckets(self.parameters, self.together, bucket_bytes=BUCKET_BYTES)
            self.buckets.meet(first, self.together)
        self.node_of = list(range(self.world.size)) if levels is None else levels.node_of
        self.number = self.node_of[self.world.rank]

    @property
    def weight(self) -> float | Tensor:
        """This worker's part of all samples since the last exchange; those of a node share it evenly."""
        if not self.steps:
            return 1 / self.world.size
        return self.share / self.steps / (1 if self.together is None else self.together.size)

    def met(self) -> None:
        """An exchange is over."""
        self.share, self.steps = 0.0, 0

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Fill the gradients with the mean over one's own samples."""
        one = torch.ones((), device=self.world.device)
        if scale(one) is not one:
            raise ConfigError(
                "fp16 scales the loss for all workers alike, but with local steps each would need a scale of its own",
                where="precision",
                fix='use precision="bf16" or "fp32"',
            )
        for parameter in model.parameters():
            parameter.grad = None
        tally = StepMetrics(control_flags, self.agreed, self.world)
        self.complete, self._before = False, (self.share, self.steps)
        mine = sum(piece.weight for piece in pieces)
        own: float | Tensor = mine
        if self.together is None or self.buckets is None:
            for piece in pieces:
                tally.add(compute(model, piece), piece.weight).backward()
        else:
            self._backward_together(self.buckets, model, pieces, compute, tally)
            own = self._share_of(self.together, mine)
        self._divide_by(own)
        self.share = self.share + own
        self.steps += 1
        self.complete = True
        self.world.wait(tally.start_sum())  # last: who has it knows that every worker has its gradient
        return tally.outcome()

    def step_back(self) -> None:
        """The step under way broke off, and will be done again."""
        self.complete, (self.share, self.steps) = False, self._before

    def _share_of(self, together: Collectives, own: float) -> float | Tensor:
        """What those that step together have of the batch, of which this worker has `own`."""
        if together is self.world:
            return 1.0
        shares = torch.full((), own, dtype=torch.float64, device=self.world.device)
        together.wait(together.start_all_reduce(shares))
        # On a GPU to read it is to wait for it, and a worker that has a sample knows what matters: that it is not zero.
        return shares if own and is_asynchronous(self.world.device) else float(shares)

    def _divide_by(self, own: float | Tensor) -> None:
        """Have the mean over the samples of those that step together, who have `own` of the batch."""
        if isinstance(own, float | int) and own in (0, 1):
            for parameter in self.parameters if own == 0 else ():
                parameter.grad = None  # a ghost's gradient is none: this worker is still in this step
            return
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(own)

    def _backward_together(
        self, buckets: GradientBuckets, model: nn.Module, pieces: Sequence[Piece], compute: Compute, tally: StepMetrics
    ) -> None:
        """All backward passes; the gradients of those that step together are summed while the last one runs."""
        buckets.begin()
        for piece in pieces[:-1]:
            tally.add(compute(model, piece), piece.weight).backward()
        last = tally.add(compute(model, pieces[-1]), pieces[-1].weight) if pieces else None
        buckets.arm()
        if last is not None:
            buckets.backward(last)
        buckets.finish()

    def state_dict(self) -> dict[str, Any]:
        """How far since the last exchange, and who steps alone."""
        return {"share": float(self.share), "since": self.steps, "alone": self.number}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what `state_dict` gave; where those that step alone changed, all count alike."""
        if not states or not states[0]:
            return
        self.steps = states[0]["since"]
        alone = self.node_of
        self.share = states[self.world.rank]["share"] if self.same(states) else self.steps / len(set(alone))

    def same(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Whether those who gave `states`, by rank, stepped alone in the groups of now."""
        return [state.get("alone", rank) for rank, state in enumerate(states)] == self.node_of


class LocalState:
    """What only this worker has: its model between two exchanges, and its optimizer's state."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.optimizer: torch.optim.Optimizer | None = None

    def state_dict(self, model: nn.Module | None) -> dict[str, Any]:
        """Everything, copied."""
        if model is None or self.optimizer is None:
            return {}
        state = self.optimizer.state_dict()["state"]
        return {
            "tensors": [tensor.detach().clone() for tensor in local_tensors(model)],
            "optimizer": {
                str(key): {
                    name: value.detach().clone() if isinstance(value, Tensor) else value
                    for name, value in values.items()
                }
                for key, values in state.items()
            },
        }

    def load_state_dict(self, model: nn.Module, states: Sequence[Mapping[str, Any]], *, same: bool) -> None:
        """Take up this worker's own, where the `same` step alone; else all continue from the mean in the snapshot."""
        tensors = states[self.world.rank].get("tensors") if same else None
        if tensors:
            assert self.optimizer is not None, "hold() comes before load_state_dict()"
            put(local_tensors(model), tensors)
            del tensors  # before the optimizer's are read
            own = {int(key): values for key, values in states[self.world.rank]["optimizer"].items()}
            self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": own})
