"""Random numbers that are one value for all samples, so that a loss which draws can be compared with itself.

A loss that draws (a variational autoencoder, diffusion) has another value each time, and another for a part of a batch.
Within `SetDraws` every random tensor holds the same number everywhere, whatever its shape. Then a mean over samples is
the mean over its parts, as it is without draws, and a sum is not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_UNIFORM, _NORMAL = ("rand", "rand_like"), ("randn", "randn_like")
_FILLED = ("exponential_", "log_normal_")


class SetDraws(TorchDispatchMode):
    """Within, torch's operators that draw give `value` (from 0 to 1) where they would give a random number."""

    def __init__(self, value: float, sizes: Collection[int]) -> None:
        """`sizes`: of the batches. A whole number below one of these could choose a sample: that is not set."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.value, self.sizes = value, sizes
        self.left = False
        """Whether something was drawn that could not be set."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator, and change what it has drawn."""
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return found
        change = _change(func, args, self)
        if change is None:
            self.left = True
            return found
        return change(found)


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
    return None


def _mean_and_deviation(args: tuple[Any, ...], *, functional: bool, overload: str) -> tuple[Any, Any]:
    given = args if functional and "Tensor" in overload else args[0:2] if overload == "float_float" else args[1:3]
    mean = given[0] if len(given) > 0 else 0.0
    deviation = given[1] if len(given) > 1 and isinstance(given[1], int | float | Tensor) else 1.0
    return torch.as_tensor(mean), torch.as_tensor(deviation)


def _bounds(args: tuple[Any, ...], overload: str) -> tuple[int, int]:
    numbers = [each for each in args if isinstance(each, int) and not isinstance(each, bool)]
    return (numbers[0], numbers[1]) if "low" in overload else (0, numbers[0])
