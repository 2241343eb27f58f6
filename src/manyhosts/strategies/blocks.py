"""The blocks of a model: what is compiled, cut over workers or computed again by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import getattr_static

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


def is_called(module: nn.Module) -> bool:
    """Whether `module` has a forward pass: a list, a dict, or what else only holds others, has none."""
    return getattr_static(type(module), "forward") is not nn.Module.forward or "forward" in vars(module)


def repeated_blocks(model: nn.Module) -> Blocks:
    """The outermost modules of several layers of which a list or sequence holds more than one of the same class.

    What a list holds within lists of its own counts as held by it; a module that it holds twice counts once.
    """
    return list(_repeated("", model, {}))


def _repeated(prefix: str, module: nn.Module, counts: Mapping[type, int]) -> Iterator[tuple[str, nn.Module]]:
    """Those inside `module`. `counts`: of each class, how many the lists hold that `module` is a part of."""
    is_row = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) or (prefix and not is_called(module))
    if is_row and not counts:
        members = {id(member): member for member in _members(module) if any(True for _ in member.children())}
        counts = Counter(map(_kind, members.values()))
    for name, child in module.named_children():
        if is_called(child) and counts.get(_kind(child), 0) > 1:
            yield prefix + name, child
        else:
            yield from _repeated(f"{prefix}{name}.", child, {} if is_called(child) else counts)


def _members(row: nn.Module) -> Iterator[nn.Module]:
    """What `row` holds, in place of lists and dicts what these hold."""
    for member in row.children():
        if is_called(member):
            yield member
        else:
            yield from _members(member)


def _kind(module: nn.Module) -> type:
    """The class that the user knows: that of a module whose forward pass is ours derives from it."""
    kind: type = vars(type(module)).get("plain", type(module))
    return kind


def modules_of_layers(model: nn.Module) -> Blocks:
    """The repeated blocks, and next to them the outermost modules of several layers that hold none of them."""
    return list(_of_layers("", model, {id(block) for _, block in repeated_blocks(model)}))


def _of_layers(prefix: str, module: nn.Module, blocks: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        called = any(True for _ in child.children()) and is_called(child)
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
        if not is_called(child) or (size > total / 4 and own < size / 2):
            yield from _by_size(f"{prefix}{name}.", child, total)
        elif size >= max(1, total / 100):
            yield prefix + name, child


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def named_blocks(model: nn.Module, patterns: Sequence[str], *, where: str) -> Blocks:
    """The modules that a pattern fits: a name in the model, in which `*` means one part, or a class's name.

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
