"""What a dataset, a loss or a model can draw from or count with: generators, and plain values that reading changes."""

from __future__ import annotations

import random
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from manyhosts.prove.in_worker.sketch import digest_of_sample

_DEPTH = 4
_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")


def states_within(*roots: Any) -> dict[str, str]:
    """Name → state of every generator, and of every number, word and tensor, that can be reached from `roots`.

    Followed are attributes, lists, tuples and mappings, closures, and the global names of functions and of the methods
    of classes.
    """
    found: dict[str, str] = {}
    seen: set[int] = set()
    for root in roots:
        _walk(root, getattr(root, "__name__", None) or type(root).__name__, 0, found, seen)
    return found


def global_states() -> dict[str, str]:
    """The same of the generators that belong to everybody: mh.Trainer gives them an address."""
    return {
        "torch.rand": digest_of_sample([torch.get_rng_state()]),
        "numpy.random": _numpy_state(np.random.mtrand._rand),
        "random": str(hash(random.getstate())),
    }


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The names whose state is another now; generators first."""
    names = [name for name, state in after.items() if name in before and before[name] != state]
    return sorted(names, key=lambda name: (not name.startswith("generator "), name))


@contextmanager
def stopped_clock() -> Iterator[None]:
    """Within, the functions of the module `time` say the same whenever they are asked."""
    kept = {name: getattr(time, name) for name in _CLOCKS}
    try:
        for name, clock in kept.items():
            setattr(time, name, partial(_always, clock()))
        yield
    finally:
        for name, clock in kept.items():
            setattr(time, name, clock)


def _numpy_state(generator: np.random.RandomState) -> str:
    _, words, place, *_ = generator.get_state(legacy=True)
    return f"{digest_of_sample([words])} {place}"


def _always(value: Any) -> Any:
    return value


def _walk(thing: Any, name: str, depth: int, found: dict[str, str], seen: set[int]) -> None:
    if id(thing) in seen or depth > _DEPTH:
        return
    if isinstance(thing, bool | int | float | str | bytes | type(None)):
        found[name] = repr(thing)[:200]
        return
    seen.add(id(thing))
    if (state := _state(thing)) is not None:
        found[f"generator {name}"] = state
    elif isinstance(thing, torch.Tensor | np.ndarray):
        if thing.nbytes <= 1 << 20:
            found[name] = digest_of_sample([thing])
    else:
        for inner, value in _inside(thing):
            _walk(value, inner.format(name), depth + 1, found, seen)


def _state(thing: Any) -> str | None:
    """The state of a generator of torch, NumPy or Python; None for anything else."""
    if isinstance(thing, torch.Generator):
        return digest_of_sample([thing.get_state()])
    if isinstance(thing, np.random.Generator):
        return repr(thing.bit_generator.state)
    if isinstance(thing, np.random.RandomState):
        return _numpy_state(thing)
    if isinstance(thing, random.Random):
        return str(hash(thing.getstate()))
    return None


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    """What `thing` holds, each with its name; `{}` in it means that of `thing`."""
    if isinstance(thing, types.FunctionType):
        yield from ((f"{{}}: {name}", value) for name, value in _used_by(thing))
        return
    if isinstance(thing, types.MethodType):
        yield from (("{}", thing.__self__), ("{}", thing.__func__))
        return
    if isinstance(thing, types.ModuleType | type):
        return
    if isinstance(thing, dict):
        yield from ((f"{{}}[{key!r}]", value) for key, value in list(thing.items())[:50] if isinstance(key, str))
        return
    if isinstance(thing, list | tuple):
        yield from ((f"{{}}[{number}]", value) for number, value in enumerate(thing[:50]))
        return
    yield from _of_object(thing)


def _of_object(thing: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object and of its class, its modules, and what its methods use from outside."""
    skipped = ("_parameters", "_buffers", "_modules", "training") if isinstance(thing, torch.nn.Module) else ()
    own = type(thing).__module__.partition(".")[0] not in ("torch", "manyhosts", "builtins", "numpy")
    if own:
        plain = (bool, int, float, str)
        yield from ((f"{{}}.{name}", value) for name, value in vars(type(thing)).items() if isinstance(value, plain))
    yield from (
        (f"{{}}.{name}", value) for name, value in list(getattr(thing, "__dict__", {}).items()) if name not in skipped
    )
    if isinstance(thing, torch.nn.Module):
        yield from ((f"{{}}.{name}", value) for name, value in thing.named_children())
    if own:
        for method in vars(type(thing)).values():
            if isinstance(method, types.FunctionType):
                yield from ((name, value) for name, value in _used_by(method))


def _used_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The names from outside that a function uses, with what they are."""
    for name in function.__code__.co_names:
        if name in function.__globals__ and not isinstance(function.__globals__[name], types.ModuleType):
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not yet filled
