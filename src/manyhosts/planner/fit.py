"""The simplest way to train that fits into the memory of every worker, with the arithmetic in a table."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from manyhosts.config.strategies import CUTS, DDP, OF_SAME_SAMPLES, Single, Strategy, cutting, of_same_samples
from manyhosts.errors import ConfigError
from manyhosts.planner.memory import Memory, ModelBytes, uncut
from manyhosts.planner.strategies.strategy import STRATEGIES, CutStrategyModel
from manyhosts.planner.strategies.virtual import gradients_kept
from manyhosts.units import bytes_in_words

RESERVE, LEAST_RESERVE = 0.1, 64_000_000
"""Kept free in addition to what is counted, the second on a CPU alone: for allocators, which give out memory in pieces,
threads, connections and messages under way, samples that are read, and what Python loads when it is first needed."""
MOST_WORKERS = 4096
"""Up to which it is tried how many would do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to train, and what a worker holds in it."""

    strategy: Strategy
    variant: str = ""
    """What distinguishes the strategy from others of its kind: `zero=3`."""
    checkpoints: bool = False
    """Whether the model's blocks are computed again in the backward pass."""
    memory: Memory
    on_cpu: bool

    @property
    def name(self) -> str:
        """In words: `ddp, activation checkpointing`."""
        words = " ".join(filter(None, (self.strategy.name, self.variant)))
        return f"{words}{', activation checkpointing' if self.checkpoints else ''}"

    @property
    def needed(self) -> int:
        """Bytes that a worker must be able to have for it."""
        return round((1 + RESERVE) * self.memory.total) + (LEAST_RESERVE if self.on_cpu else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What decides which ways there are, and what they take."""

    model: ModelBytes
    checkpointed: int | None
    """The activations that are left when blocks are computed again; None where that cannot be, or is chosen already."""
    is_shared: bool
    """Whether there are other workers, or may be some day."""
    joins: bool = False
    """Whether this worker joins others, who have decided without it: they hold the entire model each."""
    virtual_workers: int | None = None

    def on(self, workers: int, now: int) -> Training:
        """The same, its batch shared out over `workers` and not over `now`: passes over as much less."""
        share = now / workers

        def scaled(size: int) -> int:
            return math.ceil(share * size)

        model = replace(
            self.model,
            activations=scaled(self.model.activations),
            backward=scaled(self.model.backward),
            together=self.model.together / share,
        )
        again = None if self.checkpointed is None else scaled(self.checkpointed)
        return replace(self, model=model, checkpointed=again, is_shared=True)


def ways(training: Training, workers: int) -> list[Way]:
    """Those that there are on so many workers, the simplest first; each without and with activation checkpointing."""
    model = training.model
    kinds: list[tuple[Strategy, str]] = [(DDP() if training.is_shared else Single(), "")]
    if workers > 1 and model.units and training.virtual_workers is None and not training.joins:
        kinds += [(each, each.variant) for each in cutting()]
    if workers > 1 and training.virtual_workers is None and not training.joins:
        can = {"tensor": model.divisible > 0, "pipeline": len(model.blocks) >= workers}
        kinds += [(each, each.variant) for each in of_same_samples() if can[each.name]]
    passes = [(False, model)]
    if training.checkpointed is not None:
        passes.append((True, replace(model, activations=training.checkpointed)))
    return [
        Way(
            strategy=kind,
            variant=variant,
            checkpoints=again,
            memory=_held(each, kind, training, workers),
            on_cpu=model.on_cpu,
        )
        for kind, variant in kinds
        for again, each in passes
        if not (again and kind.name in OF_SAME_SAMPLES)
    ]


def _held(model: ModelBytes, strategy: Strategy, training: Training, workers: int) -> Memory:
    if strategy.name in (*CUTS, *OF_SAME_SAMPLES):
        cut = cast(CutStrategyModel, STRATEGIES.load(strategy.name)(strategy))
        return cut.largest(model, workers)
    parts = training.virtual_workers
    kept = 0 if parts is None else gradients_kept(parts, workers) * model.gradients
    return uncut(model, workers=workers, strategy=kept)


def simplest(found: Sequence[Way], left: int) -> Way | None:
    """The first one that fits into `left` bytes of a worker; None where none does."""
    return next((each for each in found if each.needed <= left), None)


def workers_that_would_do(training: Training, now: int, left: int) -> int | None:
    """The fewest workers, more than `now` and each with `left` bytes, with whom the training fits in some way."""
    if training.virtual_workers is not None or len(ways(training, 2)) == len(ways(training, 1)):
        return None

    def fits(workers: int) -> bool:
        return simplest(ways(training.on(workers, now), workers), left) is not None

    few, many = now, 2 * now
    while not fits(many):
        few, many = many, 2 * many
        if many > MOST_WORKERS:
            return None
    return bisect_left(range(many), True, lo=few + 1, key=fits)  # more workers never need more memory each


def table(rows: Iterable[tuple[str, Memory]]) -> list[str]:
    """What a worker holds in each of several ways, a line for each, after one of headings."""
    head = ["how", "weights", "gradients", "optimizer", "activations", "other", "process", "in all"]
    known = list(rows)
    lines = [head, *([name, *map(bytes_in_words, _columns(memory))] for name, memory in known)]
    if not any(memory.process for _, memory in known):  # it is not known, or counted before
        lines = [[*line[:-2], line[-1]] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        " ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]


def _columns(memory: Memory) -> tuple[int, ...]:
    return (
        memory.parameters,
        memory.gradients,
        memory.optimizer,
        memory.activations,
        memory.other,
        memory.process,
        memory.total,
    )


def in_one_line(memory: Memory) -> str:
    """The sum: `2.0 MB parameters + 2.0 MB gradients + …`."""
    names = ("parameters", "gradients", "optimizer", "activations", "other")
    return " + ".join(f"{bytes_in_words(size)} {name}" for name, size in zip(names, _columns(memory), strict=False))


def none_fits(found: Sequence[Way], left: int, *, rank: int, would_do: int | None, now: int) -> ConfigError:
    """That `rank` can have `left` bytes, and all ways need more; `would_do` of such workers would do, not `now`."""
    needs = "; ".join(f"{each.name} needs {bytes_in_words(each.needed)}" for each in found)
    least = min(found, key=lambda each: each.needed)
    reserve = f", and {bytes_in_words(least.needed - least.memory.total)} to spare"
    more = (
        f"{would_do} workers with as much memory each would do"
        if would_do is not None
        else "no number of workers with as much memory each would do"
    )
    return ConfigError(
        f"the training does not fit into the {bytes_in_words(left)} that a worker can have: {needs} (the least: "
        f"{in_one_line(least.memory)}{reserve}); {more}, and there are {now}",
        where=f"strategy='auto', rank {rank}",
        fix="take more workers or ones with more memory, or cut the passes: micro_batch_size=…",
    )
