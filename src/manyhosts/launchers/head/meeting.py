"""How a head and agents that it does not start itself find each other, and what the two say when all is over."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

PORT = 29400
"""Where a head listens that agents must know before it is there. On such nodes nobody else has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """What the agents of a run know of its head."""

    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """What tells them from strangers."""
    port: int = 0
    """Where the head listens; 0 is any free one."""
    patience_s: float = 60.0
    """How long the head waits for them."""


class Elsewhere:
    """The agent of another node, which an engine starts, and starts again: all that is known of it is what it says."""

    def poll(self) -> int | None:
        """It may come at any time."""
        return None

    def wait(self, timeout: float | None = None) -> int:
        """There is nothing to wait for: it ends by itself when the head has said that all is over."""
        return 0

    def terminate(self) -> None:
        """Its engine does that."""

    def kill(self) -> None:
        """Its engine does that."""
