"""Random numbers that are one value for all samples, so that a loss which draws can be compared with itself.

A loss that draws (a variational autoencoder, diffusion) has another value each time, and another for a part of a batch.
Within `SetDraws` every random tensor holds the same number everywhere, whatever its shape. Then a mean over samples is
the mean over its parts, as it is without draws, and a sum is not. Whether an operator draws is seen by the generators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyhosts.device import in_use

_UNIFORM, _NORMAL = ("rand", "rand_like"), ("randn", "randn_like")
_FILLED = ("exponential_", "log_normal_", "exponential", "log_normal", "cauchy", "cauchy_", "geometric", "geometric_")


class SetDraws(TorchDispatchMode):
    """Within, torch's operators that draw give `value` (from 0 to 1) where they would give a random number."""

    def __init__(self, value: float, sizes: Collection[int], own: Iterable[Tensor] | None = None) -> None:
        """`sizes`: of the batches. A whole number below one of these could choose a sample: that is not set.

        `own`: the tensors that may be written into, beside those that are made within; None: all.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.value, self.sizes = value, sizes
        self._own = None if own is None else set(map(_memory, own))
        self.left = ""
        """The first operator that has drawn what could not be set; empty while there is none."""
        self.ends: Any = None
        """Where NumPy's and Python's generators stood after the whole batch."""
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
            WouldWrite: it would change a tensor that is there before, and will be afterwards.
        """
        given = kwargs or {}
        own = self._own
        if own is None:
            return self._called(func, args, given)
        if func._schema.is_mutable and not own.issuperset(_written(func, args, given)):
            raise WouldWrite(
                f"torch.{func._schema.name.removeprefix('aten::')} changes a tensor that outlasts the pass"
            )
        found = self._called(func, args, given)
        if not any(each.alias_info for each in func._schema.returns):
            own.update(map(_memory, _tensors(found)))
        return found

    def _called(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            found = func(*args, **given)
            self.rounds = self.rounds or getattr(found, "dtype", None) in _HALVES
            return found
        change, before, own = _change(func, args, self), _generators(), given.get("generator")
        kept = None if own is None else own.get_state()
        found = func(*args, **given)
        if own is not None:
            own.set_state(kept)  # it is the script's, and no look is to move it
        elif all(map(torch.equal, before, _generators())):
            return found  # attention without dropout, say
        if change is None and (again := _without_dropout(func, args, given)) is not None:
            return func(*again[0], **again[1])
        if change is None:
            self.left = self.left or f"torch.{func._schema.name.removeprefix('aten::')}"
            return found
        return change(found)


class WouldWrite(Exception):
    """A pass would change what it is not to change."""


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _tensors(each)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
    """The memory that an operator writes into."""
    for place, each in enumerate(func._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            yield from map(_memory, _tensors(args[place] if place < len(args) else kwargs.get(each.name)))


_HALVES = (torch.bfloat16, torch.float16)


def _generators() -> list[Tensor]:
    """The states of torch's generators, of the CPU and of the current GPU."""
    module = in_use()
    return [torch.get_rng_state(), *([] if module is None else [module.get_rng_state()])]


def _without_dropout(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of an operator that has dropout within (attention, recurrent layers), with none of it."""
    names = [each.name for each in func._schema.arguments]
    name = next((each for each in ("dropout_p", "dropout") if each in names), None)
    if name is None:
        return None
    place = names.index(name)
    if place < len(args):
        return (*args[:place], 0.0, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: 0.0}


def _change(func: Any, args: tuple[Any, ...], draws: SetDraws) -> Callable[[Any], Any] | None:
    """What makes of the result of `func` one that is not random; None where that is not known."""
    name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
    value = draws.value
    if name in (*_UNIFORM, *_NORMAL, *_FILLED):
        return lambda found: found.fill_(value)
    if name in ("uniform", "uniform_"):
        low, high = args[1:3] if len(args) > 2 else (0.0, 1.0)
        return lambda found: found.fill_(low + value * (high - low))
    if name in ("normal", "normal_"):
        mean, deviation = _mean_and_deviation(args, functional=name == "normal", overload=overload)
        return lambda found: found.copy_(mean + value * deviation)
    if name in ("bernoulli", "bernoulli_"):
        probability: Any = args[1] if len(args) > 1 else (args[0] if name == "bernoulli" else 0.5)
        return lambda found: found.copy_(torch.as_tensor(probability, device=found.device) > value)
    if name in ("randint", "randint_like"):
        low, high = _bounds(args, overload)
        if high in draws.sizes:
            return None
        return lambda found: found.fill_(low + int(value * (high - low)))
    if name == "native_dropout":
        return lambda found: (args[0].clone(), torch.ones_like(found[1]))
    return _change_of_choice(name, args, draws)


def _change_of_choice(name: str, args: tuple[Any, ...], draws: SetDraws) -> Callable[[Any], Any] | None:
    """The same, for what chooses, and for distributions whose mean stands for a draw."""
    if name == "randperm":
        return None if args[0] in draws.sizes else lambda found: found.copy_(torch.arange(args[0]).flip(0))
    if name == "multinomial":
        if args[0].shape[-1] in draws.sizes:
            return None
        # A draw with replacement may take the likeliest each time, one without takes the likeliest ones.
        return lambda found: found.copy_(args[0].topk(found.shape[-1] if _is_without(args) else 1).indices)
    if name == "_sample_dirichlet":  # Beta, too
        return lambda found: found.copy_(args[0] / args[0].sum(-1, keepdim=True))
    if name in ("_standard_gamma", "poisson"):
        return lambda found: found.copy_(args[0])
    if name in ("rrelu_with_noise", "rrelu_with_noise_"):
        kept = args[0].clone()  # it may be changed in place
        slope = (args[2] + args[3]) / 2 if len(args) > 3 else (1 / 8 + 1 / 3) / 2
        return lambda found: found.copy_(torch.where(kept > 0, kept, kept * slope))
    return None


def _mean_and_deviation(args: tuple[Any, ...], *, functional: bool, overload: str) -> tuple[Any, Any]:
    given = args if functional and "Tensor" in overload else args[0:2] if overload == "float_float" else args[1:3]
    mean = given[0] if len(given) > 0 else 0.0
    deviation = given[1] if len(given) > 1 and isinstance(given[1], int | float | Tensor) else 1.0
    return torch.as_tensor(mean), torch.as_tensor(deviation)


def _is_without(args: tuple[Any, ...]) -> bool:
    return not (len(args) > 2 and args[2])


def _bounds(args: tuple[Any, ...], overload: str) -> tuple[int, int]:
    numbers = [each for each in args if isinstance(each, int) and not isinstance(each, bool)]
    return (numbers[0], numbers[1]) if "low" in overload else (0, numbers[0])
