"""Forward and backward passes over micro-batches of several sizes, timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from manyhosts import device
from manyhosts.communication.shared_norm import OwnBatch, acting
from manyhosts.measure.in_worker.batches import Batches
from manyhosts.model.sizing import HeldBytes, gradients_let_go
from manyhosts.planner.measured import Compute
from manyhosts.strategies.strategy import Piece
from manyhosts.training.setup.build import Components

_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 25
_BLOCK_S = 0.2
"""Passes of one size follow each other for so long: memory is reused then as it is from step to step."""
_MOST_IN_BLOCK = 12
_LARGEST_SHARE = 0.3
"""Of the time that there is; a size of which one pass takes longer is left out."""


class Passes:
    """Computes as a step does, with no other worker and no update."""

    def __init__(self, components: Components, batches: Batches) -> None:
        self.components, self.batches, self.device = components, batches, components.world.device

    def loss(self, samples: int) -> Tensor:
        """Of one forward pass, as it is given to the backward pass."""
        batch = self.batches.of(samples)
        piece = Piece(bring=lambda: batch, samples=samples, weight=1.0, address=(0, 0, 0))
        return self.components.precision.scale(self.components.compute(self.components.trained, piece)["loss"])

    def once(self, samples: int) -> tuple[float, float]:
        """Seconds of a forward pass and of a backward pass."""
        for parameter in self.components.trained.parameters():
            parameter.grad = None
        with acting(OwnBatch()):
            begin = self._now()
            loss = self.loss(samples)
            between = self._now()
            loss.backward()
            end = self._now()
        return between - begin, end - between

    def saved(self, samples: int) -> tuple[int, int]:
        """Bytes of activations, and those that the backward pass holds at most in addition to them."""
        with acting(OwnBatch()):
            return of_pass(lambda: self.loss(samples), self.components.trained)

    def _now(self) -> float:
        device.wait_for(self.device)
        return time.perf_counter()

    def several(self, samples: int) -> list[tuple[float, float]]:
        """Of one size, one pass after another; the first, which warms memory up, is left out where they are short."""
        first = self.once(samples)
        count = min(_MOST_IN_BLOCK, int(_BLOCK_S / max(sum(first), 1e-6)))
        return [self.once(samples) for _ in range(count)] or [first]


def sizes(batch: int, micro_batch: int | None, workers: Iterable[int], virtual_workers: int | None) -> list[int]:
    """Samples of the forward passes that these numbers of workers have; then powers of two, the largest first."""
    most = min(batch, micro_batch or batch)
    if virtual_workers is not None:
        most = min(most, -(-batch // virtual_workers))
    asked = {min(most, -(-batch // count)) for count in workers}
    powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return list(dict.fromkeys([*sorted(asked, reverse=True), *reversed(powers)]))


def measure(passes: Passes, asked: Sequence[int], seconds: float) -> tuple[Compute, ...]:
    """Time passes of each size in `asked`, as far as `seconds` allow for; what is first is timed most."""
    until = time.perf_counter() + seconds
    tried = _tried(passes, asked, _LARGEST_SHARE * seconds)
    repeated = [size for size in asked if size in tried]
    while len(repeated) > 2 and sum(_seconds(tried[size]) for size in repeated) > until - time.perf_counter():
        repeated.pop()
    times: dict[int, list[tuple[float, float]]] = {size: [] for size in repeated}
    for number in range(_MOST_ROUNDS):
        if number >= _FEWEST_ROUNDS and time.perf_counter() > until:
            break
        for size, found in times.items():
            found += passes.several(size)
    return tuple(_figures(size, times.get(size, tried[size].times), tried[size].saved) for size in sorted(tried))


@dataclass(frozen=True, slots=True)
class _Tried:
    """A size that can be computed."""

    saved: tuple[int, int]
    """Bytes of activations, and those of the backward pass in addition to them."""
    times: list[tuple[float, float]]
    """Of a few passes."""


def _seconds(tried: _Tried) -> float:
    """All that it takes to time a size as often as is needed at least: passes in a row, in each round."""
    return _FEWEST_ROUNDS * max(_BLOCK_S, min(map(sum, tried.times)))


def _tried(passes: Passes, asked: Sequence[int], longest_s: float) -> dict[int, _Tried]:
    """Every size, from the smallest on until one pass would take more than `longest_s`.

    A size that cannot be computed is left out: one sample has no variance, and a large batch may not fit.

    Raises:
        Exception: no size can be computed; that of the largest.
    """
    found: dict[int, _Tried] = {}
    failed: Exception | None = None
    for size in sorted(asked):
        if found and min(map(sum, found[before := max(found)].times)) * size / before > longest_s:
            break
        try:
            passes.once(size)  # whatever is loaded and chosen at the first pass
            found[size] = _Tried(passes.saved(size), [passes.once(size) for _ in range(_FEWEST_ROUNDS)])
        except Exception as error:
            failed = error
    if failed is not None and not found:
        raise failed
    return found


def _figures(samples: int, times: Sequence[tuple[float, float]], saved: tuple[int, int]) -> Compute:
    return Compute(
        samples=samples,
        forward_s=statistics.median(forward for forward, _ in times),
        backward_s=statistics.median(backward for _, backward in times),
        spread_s=spread([forward + backward for forward, backward in times]),
        activation_bytes=saved[0],
        backward_bytes=saved[1],
    )


def spread(times: Sequence[float]) -> float:
    """The standard deviation, by the range that the middle 68 % lie in: one pass in which a neighbour was busy, which
    no run can count on, does not decide.
    """
    ordered = sorted(times)
    count = len(ordered)
    return (ordered[min(count - 1, round(0.84 * (count - 1)))] - ordered[round(0.16 * (count - 1))]) / 2


class SavedBytes:
    """Within, counts what autograd saves: each piece of memory once, and none that belongs to `excluded`.

    Parameters and buffers are saved by reference, so they are `excluded`. What a checkpoint computes again is not
    saved.
    """

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self._excluded = {_memory(tensor) for tensor in excluded}
        self._held: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
        self._hooks = saved_tensors_hooks(self._save, lambda saved: saved)

    @property
    def bytes(self) -> int:
        """So far."""
        return sum(storage.nbytes() for storage in self._held.values())

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _save(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and (place := _memory(tensor)) not in self._excluded:
            self._held[place] = tensor.untyped_storage()  # kept, so that nothing else can get its address
        return tensor.detach()  # the tensor itself would hold the graph that holds it


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def of_pass(forward: Callable[[], Tensor], module: torch.nn.Module) -> tuple[int, int]:
    """Bytes that a forward pass leaves for the backward pass, and those that this one holds at most in addition.

    Of a GPU it is one number: the peak that its allocator has seen, model and gradients left out.
    """
    where = next(module.parameters()).device
    for parameter in module.parameters():
        parameter.grad = None
    if not device.is_asynchronous(where):
        own = [*module.parameters(), *module.buffers()]
        with SavedBytes(own) as saved, HeldBytes() as watched, gradients_let_go(module):
            watched.leave_out(own)
            loss = forward()
            before = watched.most = watched.now
            loss.backward()
        return saved.bytes, watched.most - before
    device.wait_for(where)
    memory = device.module(where)
    memory.reset_peak_memory_stats(where)
    before = memory.memory_allocated(where)
    forward().backward()
    device.wait_for(where)
    gradients = sum(each.grad.nbytes for each in module.parameters() if each.grad is not None)
    return max(0, memory.max_memory_allocated(where) - before - gradients), 0
