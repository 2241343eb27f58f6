"""What a worker does more where it holds parts of the model: units put together and split again, and small updates.

The strategy itself is rehearsed, on this worker alone: `mirror`. The model is in parts afterwards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhosts.communication.collectives import Work
from manyhosts.communication.shared_norm import OwnBatch, acting
from manyhosts.communication.world import World
from manyhosts.config.strategies import cutting
from manyhosts.measure.in_worker.passes import Passes
from manyhosts.planner.measured import InParts
from manyhosts.strategies.fsdp.strategy import FullySharded
from manyhosts.strategies.strategy import Piece, Strategy

_WORKERS = 2
"""Of which one is rehearsed."""
_FEWEST, _MOST = 4, 25
_WARM = 2
"""Steps before the clock begins: in the first one units are found, and memory is got."""


def measure(timed: Passes, *, samples: int, update_s: float, seconds: float) -> InParts:
    """Take about `seconds` for steps of `samples` samples, uncut and in parts. `update_s`: of the entire model.

    Raises:
        ConfigError: this model cannot be kept in parts.
    """
    components, batch = timed.components, timed.batches.of(samples)
    piece = Piece(bring=lambda: batch, samples=samples, weight=1.0, address=(0, 0, 0))

    def passes(strategy: Strategy) -> Callable[[], object]:
        return lambda: strategy.forward_backward(
            components.trained, [piece], components.compute, components.precision.scale, []
        )

    asked, each = components.settings.strategy, seconds / 3
    config = replace(cutting(asked)[-1], shard=None)
    [uncut] = _medians([passes(components.strategy)], each)
    before = dict(components.trained.named_parameters())
    for parameter in before.values():
        parameter.grad = None
    with mirrored(components.world, _WORKERS) as world:
        cut = FullySharded(config, world)
        cut.place(components.trained)
        _exchange_parameters(components.optimizer, before, dict(components.trained.named_parameters()))
        # As steps follow each other: after an update the passes find other things in the processor's caches.
        step = [passes(cut), lambda: cut.update(components.trained, components.precision.stepper(components.optimizer))]
        gathered_twice, _ = _medians(step, each)
        for root in cut.roots:
            root.set_reshard_after_forward(False)  # as with zero=2
        gathered_once, updated = _medians(step, each)
    return InParts(
        passes_s=max(0.0, gathered_once - uncut),
        regather_s=max(0.0, gathered_twice - gathered_once),
        update_s=max(0.0, updated - update_s / _WORKERS),
    )


def _exchange_parameters(optimizer: Optimizer, uncut: dict[str, nn.Parameter], cut: dict[str, nn.Parameter]) -> None:
    """Let it step the parts, by a rate of zero, and know nothing of the full model."""
    names = {id(parameter): name for name, parameter in uncut.items()}
    for group in optimizer.param_groups:
        group["params"] = [cut[names[id(parameter)]] for parameter in group["params"]]
        group["lr"] = group["lr"] * 0.0
    optimizer.state.clear()


def _medians(acts: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Seconds of each of `acts`, which follow each other, as often as there is time for."""
    times: list[list[float]] = []
    until = 0.0
    with acting(OwnBatch()):
        while len(times) < _WARM + _FEWEST or (len(times) < _WARM + _MOST and time.perf_counter() < until):
            if len(times) == _WARM:
                until = time.perf_counter() + seconds
            clock = [time.perf_counter()]
            for act in acts:
                act()
                clock.append(time.perf_counter())
            times.append([end - begin for begin, end in pairwise(clock)])
    return [statistics.median(each) for each in zip(*times[_WARM:], strict=True)]


class Mirror(World):
    """`size` workers, of which this is the first; made by `mirrored`."""

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Sum what all of them would have."""
        tensor.mul_(self.size)
        return super().start_all_reduce(tensor)

    def all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, confirmed: bool = True
    ) -> Tensor:
        """The same, and wait for it; of another `op` than a sum it is what this worker has."""
        if op == dist.ReduceOp.SUM:
            tensor.mul_(self.size)
        return super().all_reduce(tensor, op, confirmed=confirmed)


@contextmanager
def mirrored(world: World, size: int) -> Iterator[World]:
    """Within, `world`, which has one worker, as one of `size`, each on a machine of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield Mirror(replace(world.place, rank=0, size=size), backend="gloo")
    finally:
        dist.destroy_process_group()
