"""What is wrong with a machine or between two of them: what, where, how bad, and what to type to mend it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]
Kind = Literal["reach", "network", "host"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
"""From the worst on: a run cannot work; it will suffer; it is good to know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong."""

    level: Level
    check: str
    """Which check found it, in one word that stays: `clock`, `disk`, `bandwidth`, …"""
    what: str
    """The fact with its values, one sentence without its full stop."""
    where: str
    """The host, or the two hosts."""
    fix: str
    """What to do or to type."""
    kind: Kind = "host"
    """Whether a host cannot be reached, hosts cannot talk to each other, or it is about one host alone."""

    def to_json(self) -> dict[str, str]:
        """Its parts by name."""
        return asdict(self)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes; as they came within each."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without an error; 4 if all errors are about hosts that cannot talk to each other; else 3."""
    kinds = {finding.kind for finding in findings if finding.level == "error"}
    if not kinds:
        return 0
    return 3 if "reach" in kinds or "network" not in kinds else 4
