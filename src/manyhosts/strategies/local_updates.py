"""What strategies share whose workers step alone: their own gradient, and the mean of their models."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.communication.buckets import GradientBuckets
from manyhosts.communication.collectives import Collectives
from manyhosts.communication.holding import Holding
from manyhosts.communication.layout import as_real, put_flat, without_repeats
from manyhosts.communication.nodes import Levels, Node, find_levels
from manyhosts.communication.packing import packed
from manyhosts.communication.parts import TensorPart
from manyhosts.communication.world import World
from manyhosts.device import is_asynchronous
from manyhosts.errors import ConfigError
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome, factor_of
from manyhosts.strategies.tally import Agreed, StepMetrics

BUCKET_BYTES = 25_000_000
"""Of tensors that travel together: the gradients inside a node, the models to their mean."""


def local_tensors(model: nn.Module, holding: Holding, *, cut: bool | None = None) -> list[Tensor]:
    """What this worker holds of the parameters and buffers that differ from worker to worker, or copy to copy.

    `cut`: only of those that are in parts, or only of those that are not.
    """
    buffers = [each for each in model.buffers() if each.is_floating_point() or each.is_complex()]
    tensors = [*(each for each in model.parameters() if each.requires_grad), *map(without_repeats, buffers)]
    return [holding.local(each).detach() for each in tensors if cut in (None, is_cut(each, holding))]


def is_cut(tensor: Tensor, holding: Holding) -> bool:
    """Whether workers hold parts of `tensor`."""
    return isinstance(holding.part(tensor), TensorPart)


@torch.no_grad()
def weighted_mean(
    tensors: Sequence[Tensor], weight: float | Tensor, world: World, members: Collectives | None = None
) -> None:
    """Replace each tensor by the sum over `members` of `weight` times it; the weights of all of them sum to 1.

    `members`: some of the workers of `world`; all, where none are named.

    Small tensors travel together: a message of few bytes costs as much as one of many. All of the tensors are replaced
    or, where the exchange breaks off, none.
    """
    begin = time.perf_counter()
    tensors = [as_real(tensor) for tensor in tensors]
    under_way = []
    for group in packed(tensors, range(len(tensors)), bucket_bytes=BUCKET_BYTES):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group]).mul_(weight)
        under_way.append((group, flat, (members or world).start_all_reduce(flat)))
    for _, _, work in under_way:
        world.wait(work)
    for group, flat, _ in under_way:
        put_flat(flat, group)
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
            self.buckets.resync(first, self.together)
        self.node_of = list(range(self.world.size)) if levels is None else levels.node_of
        self.number = self.node_of[self.world.rank]

    @property
    def weight(self) -> float | Tensor:
        """This worker's part of all samples since the last exchange; those of a node share it evenly."""
        together = 1 if self.together is None else self.together.size
        return self.share / self.steps / together if self.steps else 1 / self.world.size

    def met(self) -> None:
        """An exchange is over."""
        self.share, self.steps = 0.0, 0

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Fill the gradients with the mean over one's own samples."""
        self.begin(scale)
        for parameter in model.parameters():
            parameter.grad = None
        tally = StepMetrics(control_flags, self.agreed, self.world)
        mine = sum(piece.weight for piece in pieces)
        own: float | Tensor = mine
        if self.together is None or self.buckets is None:
            for piece in pieces:
                tally.add(compute(model, piece), piece.weight).backward()
        else:  # gradients are summed while the last backward pass runs
            self.buckets.begin()
            for piece in pieces[:-1]:
                tally.add(compute(model, piece), piece.weight).backward()
            last = tally.add(compute(model, pieces[-1]), pieces[-1].weight) if pieces else None
            self.buckets.arm()
            if last is not None:
                self.buckets.backward(last)
            self.buckets.finish()
            own = self.share_of(self.together, mine)
        self.end(own)
        self.world.wait(tally.start_sum())  # last: who has it knows that every worker has its gradient
        return tally.outcome()

    def begin(self, scale: Scale) -> None:
        """A step begins.

        Raises:
            ConfigError: the loss is to be scaled.
        """
        if factor_of(scale, self.world.device) is not None:
            raise ConfigError(
                "fp16 scales the loss for all workers alike, but with local steps each would need a scale of its own",
                where="precision",
                fix='use precision="bf16" or "fp32"',
            )
        self.complete, self._before = False, (self.share, self.steps)

    def end(self, own: float | Tensor) -> None:
        """The gradients are summed over those that step together, who have `own` of the batch: have their mean."""
        if isinstance(own, Tensor) or own not in (0, 1):
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(own)
        elif own == 0:
            for parameter in self.parameters:
                parameter.grad = None  # a ghost's gradient is none: this worker is still in this step
        self.share = self.share + own
        self.steps += 1
        self.complete = True

    def step_back(self) -> None:
        """The step under way broke off, and will be done again."""
        self.complete, (self.share, self.steps) = False, self._before

    def share_of(self, together: Collectives, own: float) -> float | Tensor:
        """What those that step together have of the batch, of which this worker has `own`."""
        if together is self.world:
            return 1.0
        shares = torch.full((), own, dtype=torch.float64, device=self.world.device)
        together.wait(together.start_all_reduce(shares))
        # On a GPU to read it is to wait for it, and a worker that has a sample knows what matters: that it is not zero.
        return shares if own and is_asynchronous(self.world.device) else float(shares)

    def state_dict(self) -> dict[str, Any]:
        """How far since the last exchange, and who steps alone."""
        return {"share": float(self.share), "since": self.steps, "alone": self.number}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what `state_dict` gave; where those that step alone changed, all count alike."""
        self.steps = states[0]["since"]
        self.share = states[self.world.rank]["share"] if self.same(states) else self.steps / self.count

    def same(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Whether those who gave `states`, by rank, stepped alone in the groups of now."""
        return [state.get("alone", rank) for rank, state in enumerate(states)] == self.node_of


def own_state(model: nn.Module | None, optimizer: torch.optim.Optimizer | None, holding: Holding) -> dict[str, Any]:
    """What only this worker has, copied: its model between two exchanges, and its optimizer's state."""
    if model is None or optimizer is None:
        return {}
    return {
        "tensors": [tensor.clone() for tensor in local_tensors(model, holding)],
        "optimizer": {
            str(key): torch.utils._pytree.tree_map(
                lambda each: holding.local(each).detach().clone() if isinstance(each, Tensor) else each, kept
            )
            for key, kept in optimizer.state_dict()["state"].items()
        },
    }


def take_own_state(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None, holding: Holding
) -> None:
    """Take up what `own_state` gave on this worker."""
    if tensors := state.get("tensors"):
        assert optimizer is not None, "hold() comes before load_state_dict()"
        torch._foreach_copy_(local_tensors(model, holding), tensors)
        del tensors  # before the optimizer's are read
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        own = {  # read once; what is under a word is no parameter's
            int(key) if key.isdigit() else key: {
                name: _held_as(parameters[int(key)], value, holding) for name, value in kept.items()
            }
            if key.isdigit()
            else kept
            for key, kept in state["optimizer"].items()
        }
        optimizer.load_state_dict(optimizer.state_dict() | {"state": own})


def _held_as(parameter: Tensor, value: Any, holding: Holding) -> Any:
    """What an optimizer keeps of `parameter`, cut as that is where it has its shape."""
    is_part = isinstance(value, Tensor) and value.shape == holding.local(parameter).shape
    return holding.like(parameter, value) if is_part else value
