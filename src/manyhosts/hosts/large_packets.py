"""Whether a host that ssh has lost takes small packets still, and only large ones do not reach it."""

from __future__ import annotations

import fcntl
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Sequence

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
