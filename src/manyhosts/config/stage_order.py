"""Where a pipeline is cut, in which order a worker computes the passes of a step, and how long it waits in theory.

An order is found by playing a step through, with passes that take equally long and messages that take no time: each
worker begins the first pass in its list of choices that can begin. So it never waits for what cannot come, with any
number of micro-batches. Sources: 1F1B and interleaved stages, Narayanan et al. 2021, arXiv:2104.04473; the split
backward pass and its limits of memory (ZB-H1), Qi et al. 2023, arXiv:2401.10241.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from manyhosts.config.pipelined import GPIPE, INTERLEAVED, ZERO_BUBBLE

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"


class Pass(NamedTuple):
    """What is computed of which stage and micro-batch.

    Under `zero-bubble` a backward pass finds the gradients of what the stage was given, and `weights` those of its
    weights; under the others there is no such pass.
    """

    kind: str
    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Order:
    """The passes of a step."""

    passes: tuple[tuple[Pass, ...], ...]
    """Those of each worker, in order. Those of one kind and one stage come in the order of the micro-batches: a
    gradient is added up in that order, so its bits are those of one process."""
    bubble: float
    """The share of the step in which a worker waits."""


@lru_cache(maxsize=8)
def order_of(schedule: str, *, workers: int, virtual_stages: int, micro_batches: int) -> Order:
    """The order under `schedule`, where stage `k` is computed by worker `k % workers`."""
    played = [_Worker(schedule, each, workers, virtual_stages, micro_batches) for each in range(workers)]
    done: dict[Pass, int] = {}
    now = 0
    while any(each.waiting for each in played):
        for each in played:
            each.begin(now, done, last=workers * virtual_stages - 1)
        now += 1
    full = max(done.values())
    busy = 3 * virtual_stages * micro_batches
    return Order(tuple(tuple(each.begun) for each in played), (full - busy) / full)


@dataclass(slots=True)
class _Worker:
    """One that plays a step. A forward pass takes 1, a backward pass 2, each half of it 1."""

    schedule: str
    number: int
    workers: int
    virtual_stages: int
    micro_batches: int
    waiting: dict[str, deque[Pass]] = field(default_factory=dict)
    """What has not begun, by kind."""
    begun: list[Pass] = field(default_factory=list)
    free: int = 0
    """When the pass that it computes is through."""

    def __post_init__(self) -> None:
        stages = [self.number + self.workers * each for each in range(self.virtual_stages)]
        for kind in (FORWARD, BACKWARD, *([WEIGHTS] if self.schedule == ZERO_BUBBLE else [])):
            self.waiting[kind] = deque(
                Pass(kind, stage, number)
                for first in range(0, self.micro_batches, self.workers)  # as many at a time as there are workers
                for stage in (stages if kind == FORWARD else reversed(stages))
                for number in range(first, min(first + self.workers, self.micro_batches))
            )

    def begin(self, now: int, done: dict[Pass, int], *, last: int) -> None:
        """Begin a pass, if one can."""
        for kind in (FORWARD, BACKWARD, WEIGHTS) if self.free <= now else ():
            queue = self.waiting.get(kind)
            if queue and self._may(kind) and all(done.get(each, now + 1) <= now for each in needs(queue[0], last)):
                self.begun.append(queue.popleft())
                self.free = now + (2 if kind == BACKWARD and self.schedule != ZERO_BUBBLE else 1)
                done[self.begun[-1]] = self.free
                if not queue:
                    del self.waiting[kind]
                return

    def _may(self, kind: str) -> bool:
        """Whether there is room for one more: as many forward passes wait for their backward pass as keep the workers
        after this one busy, and for their weights as there are workers."""
        left = {each: len(self.waiting.get(each, ())) for each in (FORWARD, BACKWARD, WEIGHTS)}
        if self.schedule == GPIPE:
            return kind == FORWARD or not left[FORWARD]
        most = self.workers - self.number
        if self.schedule == INTERLEAVED:
            most = 2 * most - 1 + (self.virtual_stages - 1) * self.workers
        room = left[BACKWARD] - left[FORWARD] < most
        return kind != FORWARD or (
            room and (self.schedule != ZERO_BUBBLE or left[WEIGHTS] - left[FORWARD] < self.workers)
        )


def needs(one: Pass, last: int) -> list[Pass]:
    """What must be through before `one` can begin. `last`: the number of the last stage."""
    kind, stage, number = one
    if kind == FORWARD:
        return [Pass(FORWARD, stage - 1, number)] if stage else []
    if kind == WEIGHTS:
        return [Pass(BACKWARD, stage, number)]
    return [Pass(FORWARD, stage, number), *([Pass(BACKWARD, stage + 1, number)] if stage < last else [])]


def most_held(passes: Sequence[Pass]) -> int:
    """Of so many forward passes a worker keeps the activations at once, where it computes `passes` in turn."""
    last = WEIGHTS if any(each.kind == WEIGHTS for each in passes) else BACKWARD
    under_way = accumulate((each.kind == FORWARD) - (each.kind == last) for each in passes)
    return max(under_way, default=0)


def seconds_of(order: Order, cost: Callable[[Pass], float], message: float = 0.0) -> float:
    """What a step takes whose passes take what `cost` says, and what they give the next stage so long to come there."""
    done: dict[Pass, float] = {}
    free = [0.0] * len(order.passes)
    waiting = [deque(each) for each in order.passes]
    last = max(each.stage for own in order.passes for each in own)
    while any(waiting):
        for worker, own in enumerate(waiting):
            while own and all(each in done for each in needs(own[0], last)):
                one = own.popleft()
                there = (done[each] + message * (each.stage != one.stage) for each in needs(one, last))
                free[worker] = done[one] = max(free[worker], *there, 0.0) + cost(one)
    return max(free)


def stage_costs(order: Order, forward: Sequence[float], backward: Sequence[float]) -> Callable[[Pass], float]:
    """What passes of stages take, by what the forward and the backward pass of each stage take.

    Where gradients of weights have a pass of their own, it takes half a backward pass; the first stage, which finds no
    gradient of what it is given, has them at once.
    """
    has_halves = any(each.kind == WEIGHTS for own in order.passes for each in own)

    def cost(one: Pass) -> float:
        if one.kind == FORWARD:
            return forward[one.stage]
        share = 1.0 if not has_halves else (one.kind == BACKWARD) * 1.0 if one.stage == 0 else 0.5
        return share * backward[one.stage]

    return cost


def even_cuts(blocks: int, stages: int) -> list[int]:
    """The first block of each stage, and the number of blocks: equally many for each, as far as integers allow."""
    return [stage * blocks // stages for stage in range(stages + 1)]


def best_cuts(costs: list[float], stages: int) -> list[int]:
    """The same where the slowest stage is as fast as it can be, by the cost of each block.

    Found by dynamic programming over (blocks, stages). Of several such cuts it is the one whose last stages begin
    earliest.
    """
    blocks = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    slowest = [sums[end] for end in range(blocks + 1)]  # of the first blocks in one stage
    begins: list[list[int]] = []
    for stage in range(1, stages):
        found, chosen = [float("inf")] * (blocks + 1), [0] * (blocks + 1)
        for end in range(stage + 1, blocks + 1):
            for begin in range(stage, end):
                worst = max(slowest[begin], sums[end] - sums[begin])
                if worst < found[end]:
                    found[end], chosen[end] = worst, begin
        slowest = found
        begins.append(chosen)
    cuts = [blocks]
    for chosen in reversed(begins):
        cuts.append(chosen[cuts[-1]])
    return [0, *reversed(cuts)]


def loads(costs: list[float], cuts: list[int]) -> list[float]:
    """The cost of each stage."""
    return [sum(costs[begin:end]) for begin, end in pairwise(cuts)]
