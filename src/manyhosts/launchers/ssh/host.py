"""A host of a run over ssh, and what is known of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from manyhosts.errors import LaunchError, ManyhostsError
from manyhosts.hosts import (
    interfaces,
)
from manyhosts.hosts.connection import Connection
from manyhosts.hosts.interfaces import Interface

T = TypeVar("T")
_QUICKLY_S = 2.0
"""How long a host that is well may take to say so."""


class Way(Protocol):
    """A tunnel that is kept open."""

    def close(self) -> None:
        """Open it no more."""


@dataclass(slots=True)
class Host:
    """One host, and what is known of it."""

    node: int
    connection: Connection
    away: ManyhostsError | None = None
    """Why it was not reached; a run whose nodes may come later begins without it."""
    facts: dict[str, Any] = field(default_factory=dict)
    interface: Interface | None = None
    tunnelled: bool = False
    """Whether it reaches this machine through ssh only."""
    reported: str = ""
    """What was said last of why it is away."""
    called: bool = False
    """Whether its agent was to be started before."""
    began: bool = False
    """Whether an agent was started there."""
    tunnel: int = 0
    """The port on the host that a tunnel to this machine has; 0 where there is none."""
    ways: list[Way] = field(default_factory=list)
    """The tunnels that it has had, the present one last."""
    was_cut_off: bool = False
    """Whether it was connected to again for the sake of its tunnel: not checked yet whether it is as it was."""
    being_called: threading.Lock = field(default_factory=threading.Lock)
    """Locked while it is being reached: a call that was given up may still be busy with it."""

    @property
    def name(self) -> str:
        """As the user calls it."""
        return self.connection.host

    @property
    def address(self) -> str:
        """Where the other hosts reach it."""
        assert self.interface is not None, "it was surveyed"
        return self.interface.address

    def find_interface(self, target: str) -> None:
        """The interface that the routes of this host to `target`, an address of another, lead through."""
        way = self.connection.ask("way", address=target)
        self.interface = interfaces.with_address(self.facts["interfaces"], way or self.facts["address"])
        if self.interface is None:
            raise LaunchError(
                f"host {self.name} has no route to {target}, where the others are",
                where=f"host {self.name}",
                fix="name the hosts by addresses of one network that all of them are on",
            )

    def still_answers(self) -> bool:
        """Whether the connection to a host is one still: a host may have been switched off and on."""
        try:
            return self.connection.is_open and bool(
                self.connection.ask("way", address="127.0.0.1", timeout_s=_QUICKLY_S)
            )
        except (LaunchError, OSError):
            return False

    def connect_again(self, connections: list[Connection]) -> None:
        """Open a connection to a host in place of the one that `connections` has for it.

        Raises:
            LaunchError: it does not answer, or does not let us in.
        """
        self.connection.close()
        self.connection = connections[self.node] = self.connection.again()
        self.facts = self.connection.facts()


def of_all(hosts: Sequence[Host], ask: Callable[[Host], T]) -> list[T]:
    """What `ask` gives for every host, all at the same time. The first trouble, by order of hosts, is raised."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return list(pool.map(ask, hosts))
