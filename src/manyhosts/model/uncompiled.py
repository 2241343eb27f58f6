"""Training that does without PyTorch's compiler, as long as nothing is compiled.

PyTorch's optimizers and dispatch modes load `torch._dynamo` only to be left out of what it compiles, and that takes
half as long as torch itself. Where it is not loaded nothing is compiled, so there is nothing to be left out of.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer, optimizer

from manyhosts.imports import when_imported

Kind = TypeVar("Kind", bound=type[Any])
COMPILER = "torch._dynamo"
_INSTEAD = "__dynamo_disable"
"""The attribute by which PyTorch remembers what it calls in place of a function that is not to be compiled."""


def _around(wrapper: Callable[..., Any] | None) -> object:
    """The code that PyTorch's `wrapper` puts around a function; that of no function, where a version has none such."""
    return object() if wrapper is None else wrapper(lambda: None).__code__


_LEFT_OUT = _around(getattr(torch, "_disable_dynamo", None))
"""Around functions that are not to be compiled."""
_STEP = _around(getattr(optimizer, "_use_grad_for_differentiable", None))
"""Around the step of an optimizer."""
_BEFORE_ALL, _AFTER_ALL = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
_marked: list[Any] = []
"""Functions that are called as they are until the compiler is loaded."""


def step_without_compiler() -> None:
    """Have optimizers of PyTorch's kinds load the compiler no more; one that is loaded is left as it is.

    Of a kind whose code is not known here, the first step loads it as ever.
    """
    if COMPILER in sys.modules:
        return
    called_as_it_is(Optimizer)
    for kind in _with_kinds_of(Optimizer):
        if getattr(step := vars(kind).get("step"), "__code__", None) is _STEP:
            kind.step = _without_compiler(step)


def called_as_it_is(kind: Kind) -> Kind:
    """`kind`, whose methods that PyTorch leaves out of what it compiles do not load the compiler for that."""
    for each in list(vars(kind).values()):
        if getattr(each, "__code__", None) is not _LEFT_OUT or COMPILER in sys.modules:
            continue
        if not _marked:
            when_imported(COMPILER, _leave_to_it)
        if each.__wrapped__ not in _marked:
            _marked.append(each.__wrapped__)
            setattr(each.__wrapped__, _INSTEAD, each.__wrapped__)
    return kind


def _with_kinds_of(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_kinds_of(each)


def _leave_to_it(_: ModuleType) -> None:
    """The compiler is loaded: all is as PyTorch has it."""
    while _marked:
        vars(_marked.pop()).pop(_INSTEAD, None)


def _without_compiler(step: Any) -> Callable[..., Any]:
    """`step` of an optimizer: what PyTorch puts around it, but for the marks that break a graph that is compiled.

    The span that a profile shows is opened where a profiler runs or a hook waits: to open one takes 8 µs.
    """

    def bare(given: Optimizer, *args: Any, **named: Any) -> Any:
        if not _marked:
            return step(given, *args, **named)
        with torch.set_grad_enabled(given.defaults["differentiable"]):
            return step.__wrapped__(given, *args, **named)

    shown = Optimizer.profile_hook_step(functools.wraps(step)(bare))

    @functools.wraps(step)
    def own(given: Optimizer, *args: Any, **named: Any) -> Any:
        hooks = given._optimizer_step_pre_hooks or given._optimizer_step_post_hooks or _BEFORE_ALL or _AFTER_ALL
        return (shown if hooks or torch._C._autograd._profiler_enabled() else bare)(given, *args, **named)

    own.hooked = True  # type: ignore[attr-defined]  # or PyTorch would put the same around it again
    return own
