"""What strategies share whose workers hold parts of a model: norms of gradients that no one holds, sums of copies."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.cluster.membership import PartOfCopy
from manyhosts.communication.collectives import Collectives
from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.holding import Holding
from manyhosts.communication.layout import as_real, is_dtensor, put_flat
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.parts import TensorPart
from manyhosts.communication.shared_norm import prepare
from manyhosts.device import by_device
from manyhosts.errors import ConfigError
from manyhosts.strategies.optimizer_step import stepping
from manyhosts.strategies.strategy import Piece, Sample, Steppable, Strategy
from manyhosts.strategies.tally import Agreed, StepMetrics


def copy_of(model: nn.Module) -> nn.Module:
    """A model to try things on."""
    made = copy.deepcopy(model, without_graph(model))
    prepare(made)
    return made


def without_graph(model: nn.Module) -> dict[int, Any]:
    """For `copy.deepcopy`, which copies no tensor with a graph: in place of those that modules have computed and keep.

    Such as an old weight_norm its weight, or activations for pictures.
    """
    kept = [each for part in model.modules() for member in vars(part).values() for each in _members(member)]
    return {id(each): each.detach() for each in kept if isinstance(each, Tensor) and not each.is_leaf}


def _members(member: Any) -> list[Any]:
    return [
        member,
        *(member.values() if isinstance(member, dict) else member if isinstance(member, list | tuple) else ()),
    ]


def check_memory(model: nn.Module, where: str) -> None:
    """See that no parameter of `model` lies where another of its tensors does: cut, they would not change together.

    Raises:
        ConfigError: one does.
    """
    by_memory: dict[int, list[tuple[str, Tensor]]] = {}
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        # One that is cut was looked at before that.
        if each.layout is torch.strided and not each.is_meta and not is_dtensor(each) and each.numel():
            by_memory.setdefault(each.untyped_storage().data_ptr(), []).append((name, each))
    for names in by_memory.values():
        for (name, each), (other, tensor) in itertools.combinations(names, 2):
            if isinstance(each, nn.Parameter) and _overlap(each, tensor):
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise ConfigError(
                    f"the {kind} {other!r} lies in the memory of the parameter {name!r}, and where parameters are kept "
                    "in parts it would no longer change with it",
                    where=where,
                    fix="make one parameter of both, and take the other from it in forward; or choose strategy='ddp'",
                )


def check_hooks(model: nn.Module, where: str) -> None:
    """See that no parameter of `model` carries what is lost with the tensor that a part takes the place of.

    Raises:
        ConfigError: one does.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"the parameter {name!r} has a hook on its gradient, and no worker has that gradient in full",
                where=where,
                fix="do it in the forward pass (multiply the weight by its mask), or choose strategy='ddp'",
            )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether an element of `one` lies where one of `other` does, which is in the same storage."""
    (first, behind_first), (second, behind_second) = _bytes_of(one), _bytes_of(other)
    if behind_first <= second or behind_second <= first:
        return False
    if one.is_contiguous() or other.is_contiguous() or one.dtype != other.dtype:
        return True
    numbers = torch.arange(one.untyped_storage().nbytes() // one.element_size())
    elements = [numbers.as_strided(each.shape, each.stride(), each.storage_offset()) for each in (one, other)]
    return bool(torch.isin(*(each.reshape(-1) for each in elements)).any())


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its storage that is its own, and the first after its last."""
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    return begin * size, (begin + last + 1) * size


def sum_together(given: Sequence[Tensor], summed: Callable[[Tensor], Tensor]) -> None:
    """Have their sums over workers in place of `given`, by a message for each dtype. `summed` makes one of them."""
    for dtype in dict.fromkeys(each.dtype for each in given):
        own = [each for each in given if each.dtype == dtype]
        put_flat(summed(torch.cat([each.reshape(-1) for each in own])), own)


