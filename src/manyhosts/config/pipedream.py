"""A pipeline that is not emptied between two updates, as a plain value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyhosts.config.pipelined import Pipeline
from manyhosts.errors import ConfigError

VERSIONS = ("two", "all", "one")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipeDream(Pipeline):
    """A pipeline of stages, each of which updates its weights while other micro-batches are under way.

    Sources: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training" (`all`); Narayanan et
    al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", arXiv:2006.09503 (`two`); Elam et al. 2026, "Breaking
    the Bubble: Asynchronous Pipeline Parallel Training with Bounded Weight Inconsistency", arXiv:2606.07881 (`one`).
    """

    name: ClassVar[str] = "pipedream"
    in_step: ClassVar[str] = 'strategy="pipeline"'
    is_asynchronous: ClassVar[bool] = True

    versions: Literal["two", "all", "one"] = "two"
    """Which weights the two passes of a micro-batch compute with, and so how many versions a stage keeps. `two`: those
    of one update ago, on every stage alike; `all`: the newest of its forward pass, kept until its backward pass;
    `one`: the newest of each pass, so that nothing is kept, and at most one update lies between them."""
    accumulate: int = 4
    """Micro-batches of one update. At least one fewer than there are stages, but with `all`, which takes any."""

    def __post_init__(self) -> None:
        Pipeline.__post_init__(self)  # `super()` knows the class of before `slots`
        if self.versions not in VERSIONS:
            raise ConfigError(
                f"versions is {self.versions!r}",
                where="PipeDream(versions=…)",
                fix=f"choose one of {', '.join(VERSIONS)}",
            )
        if self.accumulate < 1:
            raise ConfigError(
                f"accumulate is {self.accumulate}, and an update is made by the gradient of some micro-batch",
                where="PipeDream(accumulate=…)",
                fix="give 1 or more",
            )
        if self.schedule != "1f1b":
            raise ConfigError(
                f"schedule is {self.schedule!r}, and which weights a pass finds is known of the order 1f1b alone",
                where="PipeDream(schedule=…)",
                fix='leave schedule out, or use strategy="pipeline"',
            )

    @property
    def gives_up(self) -> tuple[str, ...]:
        """The promises that it does not keep: see `prove.promises`. Two versions are the same ones on every stage."""
        return ("micro",) if self.versions == "two" else ("workers", "micro")

    def most_versions(self, stage: int, stages: int) -> int:
        """How many versions of its weights a stage keeps at a time, the newest among them."""
        if self.versions == "all":
            return 1 - (stage + 1 - stages) // self.accumulate  # those of the micro-batches under way, rounded up
        return 1 if self.versions == "one" else 2

    def check_stages(self, stages: int) -> None:
        """See that so many stages keep no more versions, and no older ones, than was asked for.

        Raises:
            ConfigError: they would.
        """
        if self.versions != "all" and self.accumulate < stages - 1:
            raise ConfigError(
                f"{stages} stages have up to {stages - 1} micro-batches under way, and with an update after each "
                f"{self.accumulate} they need more versions than versions={self.versions!r} has",
                where="PipeDream(accumulate=…)",
                fix=f'set accumulate={stages - 1} or more, or versions="all"',
            )
