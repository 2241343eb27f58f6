"""What `compression="auto"` stands for: times the first steps, probes the network, and says how gradients travel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from torch import nn

from manyhosts import device
from manyhosts.communication.compression.choose import BY_LOSS, Choice, choose, cost_of
from manyhosts.communication.nodes import find_levels
from manyhosts.communication.probe import probe
from manyhosts.communication.world import World
from manyhosts.config.strategies import DDP

TIMED_STEPS = 4
"""Steps that are timed; before them one that warms everything up and is not."""


class Stopwatch:
    """Times what this worker computes in a step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.times: list[tuple[float, float]] = []
        """Of each step: seconds in all, and those of them in which gradients were on their way."""

    @property
    def enough(self) -> bool:
        """Whether the steps that were timed suffice."""
        return len(self.times) > TIMED_STEPS

    def begin(self) -> None:
        """A step begins."""
        self._began = self._now()

    def backward(self) -> None:
        """The last backward pass begins."""
        self._backward = self._now()

    def computed(self) -> None:
        """Everything is computed; waiting begins."""
        now = self._now()
        self.times.append((now - self._began, now - self._backward))

    def _now(self) -> float:
        device.wait_for(self.world.device)  # in these few steps only
        return time.perf_counter()

    def decide(self, config: DDP, parameters: Sequence[nn.Parameter], *, bucket_bytes: int) -> Choice:
        """The compression to continue with, the same on every worker. All workers call it together."""
        world = self.world
        network = probe(world)
        timed = self.times[1:]
        compute_s = world.agree(statistics.median(total for total, _ in timed))
        hidden_s = world.agree(statistics.median(hidden for _, hidden in timed))
        levels = find_levels(world)
        each = 1 if levels is None else len(levels.nodes[0])
        costs = {
            name: cost_of(
                name, config, parameters, rank=world.rank, size=world.size, bucket_bytes=bucket_bytes, each=each
            )
            for name in BY_LOSS
        }
        choice = choose(costs, network, compute_s=compute_s, hidden_s=hidden_s)
        name = BY_LOSS[int(world.agree(BY_LOSS.index(choice.name)))]
        return Choice(name, choice.step_seconds, choice.network)
