"""`manyhosts run --profile "20 steps"`: which steps of which workers are profiled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from manyhosts.errors import ConfigError
from manyhosts.units import Duration

VARIABLE = "MANYHOSTS_PROFILE"
_WHERE = "--profile"
_FIX = 'write it as --profile "20 steps", for some ranks as "20 steps@0,3", for all as "20 steps@all"'


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """So many steps, after those that warm up, of these ranks; of all where `ranks` is None."""

    steps: int
    ranks: tuple[int, ...] | None = (0,)

    @classmethod
    def parse(cls, text: str) -> ProfileRequest:
        """Read `20 steps`, `20 steps@0,3` or `20 steps@all`.

        Raises:
            ConfigError: it is none of these.
        """
        amount, sign, names = text.partition("@")
        duration = Duration.parse(amount, where=_WHERE, fix=_FIX)
        if duration.steps is None or duration.epochs is not None or duration.seconds is not None:
            raise ConfigError(f"a profile is of some steps, and {amount!r} is none", where=_WHERE, fix=_FIX)
        if not sign:
            return cls(duration.steps)
        if names.strip() == "all":
            return cls(duration.steps, None)
        words = [word.strip() for word in names.split(",")]
        if not all(word.isdecimal() for word in words):
            raise ConfigError(f"cannot read {names!r} as ranks", where=_WHERE, fix=_FIX)
        return cls(duration.steps, tuple(sorted({int(word) for word in words})))

    def check(self, workers: int) -> None:
        """See that all of its ranks are there.

        Raises:
            ConfigError: one is not.
        """
        if missing := [rank for rank in self.ranks or () if rank >= workers]:
            raise ConfigError(
                f"there is no rank {missing[0]} among {workers} workers",
                where=_WHERE,
                fix=f"give ranks from 0 to {workers - 1}",
            )

    def to_environment(self) -> dict[str, str]:
        """The variable that carries it to the workers."""
        names = "all" if self.ranks is None else ",".join(map(str, self.ranks))
        return {VARIABLE: f"{self.steps} steps@{names}"}


def asked(environment: Mapping[str, str] = os.environ) -> ProfileRequest | None:
    """What this worker was asked for.

    Raises:
        ConfigError: the variable cannot be read.
    """
    text = environment.get(VARIABLE)
    return ProfileRequest.parse(text) if text else None
