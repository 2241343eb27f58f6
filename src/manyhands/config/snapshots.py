"""When snapshots are made and how many are kept."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.errors import ConfigError
from manyhands.units import Duration


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshots:
    """A snapshot `every` so often, and the newest `keep` of them on disk.

    `every` is a duration (`"500 steps"`, `"1 epoch"`, `"10 min"`, or several joined by `or`). The best model is kept
    beside them, in `best/`.
    """

    every: str = "10 min"
    keep: int = 3

    def __post_init__(self) -> None:
        Duration.parse(self.every, where="snapshots.every")
        if self.keep < 1:
            raise ConfigError(
                f"keep is {self.keep}, but a run needs at least one snapshot to go on from",
                where="snapshots.keep",
                fix="set it to 1 or more; 3 is usual, so that a damaged one has others behind it",
            )
