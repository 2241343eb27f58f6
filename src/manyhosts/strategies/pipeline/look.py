"""A look at a model before it is cut, on a copy: what its blocks use and take, and that stages compute its bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.data import randomness
from manyhosts.errors import ConfigError
from manyhosts.strategies.cut_model import copy_of
from manyhosts.strategies.pipeline.chain import Chain, find_chain, run
from manyhosts.strategies.pipeline.messages import flat, put_together
from manyhosts.strategies.pipeline.owners import leave, put_in, tied_of, uses_by_blocks
from manyhosts.strategies.uses import Uses, tensors_in

Context = Callable[[], AbstractContextManager[Any]]
_ROUNDS = 3
"""How often each block is timed. The fastest counts."""


@dataclass(slots=True)
class Seen:
    """What a look has found, in plain values that travel."""

    uses: dict[str, list[int]]
    """Name of a tensor → the numbers of the blocks that use it; what comes before the first one counts as that, what
    comes after the last one as the last."""
    seconds: list[float] = field(default_factory=list)
    """What each block takes, forward and backward; empty where that was not asked for."""


class _Uses(Uses):
    """Notes which tensors are given to functions, and by which block."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__(names)
        self.block = 0
        self.found: dict[str, set[int]] = {}

    def note(self, name: str, tensor: Tensor) -> None:
        """By the block that computes."""
        self.found.setdefault(name, set()).add(self.block)


def look(model: nn.Module, chain: Chain, inputs: Any, context: Context, *, timed: bool) -> Seen:
    """See what the blocks of `model` use, on a copy of it; and what each takes, where that is `timed`.

    Raises:
        ConfigError: they are no chain: the model calls them in another order, or gives one what the one before it does
            not give.
    """
    copied = copy_of(model).train()
    blocks = [block for _, block in find_chain(copied).blocks]
    named = [*copied.named_parameters(), *copied.named_buffers()]
    uses = _Uses({id(each): name for name, each in named})
    with randomness.undisturbed(), _in_order(blocks, chain, uses), context(), uses:
        randomness.seed_compute(0, randomness.COMPUTE)
        copied(inputs)
    inside = uses_by_blocks(copied, blocks)
    seen = Seen({name: sorted(uses.found.get(name, set()).union(numbers)) for name, numbers in inside.items()})
    if timed:
        seen.seconds = _seconds(copy_of(model).train(), chain, inputs, context)
    return seen


@contextmanager
def _in_order(blocks: Sequence[nn.Module], chain: Chain, uses: _Uses) -> Iterator[None]:
    """Within, each block is called once, in turn, with what the one before it gave.

    Raises:
        ConfigError: not so.
    """
    given: list[Any] = []

    def before(module: nn.Module, args: Any, named: Any) -> None:
        number = len(given)
        name = chain.names[number] if number < len(blocks) else chain.names[-1]
        if number >= len(blocks) or blocks[number] is not module:
            raise _no_chain(f"the model does not call {name!r} once, after the block before it")
        if len(args) != 1 or any(True for _ in tensors_in(named)):
            raise _no_chain(f"the block {name!r} is given more than what the one before it gives")
        if given and args[0] is not given[-1]:
            raise _no_chain(f"the block {name!r} is not given what the one before it gives, but something made of it")
        uses.block = number

    def after(module: nn.Module, args: Any, named: Any, output: Any) -> None:
        given.append(output)

    hooks = []
    for block in {id(each): each for each in blocks}.values():
        hooks.append(block.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(block.register_forward_hook(after, with_kwargs=True))
    try:
        yield
        if len(given) != len(blocks):
            raise _no_chain(f"the model has called {len(given)} of its {len(blocks)} blocks")
    finally:
        for hook in hooks:
            hook.remove()


def _no_chain(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, so the model cannot be cut between its blocks",
        where="strategy='pipeline'",
        fix="let each block take one value, just what the one before it gave, and give all that the next ones need "
        "(a tuple, say, with what is skipped to a later block); or choose another strategy",
    )


def _seconds(model: nn.Module, chain: Chain, inputs: Any, context: Context) -> list[float]:
    """What each block takes, forward and backward, with what the one before it gave. The rest counts as its ends do."""
    own = Chain(find_chain(model).blocks, chain.is_trunk)
    count = len(own.blocks)
    best = [float("inf")] * count
    with randomness.undisturbed():
        for _ in range(_ROUNDS):
            value: Any = None
            for number in range(count):
                begin = time.perf_counter()
                with context():
                    outputs = run(model, own, number, number + 1, inputs, value, nullcontext)
                given = flat(outputs)
                roots = [each for each in given.tensors if each.requires_grad]
                torch.autograd.backward(roots, [torch.zeros_like(each) for each in roots])
                best[number] = min(best[number], time.perf_counter() - begin)
                leaves = [each.detach().requires_grad_(each.requires_grad) for each in given.tensors]
                value = put_together(given.shape, leaves)
    return best


@torch.no_grad()
def prove(
    model: nn.Module, stages: Mapping[str, Sequence[int]], cuts: Sequence[int], inputs: Any, context: Context
) -> None:
    """See that stages, one after another and each with its own tensors alone, compute the bits of `model`.

    Raises:
        ConfigError: they do not, or one needs what it has not.
    """
    with randomness.undisturbed():
        with context():
            randomness.seed_compute(0, randomness.COMPUTE)
            wanted = copy_of(model).train()(inputs)
        randomness.seed_compute(0, randomness.COMPUTE)
        value: Any = None
        for stage in range(len(cuts) - 1):
            copied = copy_of(model).train()
            uncut = dict(copied.named_parameters())
            leave(copied, stages, [stage])
            tied = tied_of(copied, stages, stage)
            lent = {each.name: uncut[each.name] for each in tied if each.stages[0] != stage}
            own = find_chain(copied)
            try:
                with context():
                    values = lambda tied=tied, lent=lent: put_in(tied, lent)  # noqa: E731
                    value = run(copied, own, cuts[stage], cuts[stage + 1], inputs, value, values)
                flat(value)
            except (RuntimeError, NotImplementedError, TypeError, ValueError) as cause:
                raise _not_alike(
                    f"what stage {stage} computes needs something of another: "
                    + (str(cause).splitlines() or [type(cause).__name__])[0]
                ) from cause
    if not _equal(wanted, value):
        raise _not_alike("stages do not compute what the entire model computes")


def _not_alike(what: str) -> ConfigError:
    return ConfigError(
        what,
        where="strategy='pipeline'",
        fix="let each block take just what the one before it gives, use nothing of before the first block after the "
        "last one, and keep nothing outside of blocks; or write the model as nn.Sequential; or choose another strategy",
    )


def _equal(one: Any, other: Any) -> bool:
    ours, theirs = flat(one), flat(other)
    return ours.shape == theirs.shape and all(
        not there.is_meta and here.dtype == there.dtype and here.shape == there.shape and same_bits(here, there)
        for here, there in zip(ours.tensors, theirs.tensors, strict=True)
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are equal; what is no number equals itself."""
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if one.is_floating_point() else torch.equal(one, other)
