"""In which order a stage computes the micro-batches of a step, and how long it must wait in theory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

Pass = tuple[Literal["forward", "backward"], int]
"""What is computed, and of which micro-batch."""


def passes(kind: str, *, stage: int, stages: int, micro_batches: int) -> Iterator[Pass]:
    """Those of one stage, in order.

    Backward passes come in the order of the micro-batches under every kind: a gradient is added up in that order, so
    its bits are those of one process.
    """
    ahead = micro_batches if kind == "gpipe" else min(micro_batches, stages - 1 - stage)
    for number in range(ahead):
        yield "forward", number
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            yield "forward", ahead + number
        yield "backward", number


def bubble(stages: int, micro_batches: int) -> float:
    """The share of a step in which a stage waits, where all stages take equally long and messages take no time."""
    return (stages - 1) / (micro_batches + stages - 1)


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
