"""The optimizer's step: how long it takes, and what it keeps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from manyhosts import device
from manyhosts.measure.in_worker.passes import Passes
from manyhosts.model.sizing import HeldBytes
from manyhosts.training.setup.build import Components

_FEWEST, _MOST = 3, 20


def measure(
    components: Components, passes: Passes, *, clip: float | None, samples: int, seconds: float
) -> tuple[float, int, int]:
    """Seconds of clipping and of the optimizer's step, the bytes that it keeps then, and those that it takes meanwhile.

    Steps are really made, with one gradient and a learning rate of zero: no weight changes. What the optimizer keeps of
    them is forgotten.
    """
    passes.once(samples)
    rates = [group["lr"] for group in components.optimizer.param_groups]
    for group, rate in zip(components.optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    _update(components, clip)  # makes what the optimizer keeps
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < _FEWEST or (len(times) < _MOST and time.perf_counter() < until):
        device.wait_for(components.world.device)
        begin = time.perf_counter()
        _update(components, clip)
        device.wait_for(components.world.device)
        times.append(time.perf_counter() - begin)
    passing = _passing_bytes(components, clip)
    kept = _kept_bytes(components)
    for group, rate in zip(components.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    components.optimizer.state.clear()
    return statistics.median(times), kept, passing


def _update(components: Components, clip: float | None) -> None:
    if clip is not None:
        components.precision.unscale(components.optimizer)
        components.strategy.clip_gradients(components.trained, clip)
    components.precision.stepper(components.optimizer).step()


def _passing_bytes(components: Components, clip: float | None) -> int:
    """What one more update holds at most in addition to all that is there before."""
    where = components.world.device
    if not device.is_asynchronous(where):
        watched = HeldBytes()
        with watched:
            watched.leave_out(_tensors(components))
            _update(components, clip)
        return watched.most
    memory = device.module(where)
    device.wait_for(where)
    memory.reset_peak_memory_stats(where)
    before = memory.memory_allocated(where)
    _update(components, clip)
    device.wait_for(where)
    return max(0, memory.max_memory_allocated(where) - before)


def _tensors(components: Components) -> Iterator[Tensor]:
    """All that is there between two steps."""
    for each in components.trained.parameters():
        yield each
        if each.grad is not None:
            yield each.grad
    yield from (each for each in tree_leaves([*components.optimizer.state.values()]) if isinstance(each, Tensor))


def _kept_bytes(components: Components) -> int:
    """What the optimizer keeps of its parameters: each piece of memory once."""
    kept: dict[int, int] = {}
    for values in components.optimizer.state.values():
        for value in values.values() if isinstance(values, dict) else ():
            if isinstance(value, Tensor):
                kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(kept.values())
