"""Activation checkpointing: blocks keep their input alone, and compute themselves again in the backward pass.

The second forward pass of a block sees what the first one saw: the input, the precision, the random numbers of torch,
NumPy and Python, and the buffers that forward passes change (BatchNorm's running values, say), which it leaves as the
first one left them. So no bit differs. What cannot be done so (a block that changes its input in place, one that draws
from a generator of its own) is found in the first backward pass: each block's second output is compared with its first.

A block stays the object that it is, with its parameters, hooks and names; its class becomes one that derives from the
user's. Its copies, and what is read from a file, are of the user's class. Hooks are called once, around the checkpoint.

Source: Chen, Xu, Zhang and Guestrin 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.

What of a model is compiled is the same blocks, each by itself. A model that is compiled as one has one backward graph,
whose gradients all come at its end: nothing of their exchange is hidden by computing. Blocks of one class also share
their code, so there is less to compile. Source: "Reducing torch.compile cold start compilation time with regional
compilation", PyTorch's recipes.
"""

from __future__ import annotations

import copyreg
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from manyhosts.communication.layout import as_real
from manyhosts.config.settings import ActivationCheckpointing, Settings
from manyhosts.data import randomness
from manyhosts.device import is_asynchronous
from manyhosts.errors import ConfigError
from manyhosts.strategies.blocks import Blocks, modules_of_layers, repeated_blocks
from manyhosts.strategies.uses import tensors_in

_ROUNDING = 1e-2
"""Of the largest number in an output: what a GPU's kernels may differ by that add in any order."""
_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_called: WeakSet[nn.Module] = WeakSet()
"""Blocks of which a training pass has come by."""
_changing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Of the blocks whose second output has been seen to be their first: the buffers that forward passes change."""


def checkpoint_blocks(model: nn.Module, asked: ActivationCheckpointing, *, compiled: bool = False) -> str:
    """Have blocks of `model` computed again in backward passes, in place of those of an earlier call. In a few words,
    which.

    `compiled`: what such a block computes is compiled, and its checkpoint is around that.

    Raises:
        ConfigError: the model has no blocks, or one that cannot be computed again.
    """
    for module in model.modules():
        if is_checkpointed(module):
            module.__class__ = cast(type[Checkpointed], type(module)).plain
    if asked is None:
        return ""
    chosen, count = chosen_blocks(model, asked)
    if not chosen:
        raise ConfigError(
            f"activation_checkpointing is {asked!r}, but the model has no blocks: several modules of one class, each "
            "of several layers, in a ModuleList or Sequential"
            + (", nor any other module of several layers" if asked == "all" else ""),
            where="activation_checkpointing",
            fix="put the layers into modules of their own, or leave it out"
            + (', or try "all", which takes every module of several layers' if asked != "all" else ""),
        )
    for name, block in chosen:
        _check(name, block)
        _names[block] = name
        _called.discard(block)
        _changing.pop(block, None)
        block.__class__ = _checkpointed(type(block), compiled)  # type: ignore[arg-type]  # mypy: no class is hashable
    return f"{len(chosen)} of {count} blocks, {_few([name for name, _ in chosen])}"


def chosen_blocks(model: nn.Module, asked: ActivationCheckpointing) -> tuple[Blocks, int]:
    """The blocks of `model` that are computed again, and of how many.

    They are the first ones: when their turn comes in the backward pass, what the last ones kept is free again.
    """
    if asked is None:
        return [], 0
    blocks = modules_of_layers(model) if asked == "all" else repeated_blocks(model)
    return blocks[: math.ceil(asked * len(blocks))] if isinstance(asked, int | float) else blocks, len(blocks)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether `module` is one that `checkpoint_blocks` has chosen."""
    return "plain" in vars(type(module)) and issubclass(type(module), Checkpointed)


def uncalled(model: nn.Module) -> list[str]:
    """The names of the blocks that `checkpoint_blocks` has chosen and no training pass has called."""
    return [_names.get(each, "") for each in model.modules() if is_checkpointed(each) and each not in _called]


def _check(name: str, block: nn.Module) -> None:
    """Raise ConfigError where the class of `block` does not say what it computes."""
    for is_so, what in (
        (isinstance(block, torch.jit.ScriptModule), "is TorchScript"),
        ("forward" in vars(block), "has a forward of its own, besides that of its class"),
    ):
        if is_so:
            raise ConfigError(
                f"the block {name} ({type(block).__name__}) {what}, and cannot be computed again",
                where="activation_checkpointing",
                fix="give it as a plain module, or leave activation_checkpointing out",
            )


