"""A model as a chain of blocks, of which each takes what the one before it gives; and the run of some of them.

Two kinds of models are one. An `nn.Sequential`, in which others are opened. And a model of which one `nn.ModuleList` is
called block by block: what its `forward` does before the first block belongs to the first stage, what it does after
the last one to the last. A stage that is not the first runs that `forward`, too, but on the meta device until its own
first block is called: values are computed nowhere twice, and shapes are known. `look.prove` has seen that this gives
the bits of the plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from manyhosts.errors import ConfigError

Lent = Callable[[], AbstractContextManager[Any]]
"""Within, weights that another stage owns have their values in the model."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The blocks of a model, in the order in which it calls them."""

    blocks: list[tuple[str, nn.Module]]
    """With their names in the model."""
    is_trunk: bool
    """Whether the model does more than to call one after the other."""

    @property
    def names(self) -> list[str]:
        """Those of the blocks."""
        return [name for name, _ in self.blocks]


def find_chain(model: nn.Module) -> Chain:
    """The blocks of `model`.

    Raises:
        ConfigError: it has none.
    """
    if _is_plain_sequence(model):
        return Chain(list(_opened("", model)), is_trunk=False)
    trunks = [(name, each) for name, each in model.named_children() if isinstance(each, nn.ModuleList) and len(each)]
    if len(trunks) == 1:
        [(name, trunk)] = trunks
        if len({id(block) for block in trunk}) < len(trunk):
            raise ConfigError(
                f"{name!r} holds a block twice, and stages could not tell its calls from each other",
                where="strategy='pipeline'",
                fix="write the model as nn.Sequential, which may hold a block at several places",
            )
        return Chain([(f"{name}.{number}", block) for number, block in enumerate(trunk)], is_trunk=True)
    kind = type(model).__name__
    has = "several nn.ModuleLists" if trunks else "no nn.ModuleList"
    raise ConfigError(
        f"the model is a {kind}, which is no nn.Sequential and has {has} of its own, so its blocks are not known",
        where="strategy='pipeline'",
        fix="write it as nn.Sequential(first, block, …, last), each of which takes what the one before it gives; or "
        "with one nn.ModuleList whose blocks are called so in turn; or choose another strategy",
    )


def block_bytes(model: nn.Module) -> tuple[int, ...]:
    """Of the parameters of each block, those of an earlier one left out; what no block has counts as the first one's.

    Raises:
        ConfigError: the model has no blocks.
    """
    left = {id(each): each.nbytes for each in model.parameters()}
    sizes = [sum(left.pop(id(each), 0) for each in block.parameters()) for _, block in find_chain(model).blocks]
    return (sizes[0] + sum(left.values()), *sizes[1:])


def _is_plain_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _opened(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():  # and not `named_children`, which knows a block once
        inner = f"{path}.{name}" if path else name
        assert child is not None, f"{inner} is in an nn.Sequential that was called"
        hooks = child._forward_hooks or child._forward_pre_hooks or child._backward_hooks
        if _is_plain_sequence(child) and child._modules and not hooks:
            yield from _opened(inner, child)
        else:
            yield inner, child


class _Reached(BaseException):
    """The first block of the next stage was called. No error, so no `except Exception` of a model takes it for one."""

    def __init__(self, value: Any) -> None:
        super().__init__("the first block of the next stage was called")
        self.value = value


def run(model: nn.Module, chain: Chain, begin: int, end: int, value: Any, received: Any, lent: Lent) -> Any:
    """What the blocks from `begin` to `end` give; from the last one, what the model gives.

    `value`: what the model is called with; `received`: what the block before `begin` gave, where that is not the first.
    """
    if not chain.is_trunk:
        with lent():
            found = received if begin else value
            for _, block in chain.blocks[begin:end]:
                found = block(found)
            return found
    with _calls_of(chain, begin, end, received, lent):
        try:
            if begin:
                return type(model).forward(model, to_meta(value))
            with lent():
                return type(model).forward(model, value)
        except _Reached as reached:
            return reached.value


@contextmanager
def _calls_of(chain: Chain, begin: int, end: int, received: Any, lent: Lent) -> Iterator[None]:
    """Within, blocks before `begin` give what they take, `begin` takes what was received, `end` ends the run."""
    blocks = [block for _, block in chain.blocks]
    replaced = [*range(begin + 1 if begin else 0), *([end] if end < len(blocks) else [])]
    values: AbstractContextManager[Any] = nullcontext()

    def passes_on(given: Any, *_: Any, **__: Any) -> Any:
        return given

    def ends(given: Any, *_: Any, **__: Any) -> Any:
        raise _Reached(given)

    def takes(_: Any, *further: Any, **named: Any) -> Any:
        nonlocal values
        values = lent()  # from here on this stage computes with values
        values.__enter__()
        return first(received, *further, **named)

    first = blocks[begin].forward
    before = {number: blocks[number].__dict__.get("forward") for number in replaced}
    for number in replaced:
        own = ends if number == end else takes if number == begin else passes_on
        blocks[number].__dict__["forward"] = own
    try:
        yield
    finally:
        values.__exit__(None, None, None)
        for number, kept in before.items():
            if kept is None:
                del blocks[number].__dict__["forward"]
            else:
                blocks[number].__dict__["forward"] = kept


def to_meta(value: Any) -> Any:
    """`value` with tensors that have shapes and no values."""
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    if isinstance(value, Mapping):
        return {key: to_meta(each) for key, each in value.items()}
    return type(value)(to_meta(each) for each in value) if type(value) in (list, tuple) else value
