"""Connections between hosts: which have to be possible, what closed ones mean, and whether large packets get lost."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass

from manyhosts.cluster.findings import Finding

LET_THEM_MEET = (
    "workers talk on ports that the system chooses, or on those of --ports A-B: let the firewalls of these two hosts"
    " pass TCP on them between each other, and see that these addresses are of one network"
)
"""What helps hosts that do not reach each other."""
MAKE_A_NETWORK = (
    "a firewall or address translation (NAT) is in the way: join both by WireGuard (see"
    " docs/security.md), and give their addresses on it, here with -o address= and there with --address"
)
"""What helps hosts that are on different networks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a host can be connected to."""

    name: str
    address: str
    port: int
    gpus: int = 0
    """How many GPUs its workers have: NCCL opens connections in both directions."""
    keeps_store: bool = False
    """Whether the workers' rendezvous is a store there, to which each of them opens a connection."""


def opens(one: str, other: str) -> bool:
    """Whether Gloo, between hosts with these addresses, has `one` open the connection: the larger address does."""
    mine, theirs = ipaddress.ip_address(one), ipaddress.ip_address(other)
    return mine.version != theirs.version or mine.packed > theirs.packed


def is_needed(one: Place, other: Place) -> bool:
    """Whether workers can only work together where host `one` can open connections to host `other`."""
    return other.keeps_store or bool(one.gpus and other.gpus) or opens(one.address, other.address)


class Ways:
    """What hosts have found when they connected to each other."""

    def __init__(self, *, one_way: bool) -> None:
        """`one_way`: whether a direction may be closed in which none is opened, as with address translation."""
        self._one_way = one_way
        self.places: dict[int, Place] = {}
        """By node."""
        self._closed: dict[tuple[int, int], str] = {}
        """Why the first does not reach the second."""

    def take(self, one: int, others: Sequence[int], answers: Sequence[str]) -> None:
        """Node `one` has connected to `others`: for each why it was not let in, or nothing."""
        for other, reason in zip(others, answers, strict=False):
            self._closed.pop((one, other), None)
            if reason and one != other:
                self._closed[one, other] = reason

    def findings(self) -> list[Finding]:
        """The pairs of hosts that cannot work together."""
        return [
            self._finding(self.places[one], self.places[other], reason)
            for (one, other), reason in self._closed.items()
            if one in self.places
            and other in self.places
            and not (self._one_way and not is_needed(self.places[one], self.places[other]))
        ]

    def _finding(self, one: Place, other: Place, reason: str) -> Finding:
        return Finding(
            level="error",
            check="connection",
            what=f"host {one.name} cannot open a connection to host {other.name} at {other.address} port {other.port}:"
            f" {reason}",
            where=f"between {one.name} and {other.name}",
            fix=MAKE_A_NETWORK if self._one_way else LET_THEM_MEET,
            kind="network",
        )


_PATIENCE_S = 4.0
_SMALL, _LARGE = b"SSH-2.0-manyhosts\r\n", bytes(1 << 14)
"""What an ssh server expects first, and what it ends the connection at; its system takes both before it sees them."""


def are_lost(destination: str, options: Sequence[str]) -> bool:
    """Whether small packets reach the ssh server of `destination`, and large ones do not.

    `options` are those of ssh. False also where that cannot be seen: where ssh goes by way of another host.
    """
    try:
        address = _address(destination, options)
        if address is None:
            return False
        with socket.create_connection(address, timeout=_PATIENCE_S) as connection:
            if not connection.recv(64).startswith(b"SSH-"):
                return False
            return _arrives(connection, _SMALL) and not _arrives(connection, _LARGE)
    except (OSError, ValueError):
        return False


def _address(destination: str, options: Sequence[str]) -> tuple[str, int] | None:
    """Where ssh itself would open a connection to; None where it is another program, or host, that does."""
    reported = subprocess.run(["ssh", "-G", *options, destination], capture_output=True, text=True, check=False).stdout
    said = dict(line.split(" ", 1) for line in reported.splitlines() if " " in line)
    if any(said.get(way, "none") != "none" for way in ("proxycommand", "proxyjump")):
        return None
    return said["hostname"], int(said["port"])


def _arrives(connection: socket.socket, words: bytes) -> bool:
    """Whether the other system says within `_PATIENCE_S` that it has all of `words`, or ends the connection at them."""
    until = time.monotonic() + _PATIENCE_S
    try:
        connection.sendall(words)
        while struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
    except TimeoutError:
        return False
    except OSError:
        pass  # it was heard, and not liked
    return True
