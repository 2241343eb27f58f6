"""The connections that belong to a group of workers, so that all of them can be cut at once.

Gloo has no working abort (torch 2.13: `ProcessGroup.abort()` on Gloo comes back and changes nothing). A worker that
waits for another whose host is gone would wait for the entire timeout. Shutting its sockets down ends the wait at once,
and the others notice, too.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = Path("/proc/self/fd")


class Mine:
    """The connections that were opened while a group was formed. Linux only; elsewhere it knows of none."""

    def __init__(self) -> None:
        self._others: set[tuple[int, str]] = set()
        self._mine: set[tuple[int, str]] | None = None

    @contextmanager
    def opened(self, *, too: bool = False) -> Iterator[None]:
        """What is opened within belongs to the group; with `too`, besides what was opened before."""
        before = (self._mine or set()) if too else set()
        self._mine = None
        self._others = _sockets() - before
        yield
        self._mine = _sockets() - self._others

    def shut(self) -> None:
        """End them for both sides. Those that listen are left alone: Gloo would abort the process."""
        present = _sockets()
        for descriptor, name in (present - self._others) if self._mine is None else (present & self._mine):
            with suppress(OSError):
                copy = os.dup(descriptor)  # our own number for it: Gloo may close its own meanwhile
                connection = socket.socket(fileno=copy)
                with connection:
                    if (descriptor, name) in _sockets() and _is_connection(connection):
                        connection.shutdown(socket.SHUT_RDWR)


def _is_connection(found: socket.socket) -> bool:
    inet = found.family in (socket.AF_INET, socket.AF_INET6)
    return inet and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _sockets() -> set[tuple[int, str]]:
    """Number and name (by inode) of every socket of this process."""
    found = set()
    with suppress(OSError):
        for entry in os.listdir(_FOLDER):
            with suppress(OSError):
                name = os.readlink(_FOLDER / entry)
                if name.startswith("socket:"):
                    found.add((int(entry), name))
    return found
