"""Models that were made on the meta device, without values: given them module by module, the same on every worker.

Each module draws from the run's seed and its place in the model, so what it gets does not depend on which others a
worker makes, or in which order: a strategy that keeps parts makes one unit at a time and never holds all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from manyhosts.data import randomness
from manyhosts.errors import ConfigError


class Place(NamedTuple):
    """Of a module in a model."""

    number: int
    name: str
    init: Callable[[nn.Module], None] | None
    """What gives it its first values: `_init_weights` of the nearest model of `transformers` around it, or None."""


Places = Mapping[int, Place]
"""By the `id` of each module in a model."""


def is_meta(model: nn.Module) -> bool:
    """Whether any tensor of `model` has no values yet."""
    return any(each.is_meta for each in (*model.parameters(), *model.buffers()))


def places_of(model: nn.Module) -> Places:
    """Those of an uncut model."""
    inits: dict[str, Callable[[nn.Module], None]] = {}
    found = {}
    for number, (name, module) in enumerate(model.named_modules()):
        # A class of the script's may have a method of that name without arguments, which is another thing.
        own = getattr(module, "_init_weights", None) if hasattr(module, "init_weights") else None
        around = inits.get(name.rpartition(".")[0]) if name else None
        if init := own or around:
            inits[name] = init
        found[id(module)] = Place(number, name, init)
    return found


@torch.no_grad()
def materialise(modules: Iterable[nn.Module], places: Places) -> None:
    """Give values to the own tensors of `modules` that are on the meta device, by `reset_parameters()` of each.

    Where a model of `transformers` is around one, by its `_init_weights(module)`, which that library calls itself.

    A tensor that is in several of them stays one. `places`: of the entire model, by `places_of`. The seed is that of
    torch's generator, as the caller has set it.

    Raises:
        ConfigError: a module has no such method, or it leaves a tensor without values.
    """
    seed = torch.initial_seed() & (1 << 62) - 1
    made: dict[Tensor, Tensor] = {}
    new: set[int] = set()
    waiting: list[tuple[nn.Module, int, Callable[[nn.Module], None]]] = []
    checked: list[_Written] = []
    for module in modules:
        own = [
            (table, key, tensor)
            for table in (cast(dict[str, Tensor | None], module._parameters), module._buffers)
            for key, tensor in table.items()
            if tensor is not None and tensor.is_meta
        ]
        number, name, init = places[id(module)]
        if init is not None and all(each.is_meta or id(each) in new for each in module.parameters()):
            waiting.append((module, number, init))  # it may write into what is further inside, too
        if not own:
            continue
        for table, key, tensor in own:
            if tensor not in made:
                made[tensor] = _without_values(tensor, f"{name}.{key}")
            table[key] = made[tensor]
            new.add(id(table[key]))
        checked += [(table, key, f"{name}.{key}", type(module).__name__, init) for table, key, _ in own]
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if init is None and reset is None:
            raise _refusal(f"{name}.{own[0][1]}", f"{type(module).__name__} has no reset_parameters()")
        if init is None:
            with randomness.kept():
                randomness.seed_all(seed, randomness.MODEL, number)
                cast(Callable[[], None], reset)()
    for module, number, init in reversed(waiting):  # the innermost first, as that library does
        with randomness.kept():
            randomness.seed_all(seed, randomness.MODEL, number)
            init(module)
    _check_written(checked)


_Written = tuple[dict[str, Tensor | None], str, str, str, Callable[[nn.Module], None] | None]
"""The table that has a tensor, its key there and name, the class of its module, and what has given it values."""


def _check_written(checked: Iterable[_Written]) -> None:
    for table, key, name, kind, init_by in checked:
        if _lacks_values(table[key]):
            by = f"reset_parameters() of {kind}" if init_by is None else "_init_weights() of the model"
            raise _refusal(name, f"{by} does not write it")


def _without_values(tensor: Tensor, name: str) -> Tensor:
    """A tensor on the CPU that shows where nothing was written."""
    if tensor.is_floating_point() or tensor.is_complex():
        empty = torch.full_like(tensor, float("nan"), device="cpu")
    elif tensor.dtype in (torch.int16, torch.int32, torch.int64):
        empty = torch.full_like(tensor, torch.iinfo(tensor.dtype).min, device="cpu")
    else:
        raise _refusal(name, f"it is of {tensor.dtype}")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _lacks_values(tensor: Tensor | None) -> bool:
    if tensor is None:
        return False
    has_nan = tensor.is_floating_point() or tensor.is_complex()
    return bool((tensor.isnan() if has_nan else tensor == torch.iinfo(tensor.dtype).min).any())


def _refusal(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"the model was made on the meta device, and nothing gives {name.lstrip('.')} its values: {why}",
        where="mh.Trainer(model=…)",
        fix="give the module that holds it a method reset_parameters() which writes it, or make the model on the CPU",
    )
