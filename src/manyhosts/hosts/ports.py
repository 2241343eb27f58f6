"""Listens on ports of the range that was asked for, or on any that the system chooses."""

from __future__ import annotations

import errno
import socket

from manyhosts.cluster.ports import Range
from manyhosts.errors import LaunchError
from manyhosts.hosts import addresses


def listen(address: str, ports: Range | None, *, backlog: int, what: str) -> socket.socket:
    """A socket that listens at `address` on a free port of the range, or on one that the system chooses.

    Raises:
        LaunchError: the range has none that is free; `what` is what was to listen.
        OSError: `address` is none of this machine.
    """
    if ports is None:
        return addresses.listen(address, 0, backlog=backlog)
    for port in ports.numbers():
        try:
            return addresses.listen(address, port, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise LaunchError(
        f"none of the ports {ports} is free for {what}",
        where=f"host {socket.gethostname()}, address {address}",
        fix="give a wider range with --ports, or end what holds them: `ss -tlnp` lists it",
    )


def see_that_enough_are_free(address: str, ports: Range | None, count: int) -> None:
    """See that `count` ports of the range can be opened at `address`.

    Raises:
        LaunchError: there are fewer.
    """
    free = 0
    for port in ports.numbers() if ports is not None else ():
        if free >= count:
            return
        try:
            addresses.listen(address, port, backlog=1).close()
        except OSError:
            continue
        free += 1
    if ports is not None and free < count:
        raise LaunchError(
            f"{free} of the ports {ports} are free, and up to {count} are needed",
            where=f"host {socket.gethostname()}, address {address}",
            fix="give a wider range with --ports: two ports for each worker of a host, and four more",
        )
