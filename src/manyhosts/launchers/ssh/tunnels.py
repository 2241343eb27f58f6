"""The ways of hosts that reach this machine through ssh alone: where ssh gives one up, it is opened again."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable

from manyhosts.errors import LaunchError
from manyhosts.hosts.connection import Connection
from manyhosts.launchers.ssh.host import Host

_AGAIN_S = 2.0
_TO_END_S = 10.0
"""How long an attempt that is under way may take when all is over."""


class Tunnel:
    """The way of one host to this machine, watched on a thread until `close`."""

    def __init__(self, connection: Connection, open_again: Callable[[], Connection | None]) -> None:
        """`open_again` is called when ssh has ended `connection`, and now and then while it raises a LaunchError.

        It returns the connection that the tunnel goes through from then on, or None where it is no longer needed.
        """
        self._connection: Connection | None = connection
        self._open_again, self._is_cut, self._over = open_again, False, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tunnel", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the host reaches this machine, as far as that is known; where it is not needed, it counts as open."""
        connection = self._connection
        return connection is None or (connection.is_open and not self._is_cut)

    def close(self) -> None:
        """Do not open it again. One that is open stays so. Safe to call twice."""
        self._over.set()
        if self._is_cut:
            self._thread.join(_TO_END_S)

    def _watch(self) -> None:
        while self._connection is not None and not self._over.is_set():
            self._connection.wait_for_end()
            self._is_cut = True
            while self._is_cut and not self._over.is_set():
                with contextlib.suppress(LaunchError, OSError):  # the host is not there yet, or holds the port still
                    self._connection = self._open_again()
                    self._is_cut = False
                self._over.wait(_AGAIN_S if self._is_cut else 0)


def keep(host: Host, connections: list[Connection], address: str, port: int) -> Tunnel:
    """Open the tunnel of `host` to `address` and `port` here again where ssh gives it up, on the same port there.

    Its agent calls that port, and knows no other. `connections` has the host's connection, as for `connect_again`.
    """
    there = host.tunnel

    def open_again() -> Connection | None:
        with host.being_called:
            if host.ways[-1] is not tunnel:
                return None  # another agent was started there, which has another one
            if not host.connection.is_open:
                host.connect_again(connections)
                host.was_cut_off = True
            host.connection.tunnel(address, port, there)
            return host.connection

    tunnel = Tunnel(host.connection, open_again)
    host.ways.append(tunnel)
    return tunnel


class TunnelledAgent:
    """An agent that is reached by a tunnel: that ssh has lost its host says nothing of it."""

    def __init__(self, agent: subprocess.Popen[bytes], tunnel: Tunnel) -> None:
        self._agent, self._tunnel = agent, tunnel

    def poll(self) -> int | None:
        """None while it runs, or may run on a host that is not reached; or the exit code of ssh."""
        code = self._agent.poll()
        return code if self._tunnel.is_open else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of ssh.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        return self._agent.wait(timeout)

    def terminate(self) -> None:
        """Ask ssh to end."""
        self._agent.terminate()

    def kill(self) -> None:
        """End ssh."""
        self._agent.kill()
