"""Random numbers that are one value for all samples, so that a loss which draws can be compared with itself.

A loss that draws (a variational autoencoder, diffusion) has another value each time, and another for a part of a batch.
Within `SetDraws` every random tensor holds the same number everywhere, whatever its shape. Then a mean over samples is
the mean over its parts, as it is without draws, and a sum is not. Whether an operator draws is seen by the generators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyhosts.device import in_use
from manyhosts.model.uncompiled import called_as_it_is
from manyhosts.strategies.uses import tensors_in


@called_as_it_is
class SetDraws(TorchDispatchMode):
    """Within, torch's operators that draw give `value` (from 0 to 1) where they would give a random number."""

    def __init__(self, value: float, sizes: Collection[int], own: Iterable[Tensor] | None = None) -> None:
        """`sizes`: of the batches. An integer below one of these could choose a sample: that is not set.

        `own`: the tensors that may be written into, besides those that are made within; None: all.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.value, self.sizes = value, sizes
        self._own = None if own is None else set(map(_memory, own))
        self.left = ""
        """The first operator that has drawn what could not be set; empty while there is none."""
        self.ends: Any = None
        """Where NumPy's and Python's generators were after the entire batch."""
        self.rounds = False
        """Whether something was computed in 16 bits."""

    def may_write(self, tensors: Iterable[Tensor]) -> None:
        """Let these be written into, too."""
        if self._own is not None:
            self._own.update(map(_memory, tensors))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator, and change what it has drawn.

        Raises:
            NotTried: it would change a tensor that is there before, and will be afterwards.
            Communicates: it exchanges something with other workers, which may not look at as many pieces.
        """
        given, own = kwargs or {}, self._own
        if own is not None and func.namespace == "c10d":
            raise Communicates(str(func._schema.name).removeprefix("c10d::").strip("_"))
        if own is not None and func._schema.is_mutable:
            named, arguments = _by_name(func, args, given), func._schema.arguments
            written = [named[each.name] for each in arguments if each.alias_info and each.alias_info.is_write]
            if not own.issuperset(map(_memory, tensors_in(written))):
                what = f"torch.{_name(func)} changes a tensor that outlasts the pass"
                raise NotTried(f"a forward pass would change what is to be kept: {what}")
        found = self._called(func, args, given)
        if own is not None and not any(each.alias_info for each in func._schema.returns):
            own.update(map(_memory, tensors_in(found)))
        return found

    def _called(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            found = func(*args, **given)
            self.rounds = self.rounds or getattr(found, "dtype", None) in HALVES
            return found
        named = _by_name(func, args, given)
        # What is left out of an operator that has dropout within (attention, recurrent layers) draws nothing.
        if dropout := named.keys() & {"dropout_p", "dropout"}:
            return func(**{**named, dropout.pop(): 0.0})
        if named.keys() >= {"noise", "lower", "upper"}:  # RReLU, whose backward pass has the slopes that were drawn
            return func(**{**named, "lower": (middle := (named["lower"] + named["upper"]) / 2), "upper": middle})
        made = self._made(_name(func).removesuffix("_"), named)
        own, before = named.get("generator"), _generators()
        kept = None if own is None else own.get_state()
        found = func(*args, **given)
        if own is not None:
            own.set_state(kept)  # it is the script's, and no look is to move it
        elif all(map(torch.equal, before, _generators())):
            return found
        if made is None:
            self.left = self.left or f"torch.{_name(func)}"
            return found
        if isinstance(found, tuple):  # dropout, and what it has left
            return made.clone(), torch.ones_like(found[1])
        return found.copy_(torch.as_tensor(made))

    def _made(self, name: str, given: Mapping[str, Any]) -> Any:
        """What replaces the draws of an operator that is given this; None where that is not known."""
        chosen_from = given["self"].shape[-1] if name == "multinomial" else given.get("n", given.get("high"))
        return MADE[name](given, self.value) if name in MADE and chosen_from not in self.sizes else None


class NotTried(Exception):
    """Why a look cannot be tried, in words."""


class Communicates(Exception):
    """Which collective of `torch.distributed` the script's own code calls in a forward pass."""


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


HALVES = (torch.bfloat16, torch.float16)


def _generators() -> list[Tensor]:
    """The states of torch's generators, of the CPU and of the current GPU."""
    return [each.get_rng_state() for each in (torch, in_use()) if each is not None]


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call, with those that are not given."""
    named = {each.name: each.default_value for each in func._schema.arguments if each.has_default_value()}
    return named | {each.name: arg for each, arg in zip(func._schema.arguments, args, strict=False)} | kwargs


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


MADE: dict[str, Callable[[Mapping[str, Any], Any], Any]] = {
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like"), lambda given, value: value),
    **dict.fromkeys(("exponential", "log_normal", "cauchy", "geometric"), lambda given, value: value),
    "uniform": lambda given, value: given["from"] + value * (given["to"] - given["from"]),
    "normal": lambda given, value: given["mean"] + value * given["std"],
    "bernoulli": lambda given, value: torch.as_tensor(given.get("p", given["self"])) > value,
    **dict.fromkeys(
        ("randint", "randint_like"),
        lambda given, value: given.get("low", 0) + int(value * (given["high"] - given.get("low", 0))),
    ),
    "native_dropout": lambda given, value: given["input"],
    "randperm": lambda given, value: torch.arange(given["n"]).flip(0),
    # With replacement the likeliest each time, without it the likeliest ones.
    "multinomial": lambda given, _: given["self"].topk(1 if given["replacement"] else given["num_samples"]).indices,
    # Distributions whose mean replaces a draw; the first one is used by Beta, too.
    "_sample_dirichlet": lambda given, value: given["self"] / given["self"].sum(-1, keepdim=True),
    **dict.fromkeys(("_standard_gamma", "poisson"), lambda given, value: given["self"]),
}
"""By the name of each operator: what replaces its draws, of its arguments and the value that is set."""
