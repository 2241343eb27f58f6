"""What strategies share whose workers hold parts of a model: norms of gradients that no one holds, sums of copies."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from manyhosts.cluster.membership import PartOfCopy
from manyhosts.communication.holding import Holding
from manyhosts.communication.layout import as_real
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.parts import TensorPart
from manyhosts.communication.shared_norm import prepare
from manyhosts.device import by_device
from manyhosts.errors import ConfigError
from manyhosts.strategies.optimizer_step import stepping
from manyhosts.strategies.strategy import OnMesh, Piece, RemembersNothing, Sample, Steppable
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
    kept = [each for part in model.modules() for held in vars(part).values() for each in _members(held)]
    return {id(each): each.detach() for each in kept if isinstance(each, Tensor) and not each.is_leaf}


def _members(held: Any) -> list[Any]:
    return [held, *(held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ())]


def check_memory(model: nn.Module, where: str) -> None:
    """See that no parameter of `model` lies where another of its tensors does: apart they would not change together.

    Raises:
        ConfigError: one does.
    """
    beside: dict[int, list[tuple[str, Tensor]]] = {}
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        is_cut = isinstance(each, DTensor)  # it was looked at before that
        if each.layout is torch.strided and not each.is_meta and not is_cut and each.numel():
            beside.setdefault(each.untyped_storage().data_ptr(), []).append((name, each))
    for names in beside.values():
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
        flat = summed(torch.cat([each.reshape(-1) for each in own]))
        for each, part in zip(own, flat.split([each.numel() for each in own]), strict=True):
            each.copy_(part.view_as(each))


class CutModel(OnMesh, RemembersNothing):
    """The model lies over the workers of `mesh` as `holding` says."""

    def __init__(self, mesh: Mesh, holding: Holding) -> None:
        super().__init__(mesh, holding)
        self.agreed = Agreed()
        self.in_copies = self.traits.survives_loss and (mesh.size("replicate") > 1 or self.world.apart)
        """Whether there were copies when the workers began: where one is lost, the others continue without it."""
        self.plan: dict[str, Any] = {}
        """How the model is cut, in plain values: what a worker that comes late must know."""
        self._full = False

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Step the optimizer, which knows of this worker's parts alone."""
        with stepping(optimizer):
            optimizer.step()

    # Where workers are lost and others come, in the words of `Elastic` and `InCopies`.

    def why_all_end(self) -> str:
        """Why no worker continues where one is lost; empty where those of other copies do."""
        return "" if self.in_copies else "there is one copy of the model"

    def layout(self) -> PartOfCopy | None:
        """This worker's place in its copy; None where all end with one that is lost."""
        return None if self.why_all_end() else self.mesh.place(self.plan)

    def prepare_update(self) -> None:
        """Return when all workers have all that their updates take: from here on each can make its own alone."""
        if self.world.membership is None or not self.in_copies or self._full:
            return
        self._full = True
        self.world.barrier()
        self._full = False  # the update follows, and nothing breaks it off

    @property
    def complete(self) -> bool:
        """Whether lacking is only the word that all have all that their updates take."""
        return self._full

    def step_back(self) -> None:
        """Nothing is kept of a step but gradients, which the next one begins again."""
        self._full = False

    def meet(self, source: int, *, new: bool, gone: int) -> str:
        """Sum gradients over the copies that there are now. Nothing is lost with those that are gone."""
        self._full = False
        self.agreed.forget()
        return ""

    def counted(self, tally: StepMetrics, values: Mapping[str, Tensor], piece: Piece) -> Tensor:
        """The loss of `piece`, with its weight. Workers that compute the same samples have it alike: it counts once."""
        return tally.add(values, piece.weight) if self.mesh.leads_replica else values["loss"] * piece.weight

    @torch.no_grad()
    def norm(self, model: nn.Module) -> Tensor:
        """The norm of the full gradient. All workers call this: each adds its part, and every element counts once."""
        given = []
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            part = self.holding.part(parameter.grad)
            if isinstance(part, TensorPart):
                given.append(part.local)
            elif self.world.is_leader:
                given.append(part)
        squares = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for where, own in by_device(given).items():
            here = torch.zeros((), dtype=torch.float64, device=where)
            for norm in torch._foreach_norm(own):
                here += norm.double().square()
            squares += here.to(self.world.device)
        return self.world.all_reduce(squares).sqrt().float()

    @torch.no_grad()
    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale what this worker holds of the gradient as PyTorch's `clip_grad_norm_` would scale all of it."""
        norm = self.norm(model)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        held = [self.holding.local(each.grad) for each in model.parameters() if each.grad is not None]
        for where, own in by_device(held).items():
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

    def look(self, sample: Sample) -> None:
        """Know what the model is called with. Before `place`."""
        self.sample = sample

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
        sums: dict[bool, list[Tensor]] = {False: [], True: []}
        for gradient in (each.grad for each in trained if each.grad is not None):
            sums[isinstance(self.holding.part(gradient), TensorPart)].append(as_real(self.holding.local(gradient)))
        # Apart, for the order in which numbers are added depends on the length of a message: what workers hold alike,
        # next to parts that are not of one length, would not stay alike.
        for given in sums.values():
            sum_together(given, copies.all_reduce)
