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
    raise _none_free(address, ports, what)


def reserve(address: str, ports: Range | None, *, what: str) -> socket.socket:
    """A socket that has a free port, as `listen` chooses it, and does not listen yet: no other process gets that port.

    Raises:
        LaunchError: the range has none that is free; `what` is what was to listen.
        OSError: `address` is none of this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Two sockets that may both reuse a port can share it while neither listens. So a port that only closed connections
    # still hold is taken where there is no other.
    for reuses in (0, 1):
        for port in (0,) if ports is None else ports.numbers():
            bound = socket.socket(family, socket.SOCK_STREAM)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
            try:
                bound.bind((address, port))
            except OSError as error:
                bound.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return bound
    raise _none_free(address, ports, what)


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


def _none_free(address: str, ports: Range | None, what: str) -> LaunchError:
    return LaunchError(
        f"none of the ports {ports} is free for {what}",
        where=f"host {socket.gethostname()}, address {address}",
        fix="give a wider range with --ports, or end what holds them: `ss -tlnp` lists it",
    )
