"""The range that a run takes its ports from (`--ports 29500-29600`), where a firewall lets no others through."""

from __future__ import annotations

import re
from dataclasses import dataclass

from manyhosts.errors import ConfigError

VARIABLE = "MANYHOSTS_PORTS"
"""The variable that gives agents and workers the range; empty or unset where the system chooses."""
_LOWEST, _HIGHEST = 1024, 65535


@dataclass(frozen=True, slots=True)
class Range:
    """Ports from `first` to `last`, both of them included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def numbers(self) -> range:
        """All of them."""
        return range(self.first, self.last + 1)

    @classmethod
    def parse(cls, words: str) -> Range:
        """The range that is written as A-B.

        Raises:
            ConfigError: it is written otherwise, or runs the wrong way, or has ports that only root may open.
        """
        fix = f"write it as --ports 29500-29600, with ports from {_LOWEST} to {_HIGHEST}"
        found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", words, re.ASCII)
        if found is None:
            raise ConfigError(f"cannot read {words!r} as a range of ports", where="--ports", fix=fix)
        first, last = int(found[1]), int(found[2])
        if first > last:
            raise ConfigError(f"the range of ports {words} ends before it begins", where="--ports", fix=fix)
        if first < _LOWEST or last > _HIGHEST:
            raise ConfigError(f"the range of ports {words} has ports that a run cannot open", where="--ports", fix=fix)
        return cls(first, last)

    @classmethod
    def of(cls, words: str) -> Range | None:
        """The same, and None for an empty text."""
        return cls.parse(words) if words else None


def needed(workers: int) -> int:
    """How many ports a host with so many workers may need at once, besides those of the head and of hosts that join.

    Two for each worker, as a new group opens its port before that of the group that broke is closed; and two for the
    store, for the same reason.
    """
    return 2 * workers + 2