class CutModel(Strategy):
    """The model lies over the workers of `mesh` as `holding` says."""

    has_own = True
    complete = False
    """Whether lacking is only the word that all have all that their updates take."""

    def __init__(self, mesh: Mesh, holding: Holding) -> None:
        super().__init__(mesh, holding)
        self.agreed = Agreed()
        self.members: Collectives = self.world
        """Those whose gradients make one: all, but where copies step alone."""
        self.of_gradient = holding
        """What of it each of them gives, so that every element counts once."""
        self.in_copies = self.traits.survives_loss and (mesh.size("replicate") > 1 or self.world.is_joining)
        """Whether there were copies when the workers began: where one is lost, the others continue without it."""
        self.plan: dict[str, Any] = {}
        """How the model is cut, in plain values: what a worker that comes late must know."""

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Step the optimizer, which knows of this worker's parts alone."""
        with stepping(optimizer):
            optimizer.step()

    # Where workers are lost and others come.

    def why_all_end(self) -> str:
        """Why no worker continues where one is lost; empty where those of other copies do."""
        return super().why_all_end() or ("" if self.in_copies else "there is one copy of the model")

    def layout(self) -> PartOfCopy | None:
        """This worker's place in its copy; None where all end with one that is lost."""
        return None if self.why_all_end() else self.mesh.place(self.plan)

    def prepare_update(self) -> None:
        """Return when all workers have all that their updates take: from here on each can make its own alone."""
        if self.world.membership is None or not self.in_copies or self.complete:
            return
        self.complete = True
        self.world.barrier()
        self.complete = False  # the update follows, and nothing breaks it off

    def step_back(self) -> None:
        """Nothing is kept of a step but gradients, which the next one begins again."""
        self.complete = False

    def resync(self, source: int, *, new: bool, gone: int) -> str:
        """Sum gradients over the copies that there are now. Nothing is lost with those that are gone."""
        self.complete = False
        self.agreed.forget()
        return ""

    def compare_copies(
        self, tensors: Mapping[str, Tensor], checksums: Callable[[Mapping[str, Tensor]], Mapping[str, str]]
    ) -> tuple[str, Mapping[str, Tensor]]:
        """See `Strategy`."""
        holding, common = self.holding, self.holding.everywhere(tensors)
        cut = {
            name: holding.local(each)
            for name, each in tensors.items()
            if name not in common or isinstance(holding.part(each), TensorPart)
        }
        rows = gather_plain(self.mesh.along("replicate"), checksums(cut))
        differing = next((name for name in cut if len({row.get(name) for row in rows}) > 1), "")
        found = next(filter(None, gather_plain(self.world, differing)), "")
        return found, {name: each for name, each in common.items() if name not in cut}

    def counted(self, tally: StepMetrics, values: Mapping[str, Tensor], piece: Piece) -> Tensor:
        """The loss of `piece`, with its weight. Workers that compute the same samples have it alike: it counts once."""
        return tally.add(values, piece.weight) if self.mesh.leads_replica else values["loss"] * piece.weight

    @torch.no_grad()
    def norm(self, model: nn.Module) -> Tensor:
        """The norm of the gradient that `members` have: each of them adds its part. All workers call this."""
        parts = [self.of_gradient.part(each.grad) for each in model.parameters() if each.grad is not None]
        counted = [each for each in parts if isinstance(each, TensorPart) or self.members.rank == 0]
        given = [each.local if isinstance(each, TensorPart) else each for each in counted]
        squares = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for where, own in by_device(given).items():
            here = torch.zeros((), dtype=torch.float64, device=where)
            for norm in torch._foreach_norm(own):
                here += norm.double().square()
            squares += here.to(self.world.device)
        return self.members.all_reduce(squares).sqrt().float()

    @torch.no_grad()
    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale what this worker holds of the gradient as PyTorch's `clip_grad_norm_` would scale all of it."""
        norm = self.norm(model)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = [self.holding.local(each.grad) for each in model.parameters() if each.grad is not None]
        for where, own in by_device(gradients).items():
            here = factor.to(where)
            for gradient in own:
                gradient.mul_(here.to(gradient.dtype))
        return norm


class ComputedTogether(CutModel):
    """The same where workers compute one forward pass together; copies of them read different samples."""

    def __init__(self, mesh: Mesh, holding: Holding, *, name: str) -> None:
        """`name`: of the strategy.

        Raises:
            ConfigError: the workers compute on GPUs.
        """
        super().__init__(mesh, holding)
        if self.world.device.type != "cpu":
            raise ConfigError(
                f"this worker computes on {self.world.device}, and workers that compute one model together send each "
                "other messages over Gloo, from the CPU",
                where=f"strategy={name!r}",
                fix="choose another strategy, or start on machines without GPUs",
            )
        self.sample: Sample | None = None
        self.parameters: list[nn.Parameter] = []

    def look(self, sample: Callable[[], Sample | None]) -> None:
        """Know what the model is called with. Before `place`."""
        self.sample = sample()

    @torch.no_grad()
    def sum_copies(self) -> None:
        """Sum the gradients over the copies; one that a copy has not found counts as zero there."""
        copies = self.mesh.data
        if copies.size == 1:
            return
        trained = [each for each in self.parameters if each.requires_grad and not each.is_meta]
        found = torch.tensor([each.grad is not None for each in trained], dtype=torch.float32)
        for each, has in zip(trained, copies.all_reduce(found).tolist(), strict=True):
            if has and each.grad is None:
                each.grad = torch.zeros_like(each)
        gradients, holding = [each.grad for each in trained if each.grad is not None], self.holding
        # Separately, for the order in which numbers are added depends on the length of a message: what workers hold
        # alike, next to parts that are not of one length, would not stay alike.
        for in_parts in (False, True):
            given = [each for each in gradients if isinstance(holding.part(each), TensorPart) is in_parts]
            sum_together([as_real(holding.local(each)) for each in given], copies.all_reduce)
