"""A step of an optimizer whose parameters are DTensors: what it would get wrong in silence is put right or refused.

PyTorch computes on DTensors what it would on full tensors, and sends for it what it needs. Three things it does not
see to: a number that is read while workers hold parts of it (`gradient.norm().item()`) is this worker's part; writing
into a slice that had to be gathered (`parameter[0].add_`) changes a copy; and random numbers are drawn by each worker
alone. The optimizers of PyTorch that treat each number alone do none of that, and are left alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyhosts.communication.layout import is_dtensor
from manyhosts.communication.world import is_connection_error
from manyhosts.errors import ConfigError, first_line
from manyhosts.strategies.strategy import Steppable

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_NUMBER_BY_NUMBER = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.ASGD,
    optim.RMSprop,
)
"""What each number of a tensor becomes depends on no other."""
_KNOWN_ALONE = (optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RMSprop)
"""Those of them whose update was seen to take no exchange."""
_WORDS_OF_DTENSOR = ("DTensor", "sharded", "placement", "tensor subclass", "No backend type associated with")


@contextmanager
def stepping(optimizer: Steppable) -> Iterator[None]:
    """Within, `optimizer` makes a step.

    Raises:
        ConfigError: it does something that cannot be done, or would not be right, where workers hold parts.
    """
    own: Any = getattr(optimizer, "optimizer", optimizer)  # in fp16 it is a gradient scaler's
    name = type(own).__name__
    if type(own) in _NUMBER_BY_NUMBER and not (own._optimizer_step_pre_hooks or own._optimizer_step_post_hooks):
        yield
        return
    try:
        with _Whole(name):
            yield
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as cause:
        if is_connection_error(cause) or not any(word in str(cause) for word in _WORDS_OF_DTENSOR):
            raise
        raise _refusal(
            f"{name} does in its step what PyTorch cannot do with tensors that lie in parts: {first_line(cause)}"
        ) from cause


def asks_within_update(optimizer: optim.Optimizer | None) -> str:
    """Why workers that hold parts may ask each other in an update; empty where it is known that they do not."""
    kind = type(optimizer)
    return "" if kind in _KNOWN_ALONE else f"{kind.__name__} may have workers ask each other in the midst of an update"


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        what,
        where="mh.Trainer(optimizer=…, strategy=…)",
        fix="choose an optimizer that treats each number alone, such as AdamW, or strategy='ddp'",
    )


class _Whole(TorchDispatchMode):
    """Within, numbers that are read are those of full tensors, and what would be lost is refused."""

    def __init__(self, name: str) -> None:
        """`name`: of the optimizer."""
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has not annotated it
        self.name = name
        self._copies: list[weakref.ref[DTensor]] = []
        """What an operation that gives views has given in memory of its own."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do `func`."""
        named = kwargs or {}
        # Most need no look, which would take as long as what they do.
        cut = list(filter(is_dtensor, tree_leaves((args, named)))) if self._copies or not _is_plain(func) else []
        if not cut:
            return func(*args, **named)
        if func is torch.ops.aten._local_scalar_dense.default:
            from manyhosts.communication.dtensors import gathered  # loaded where there are some

            return gathered(cut[0]).item()
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _refusal(
                f"{self.name} draws random numbers for tensors of which each worker holds a part, and each would draw "
                "the same ones for its own"
            )
        if func._schema.is_mutable and any(map(self._is_copy, _written(func, args, named))):
            raise _refusal(
                f"{self.name} writes into a slice of a tensor of which workers hold parts: that slice is a copy, and "
                "the tensor itself would stay as it was"
            )
        given = func(*args, **named)
        if any(each.alias_info is not None for each in func._schema.returns):
            memory = {_memory(each) for each in cut if not self._is_copy(each)}
            views = list(filter(is_dtensor, tree_leaves(given)))
            self._copies += [weakref.ref(each) for each in views if _memory(each) not in memory]
        return given

    def _is_copy(self, tensor: Any) -> bool:
        return any(copy() is tensor for copy in self._copies)


@cache
def _is_plain(func: Any) -> bool:
    """Whether it reads no number, draws none and gives no view: wrong only where it writes into a copy."""
    return (
        func is not torch.ops.aten._local_scalar_dense.default
        and torch.Tag.nondeterministic_seeded not in func.tags
        and all(each.alias_info is None or each.alias_info.is_write for each in func._schema.returns)
    )


def _memory(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """The tensors that `func` writes into."""
    arguments = enumerate(func._schema.arguments)
    writes = [
        (place, each.name) for place, each in arguments if each.alias_info is not None and each.alias_info.is_write
    ]
    return tree_leaves([named[name] if name in named else args[place] for place, name in writes])
