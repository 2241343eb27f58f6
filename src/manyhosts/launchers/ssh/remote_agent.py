"""Agents of hosts over ssh: started when the host is reached, and their tunnels, opened again when ssh drops one."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import IO

from manyhosts.control.display import Display
from manyhosts.control.head.state import AgentProcess
from manyhosts.errors import LaunchError, ManyhostsError
from manyhosts.hosts.connection import Connection
from manyhosts.launchers.ssh.host import Host

_IT_IS_AWAY = (b"mux_client_request_session: ", b"ssh: connect to host ")
"""How ssh begins to say what is said already."""
_FAILED = 1


def start(words: Sequence[str], token: str, display: Display, *, again: bool) -> subprocess.Popen[bytes]:
    """Start an agent by a command. The token goes through its standard input, where no other process sees it.

    `again`: that its host is away is known.
    """
    # No stream of ours: ssh has writes to a pipe fail instead of wait, also ours, and lines would be lost. And this
    # process may be killed and its terminal closed while the agent continues. Ctrl-C is for the head alone.
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    agent = subprocess.Popen(words, stdin=pipe, stdout=nothing, stderr=pipe, start_new_session=True)
    assert agent.stdin is not None, "it was asked for as a pipe"
    assert agent.stderr is not None, "it was asked for as a pipe"
    threading.Thread(target=_pass_on, args=(agent.stderr, again, display), daemon=True).start()
    with contextlib.suppress(OSError):  # it has ended already; the head is informed of that
        agent.stdin.write(f"{token}\n".encode())
        agent.stdin.close()
    return agent


def _pass_on(words: IO[bytes], again: bool, display: Display) -> None:
    """Show what ssh and an agent have to say, until they have ended; of a host that was lost, not that it is away."""
    with words, contextlib.suppress(OSError, ValueError):
        for line in words:
            if again and line.startswith(_IT_IS_AWAY):
                continue
            display.line(line.decode(errors="replace").rstrip("\n"), "", is_error=True)


class NotThere:
    """The agent of a host that is known to be away: it has ended before it began."""

    def poll(self) -> int:
        """Its exit code."""
        return _FAILED

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, at once."""
        return _FAILED

    def terminate(self) -> None:
        """Nothing to end."""

    def kill(self) -> None:
        """Nothing to end."""


class DeferredAgent:
    """An agent that a thread starts, when the host has been reached and has what it needs."""

    def __init__(self, come: Callable[[], AgentProcess], hang_up: Callable[[], None]) -> None:
        """`come` starts it, or raises ManyhostsError; `hang_up`, from another thread, has it give up soon."""
        self._come, self._hang_up = come, hang_up
        self._agent: AgentProcess | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._coming = threading.Thread(target=self._try, name="deferred-agent", daemon=True)
        self._coming.start()

    def _try(self) -> None:
        try:
            agent = self._come()
        except ManyhostsError:
            return  # the next call of the host says why
        with self._lock:
            self._agent = agent
            if self._given_up:
                agent.terminate()

    def poll(self) -> int | None:
        """None while it runs or is on its way, or its exit code."""
        if self._coming.is_alive():
            return None
        return _FAILED if self._agent is None else self._agent.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. One that was given up on its way will end by itself, and is not waited for.

        Raises:
            subprocess.TimeoutExpired: it is on its way or runs still after `timeout` seconds.
        """
        self._coming.join(0 if self._given_up else timeout)
        if self._coming.is_alive():
            if self._given_up:
                return _FAILED
            raise subprocess.TimeoutExpired("agent", timeout or 0)
        return _FAILED if self._agent is None else self._agent.wait(timeout)

    def terminate(self) -> None:
        """Ask it to end."""
        self._end(lambda agent: agent.terminate())

    def kill(self) -> None:
        """End it."""
        self._end(lambda agent: agent.kill())

    def _end(self, how: Callable[[AgentProcess], None]) -> None:
        with self._lock:
            self._given_up = True
            if self._agent is not None:
                how(self._agent)
        if self._coming.is_alive():
            self._hang_up()


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
