"""Which modules of a model are gathered and let go of together.

A unit is as much of the model as a worker has in full at one moment, and as one message carries: a block. What no
unit holds (embeddings, the last layer) is a unit of its own, the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from manyhosts.errors import ConfigError
from manyhosts.strategies.blocks import blocks_of, is_called

Units = dict[str, nn.Module]
"""By name, none inside another, in the order of the model."""


def is_uncut(parameter: Tensor) -> bool:
    """Whether each worker keeps all of it: a single number without dims, such as a learned temperature."""
    return parameter.dim() == 0


def has_parts(module: nn.Module) -> bool:
    """Whether there is anything in `module` that is cut."""
    return not all(map(is_uncut, module.parameters()))


def find_units(model: nn.Module, patterns: Sequence[str]) -> Units:
    """The units of `model`: those that `patterns` name, or else its blocks.

    None where it cannot be cut at modules: then all of it is the rest.

    Raises:
        ConfigError: what was named is never called, has no parameters, or shares one with what is outside it; or the
            model has nothing that could be cut.
    """
    if not has_parts(model):
        raise ConfigError(
            f"every parameter of the model, a {type(model).__name__}, is a single number, and has no parts",
            where="strategy='fsdp'",
            fix="choose strategy='ddp'",
        )
    units: Units = {}
    for name, module in blocks_of(model, patterns, where="FSDP(units=…)"):
        if any(name.startswith(f"{outer}.") for outer in units):
            continue
        if not is_called(module):  # one that a pattern names
            raise ConfigError(
                f"the unit {name!r} is a {type(module).__name__}, which is never called itself",
                where="FSDP(units=…)",
                fix=f"name what is in it: units=[{name + '.*'!r}]"
                if any(True for _ in module.children())
                else "name the module that computes with it, or leave it out: what no unit holds is one of its own",
            )
        if has_parts(module):
            units[name] = module
    if patterns and not units:
        raise ConfigError(
            f"the units {', '.join(patterns)} have no parameters",
            where="FSDP(units=…)",
            fix="name modules that have some, or leave units out",
        )
    shared = _shared(model, units)
    if patterns and shared:
        unit, parameter = next(iter(shared.items()))
        raise ConfigError(
            f"the unit {unit!r} has the parameter {parameter!r}, which a module outside it has, too",
            where="FSDP(units=…)",
            fix="name a unit that holds both, or leave that one out: what no unit holds is one of its own",
        )
    return {name: unit for name, unit in units.items() if name not in shared}


def unit_bytes(model: nn.Module, patterns: Sequence[str] = (), *, total: int) -> tuple[int, ...]:
    """Of the parameters of each unit, in order; last of what no unit holds of `total`. Empty: nothing can be cut."""
    try:
        units = find_units(model, patterns)
    except ConfigError:
        return ()
    blocks = [sum(each.nbytes for each in unit.parameters()) for unit in units.values()]
    return (*blocks, total - sum(blocks)) if sum(blocks) <= total else ()


def tail_bytes(model: nn.Module, patterns: Sequence[str] = ()) -> int:
    """Of the parameters that are after the last unit of `model`, or are also used there; 0 where there are none."""
    try:
        units = find_units(model, patterns)
    except ConfigError:
        return 0
    inside = {id(each) for unit in units.values() for each in unit.parameters()}
    named = list(model.named_parameters(remove_duplicate=False))
    ends = max((place for place, (_, each) in enumerate(named) if id(each) in inside), default=len(named))
    return sum({id(each): each.nbytes for _, each in named[ends + 1 :]}.values())


def _shared(model: nn.Module, units: Units) -> dict[str, str]:
    """The units of which a parameter also is outside, with its name inside."""
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not is_uncut(parameter):
            places.setdefault(id(parameter), []).append(name)
    found = {}
    for unit in units:
        for names in places.values():
            inside = [name.startswith(f"{unit}.") for name in names]
            if any(inside) and not all(inside):
                found[unit] = names[inside.index(True)]
    return found
