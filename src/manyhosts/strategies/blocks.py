"""The blocks of a model: what is compiled, cut over workers or computed again by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from manyhosts.errors import ConfigError
from manyhosts.table import nearest

Blocks = list[tuple[str, nn.Module]]
"""Modules with their names in the model (as `named_modules` gives them), in its order."""


def blocks_of(model: nn.Module, named: Sequence[str] = (), *, where: str = "units") -> Blocks:
    """Those that `named` says (see `named_blocks`); else the repeated ones; else what cutting by size finds.

    Empty for a model that is one layer. `where`: the setting that holds `named`, for errors.
    """
    return named_blocks(model, named, where=where) if named else repeated_blocks(model) or blocks_by_size(model)


def repeated_blocks(model: nn.Module) -> Blocks:
    """The outermost modules of several layers of which a list or sequence holds more than one of the same class."""
    return list(_repeated("", model))


def _repeated(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    in_row = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    count = Counter(_kind(child) for child in module.children() if in_row and any(True for _ in child.children()))
    for name, child in module.named_children():
        if count[_kind(child)] > 1:
            yield prefix + name, child
        else:
            yield from _repeated(f"{prefix}{name}.", child)


def _kind(module: nn.Module) -> type:
    """The class that the user knows: that of a module whose forward pass is ours derives from it."""
    kind: type = vars(type(module)).get("plain", type(module))
    return kind


def modules_of_layers(model: nn.Module) -> Blocks:
    """The repeated blocks, and beside them the outermost modules of several layers that hold none of them."""
    return list(_of_layers("", model, {id(block) for _, block in repeated_blocks(model)}))


def _of_layers(prefix: str, module: nn.Module, blocks: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        called = any(True for _ in child.children()) and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if id(child) in blocks or (called and not any(id(each) in blocks for each in child.modules())):
            yield prefix + name, child
        else:
            yield from _of_layers(f"{prefix}{name}.", child, blocks)


def blocks_by_size(model: nn.Module) -> Blocks:
    """The outermost modules with at most a quarter of all parameters, or that cannot be cut; none below a hundredth."""
    return list(_by_size("", model, _size(model)))


def _by_size(prefix: str, module: nn.Module, total: int) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        size = _size(child)
        own = sum(parameter.numel() for parameter in child.parameters(recurse=False))
        in_row = isinstance(child, nn.ModuleList | nn.ModuleDict)  # is never called itself
        if in_row or (size > total / 4 and own < size / 2):
            yield from _by_size(f"{prefix}{name}.", child, total)
        elif size >= max(1, total / 100):
            yield prefix + name, child


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def named_blocks(model: nn.Module, patterns: Sequence[str], *, where: str) -> Blocks:
    """The modules that a pattern fits: a name in the model, in which `*` stands for one part, or a class's name.

    Raises:
        ConfigError: a pattern fits none.
    """
    modules = [(name, module) for name, module in model.named_modules() if name]
    for pattern in patterns:
        if not any(_fits(pattern, name, module) for name, module in modules):
            known = sorted({type(module).__name__ for _, module in modules} | {name for name, _ in modules})
            raise ConfigError(
                f"{pattern!r} names no module of the model",
                where=where,
                fix=f"{nearest(pattern, known)}give a name in the model (layers.*: every one in layers) or a class's",
            )
    return [each for each in modules if any(_fits(pattern, *each) for pattern in patterns)]


def _fits(pattern: str, name: str, module: nn.Module) -> bool:
    if pattern == type(module).__name__:
        return True
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))
