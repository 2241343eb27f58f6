"""What a model takes of memory in training, found on tensors without memory: also of one that no worker could hold."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyhosts.data import randomness
from manyhosts.data.steps import mapped
from manyhosts.model.parameter_groups import MakeOptimizer, Parameters

Values = Callable[[nn.Module, Any], Mapping[str, Tensor]]
"""`values(model, batch)`: the forward pass and its loss."""
Blocks = Callable[[nn.Module], Sequence[nn.Module]]
"""Those of a model that may be computed again in the backward pass."""


class Unknown(Exception):
    """What was asked for cannot be found so; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateBytes:
    """What an optimizer takes."""

    kept: int
    """From one step to the next."""
    passing: int
    """Besides that, while it steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassBytes:
    """What a forward and a backward pass take, besides the model and its gradients."""

    activations: int
    """That the forward pass leaves for the backward pass."""
    backward: int
    """That the backward pass has at most besides these."""
    checkpointed: int | None
    """The activations where the blocks are computed again; None where there are none."""


class HeldBytes(TorchDispatchMode):
    """Within, knows how many bytes of tensors made there are kept, and how many were at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, list | tuple) else (made,):
            if isinstance(each, Tensor) and each.layout is torch.strided:
                self._see(each.untyped_storage())
        self.most = max(self.most, self.now)
        return made

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count none of these."""
        self._known.update(each.untyped_storage()._cdata for each in tensors)

    def _see(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place not in self._known:
            self._known.add(place)
            self.now += size
            weakref.finalize(storage, self._gone, place, size).atexit = False

    def _gone(self, place: int, size: int) -> None:
        self._known.discard(place)  # another one may come to lie there
        self.now -= size


def optimizer_bytes(make: MakeOptimizer, parameters: Parameters) -> UpdateBytes:
    """What the optimizer of `parameters` takes: it makes a step on tensors that have a shape alone.

    Raises:
        Unknown: it cannot be made, or step, on such.
    """
    shapes = parameters.with_shapes_alone()
    known = {id(each) for each in shapes}
    try:
        optimizer = make(shapes)
        for group in optimizer.param_groups:
            if group.get("foreach", ...) is None:
                group["foreach"] = False  # as PyTorch does on a CPU; on a GPU the trainer takes fused kernels
        if any(id(each) not in known for group in optimizer.param_groups for each in group["params"]):
            raise Unknown("the function that makes the optimizer takes other parameters than it is given")
        for each in shapes:
            each.grad = torch.empty_like(each)
        optimizer.step()  # makes what it keeps
        kept = [each for each in tree_leaves([*optimizer.state.values()]) if isinstance(each, Tensor)]
        with HeldBytes() as watched:
            watched.leave_out([*shapes, *(each.grad for each in shapes if each.grad is not None), *kept])
            optimizer.step()
    except Unknown:
        raise
    except Exception as cause:  # the user's function, or an optimizer that reads values
        raise Unknown(_words(cause)) from cause
    return UpdateBytes(kept=sum(each.nbytes for each in kept), passing=watched.most)


def pass_bytes(
    trained: nn.Module, values: Values, batch: Any, device: torch.device, *, again: Blocks, chosen: Blocks
) -> PassBytes:
    """Those of a forward and a backward pass of `trained` over `batch`, computed on tensors without memory.

    `again`: the blocks that may be computed again in the backward pass; `chosen`: those that are so in any case.

    Raises:
        Unknown: the pass asks for a value, or does something else that such tensors cannot.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode  # half a second, needed for a look ahead alone

        with randomness.kept(), FakeTensorMode(allow_non_fake_inputs=True), HeldBytes() as watched:
            model, own = _without_memory(trained, device)
            watched.leave_out(own)
            fake = mapped(batch, lambda tensor: torch.empty_like(tensor, device=device))
            watched.now = 0
            always = {id(each) for each in chosen(model)}
            leaves = _watched({*again(model), *chosen(model)}, watched)
            loss = values(model, fake)["loss"]
            freed = dict(leaves)  # a model that computes itself again calls its blocks in the backward pass, too
            kept = watched.most = watched.now
            with gradients_let_go(model):
                loss.backward()
            del loss
    except Exception as cause:  # anything in a user's forward pass may want a value
        raise Unknown(_words(cause)) from cause
    return PassBytes(
        activations=kept - _saved([size for block, size in freed.items() if block in always]),
        backward=max(0, watched.most - kept),
        checkpointed=kept - _saved(list(freed.values())) if freed and not always else None,
    )


def _saved(freed: Sequence[int]) -> int:
    """What is not kept where blocks are computed again, one at a time."""
    return sum(freed) - max(freed, default=0)


@contextmanager
def gradients_let_go(model: nn.Module) -> Iterator[None]:
    """Within, each gradient is forgotten when it is there, as if it had its place elsewhere."""
    with ExitStack() as hooks:
        for parameter in (each for each in model.parameters() if each.requires_grad):
            hooks.callback(parameter.register_post_accumulate_grad_hook(_forget).remove)
        yield


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _without_memory(trained: nn.Module, device: torch.device) -> tuple[nn.Module, list[Tensor]]:
    """A copy whose parameters and buffers have no memory, and these."""
    tensors: dict[int, Tensor] = {}
    for each in (*trained.parameters(), *trained.buffers()):
        shape = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device)
        is_parameter = isinstance(each, nn.Parameter)
        tensors[id(each)] = nn.Parameter(shape, requires_grad=each.requires_grad) if is_parameter else shape
    return copy.deepcopy(trained, dict(tensors)).train(), list(tensors.values())


def _watched(modules: set[nn.Module], watched: HeldBytes) -> dict[int, int]:
    """By the `id` of each, the bytes that its forward passes from now on leave in memory beyond their output: what
    computing it again makes free.
    """
    before, freed = dict[int, int](), {id(each): 0 for each in modules}

    def enter(module: nn.Module, inputs: Any) -> None:
        before[id(module)] = watched.now

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, list | tuple) else (output,)
        own = sum(each.untyped_storage().nbytes() for each in outputs if isinstance(each, Tensor))
        freed[id(module)] += max(0, watched.now - before[id(module)] - own)

    for module in modules:
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    return freed


def _words(cause: Exception) -> str:
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0]}" if text else type(cause).__name__
