"""A pipeline of stages, as a plain value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from manyhosts.config.kinds import check_kinds
from manyhosts.config.mesh import OF_MESH
from manyhosts.config.strategy_settings import StrategySettings
from manyhosts.errors import ConfigError
from manyhosts.table import nearest

MEASURED, BY_LAYERS, BY_MEMORY = "measured", "layers", "memory"
"""How the cuts are found where the user has not named them."""
GPIPE, INTERLEAVED, ZERO_BUBBLE = "gpipe", "interleaved", "zero-bubble"
"""Orders in which a worker computes the passes of a step, besides `1f1b`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline(StrategySettings):
    """Each worker computes some blocks of the model, and gives what comes out to the worker that has the next ones."""

    name: ClassVar[str] = "pipeline"
    axes: ClassVar[Mapping[str, str]] = {"pipeline": "stages"}
    unplanned: ClassVar[str] = "stages"
    steps_some: ClassVar[bool] = True

    stages: int = 0
    """How many stages there are; 0: each worker is one. With fewer than workers each stage is on as many workers as
    there are copies of the model: they read different samples, and sum its gradients."""
    cuts: str | Sequence[str] = MEASURED
    """Where the model is cut. `measured`: rank 0 times each block, and the slowest stage is as fast as it can be;
    `layers`: equally many blocks for each worker; `memory`: the parameters of the stage that has most of them are as
    few as they can be; or the names of the blocks with which the second stage and those
    after it begin, such as `["blocks.4", "blocks.8"]` (with commas between them in `--set`)."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    """In which order a worker computes the micro-batches of a step; bits do not depend on it. `gpipe`: all forward
    passes, then all backward passes; `1f1b`: a backward pass as soon as there is one, so that few micro-batches are
    held at a time; `interleaved`: the same with several stages on each worker, which waits less and sends more;
    `zero-bubble`: gradients of weights are found when there is nothing else to do, so that it waits less and holds
    more."""
    virtual_stages: int = 2
    """How many stages each worker has under `interleaved`."""

    def __post_init__(self) -> None:
        given: Any = self.cuts
        if isinstance(given, Sequence) and not isinstance(given, str):
            if wrong := [each for each in given if not isinstance(each, str)]:
                raise ConfigError(
                    f"cuts holds a {type(wrong[0]).__name__}, and a cut is the name of a block",
                    where="Pipeline(cuts=…)",
                    fix='give the names of the blocks with which stages begin, such as ["blocks.4"]',
                )
            object.__setattr__(self, "cuts", tuple(given))
        check_kinds(self, prefix="Pipeline.")
        if self.stages < OF_MESH:
            raise ConfigError(
                f"stages is {self.stages}",
                where="Pipeline(stages=…)",
                fix="set it to how many there are, or leave it out",
            )
        if self.schedule not in (kinds := ("1f1b", GPIPE, INTERLEAVED, ZERO_BUBBLE)):
            raise ConfigError(
                f"schedule is {self.schedule!r}",
                where="Pipeline(schedule=…)",
                fix=f"{nearest(self.schedule, kinds)}known: {', '.join(kinds)}",
            )
        if self.virtual_stages < 2:
            raise ConfigError(
                f"virtual_stages is {self.virtual_stages}, and with one stage on each worker nothing is interleaved",
                where="Pipeline(virtual_stages=…)",
                fix="set it to 2 or more, or choose another schedule",
            )

    @property
    def variant(self) -> str:
        """What distinguishes it from others of this strategy."""
        return self.schedule

    @property
    def per_worker(self) -> int:
        """How many stages a worker has."""
        return self.virtual_stages if self.schedule == INTERLEAVED else 1

    def most_workers(self, blocks: int) -> int | None:
        """One for each block; with none at all the strategy is refused."""
        return blocks or None

    def updates(self, micro_batches: int) -> int:
        """How many updates a step of so many micro-batches makes."""
        return 1

    def most_versions(self, stage: int, stages: int) -> int:
        """How many versions of its weights a stage keeps at a time, the newest among them."""
        return 1

    @property
    def named(self) -> tuple[str, ...]:
        """The blocks with which stages after the first begin, where they are named."""
        if self.cuts in (MEASURED, BY_LAYERS, BY_MEMORY):
            return ()
        words = self.cuts.split(",") if isinstance(self.cuts, str) else self.cuts
        return tuple(word.strip() for word in words if word.strip())

    def check_goes_with(self, settings: Any) -> None:
        """Refuse a format that stages cannot compute in.

        Raises:
            ConfigError: it is fp16.
        """
        if settings.precision == "fp16":
            raise ConfigError(
                "precision is 'fp16', whose scale only the last stage of a pipeline would know",
                where="strategy='pipeline'",
                fix='set precision="bf16" or "fp32"',
            )
