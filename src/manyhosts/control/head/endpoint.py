"""How a head and agents that it does not start itself find each other, and what the two say when all is over."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from manyhosts.cluster.ports import Range
from manyhosts.control.job import Job
from manyhosts.control.loop import Message

if TYPE_CHECKING:
    from manyhosts.control.tls import Identity

PORT = 29400
"""Where a head listens that agents must know before it is there. On such nodes nobody else has it."""


class Joining(Protocol):
    """Who takes the places of hosts that come by themselves: see `head.joining`."""

    identity: Identity

    def answer(self, asking: Message, nodes: Sequence[Any]) -> dict[str, Any]:
        """What a host is told that asks whether it may join."""

    def place_for(self, hello: Message, nodes: Sequence[Any]) -> Any:
        """The node that an agent without a number is; None where there is no place for it."""

    def take_in(self, node: Any, nodes: Sequence[Any]) -> None:
        """An agent has become `node`."""


def port_of(job: Job) -> int:
    """Where the head of `job` listens, where agents must know that beforehand: the first port of its range."""
    ports = Range.of(job.ports)
    return PORT if ports is None else ports.first


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadEndpoint:
    """What the agents of a run know of its head."""

    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """What tells them from strangers."""
    port: int = 0
    """Where the head listens; 0 is any free one."""
    patience_s: float = 60.0
    """How long the head waits for them."""
    joining: Joining | None = None
    """Where hosts come by themselves: who may, and what they become."""


class ExternalAgent:
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
