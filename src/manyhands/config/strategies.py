"""The ways to spread a step over workers, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from manyhands.errors import ConfigError
from manyhands.table import nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Single:
    """One process; the choice of a run with one worker."""

    name: ClassVar[str] = "single"


@dataclass(frozen=True, kw_only=True, slots=True)
class DDP:
    """Every worker holds the whole model; gradients are summed over all of them in each step."""

    name: ClassVar[str] = "ddp"

    bucket_mb: float = 25.0
    """Gradients travel in buckets of about this many megabytes, while the backward pass still runs."""

    def __post_init__(self) -> None:
        if self.bucket_mb <= 0:
            raise ConfigError(
                f"bucket_mb is {self.bucket_mb}, but a bucket must hold something",
                where="DDP(bucket_mb=…)",
                fix="leave it out, or give a number of megabytes such as 25",
            )


Strategy = Single | DDP
BY_NAME: dict[str, type[Strategy]] = {kind.name: kind for kind in (Single, DDP)}


def named(strategy: str | Strategy) -> Strategy:
    """The strategy that a name stands for, with its defaults; a value passes through.

    Raises:
        ConfigError: no strategy has that name.
    """
    if not isinstance(strategy, str):
        return strategy
    if strategy not in BY_NAME:
        raise ConfigError(
            f"there is no strategy named {strategy!r}",
            where="strategy",
            fix=f"{nearest(strategy, BY_NAME)}known: {', '.join(BY_NAME)}",
        )
    return BY_NAME[strategy]()