class Checkpointed:
    """In front of the class of a block."""

    plain: ClassVar[type[nn.Module]]
    """The class of the block."""
    compute: Callable[..., Any]
    """Its forward pass, perhaps compiled."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the block computes."""
        block = cast(nn.Module, self)
        if not (block.training and torch.is_grad_enabled()):
            return self.compute(*args, **kwargs)
        _called.add(block)
        call = _Call(block, self.compute, [*args, *kwargs.values()])
        return checkpoint(
            call,
            *args,
            use_reentrant=False,
            early_stop=not call.compares,
            context_fn=lambda: (nullcontext(), call.again()),
            **kwargs,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return (copyreg._reconstructor, (self.plain, object, None), *reduced[2:])  # type: ignore[attr-defined]


@cache
def _checkpointed(kind: type[nn.Module], compiled: bool) -> type[nn.Module]:
    """The class in place of `kind`."""
    compute = torch.compile(kind.forward) if compiled else kind.forward
    words = {"plain": kind, "compute": compute, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (Checkpointed, kind), words)


class _Call:
    """One forward pass of a block, called again in the backward pass."""

    def __init__(self, block: nn.Module, compute: Callable[..., Any], inputs: list[Any]) -> None:
        self.block, self.compute = block, compute
        self.compares = block not in _changing
        """Whether this block's second output is yet to be compared with its first."""
        self.inputs = [(tensor, tensor._version) for tensor in tensors_in(inputs)]
        self.generators = randomness.states()
        self.before: dict[str, Tensor] = {}
        """The buffers that forward passes change, by name: copies of what they were before the first one."""
        self.output: list[Tensor] | None = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """What the second forward pass runs in."""
        now = {name: self.block.get_buffer(name) for name in self.before}
        try:
            _put(self.block, self.before)
            with randomness.replayed(self.generators):
                yield
        finally:
            _put(self.block, now)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._first(*args, **kwargs) if self.output is None else self._second(*args, **kwargs)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        known, get = _changing.get(self.block), self.block.get_buffer
        buffers = self.block.named_buffers(remove_duplicate=False)  # by every name under which a module has them
        seen = {name: (tensor, tensor._version) for name, tensor in buffers}
        before = {name: seen[name][0].clone() for name in (seen if known is None else known)}
        output = self.compute(*args, **kwargs)
        self._check_inputs()
        changed = {
            name for name, (tensor, version) in seen.items()
            if get(name) is not tensor or tensor._version != version
        }  # fmt: skip
        if known is None:
            # PyTorch's own layers change running values without a word, which then may be what they were by chance.
            runs = {name for name in seen if isinstance(_module_with(self.block, name), _NormBase)}
            changed |= runs | {name for name, copy in before.items() if not _alike(get(name), copy)}
        elif late := sorted(changed - known):
            raise self._error(
                f"cannot be computed again: it changes its buffer {late[0]}, which it did not in its first pass",
                "have it changed in the first pass, too",
            )
        self.before = {name: before[name] for name in (changed if known is None else known)}
        self.output = [tensor.detach() for tensor in tensors_in(output)] if self.compares else []
        return output

    def _second(self, *args: Any, **kwargs: Any) -> Any:
        self._check_inputs()
        output = self.compute(*args, **kwargs)
        if self.compares:
            first, second = self.output, [*tensors_in(output)]
            assert first is not None, "the first pass leaves its output"
            if len(first) != len(second) or not all(map(_alike, first, second)):
                raise self._error(
                    "computes something else when it is computed again",
                    "let it draw from the generators of torch, NumPy or Python, and change neither its arguments (such "
                    "as a cache of keys) nor anything that is no buffer",
                )
            _changing[self.block] = set(self.before)
            self.compares, self.output = False, []
        return output

    def _check_inputs(self) -> None:
        if any(tensor._version != version for tensor, version in self.inputs):
            raise self._error(
                "cannot be computed again: its input was changed in place",
                "write x = x + y for x += y, and inplace=False for the first layer of the block and what follows it",
            )

    def _error(self, what: str, fix: str) -> ConfigError:
        return ConfigError(
            f"the block {_names.get(self.block, '')} ({type(self.block).__name__}) {what}",
            where="activation_checkpointing",
            fix=f"{fix}; or leave activation_checkpointing out",
        )


def _module_with(block: nn.Module, name: str) -> nn.Module:
    """The module in `block` that has the buffer called `name`."""
    return block.get_submodule(name.rpartition(".")[0])


def _put(block: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Have `block` hold these, by name, and tell no one who listens to new buffers."""
    for name, tensor in buffers.items():
        _module_with(block, name)._buffers[name.rpartition(".")[2]] = tensor


def _alike(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    one, other = as_real(first), as_real(second.detach())
    if not one.is_floating_point():
        return torch.equal(one, other)
    allowed = _ROUNDING * float(one.abs().nan_to_num().max()) if is_asynchronous(one.device) and one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=allowed, equal_nan=True)


def _few(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def prepare_blocks(model: nn.Module, settings: Settings) -> list[str]:
    """Have blocks of `model` compiled, and computed again in the backward pass, as `settings` say. What is to be said
    of that.
    """
    asked = settings.activation_checkpointing
    again = checkpoint_blocks(model, asked, compiled=settings.compile)
    if settings.compile:
        compile_model(model)
    return [f"activation_checkpointing={asked!r}: computed again in the backward pass are {again}"] if again else []


def compile_model(model: nn.Module) -> None:
    """Have `model` compiled when it is called first; in place, so that names in snapshots stay the same.

    What is computed again in the backward pass is compiled inside its checkpoint already, and not around it.
    """
    again = any(map(is_checkpointed, model.modules()))
    for block in [block for _, block in repeated_blocks(model)] or ([] if again else [model]):
        if not is_checkpointed(block):
            block.compile()
