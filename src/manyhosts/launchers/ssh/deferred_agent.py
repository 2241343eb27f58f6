"""Agents of hosts that were not there when the run began, as the head holds them."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable

from manyhosts.errors import ManyhostsError

_FAILED = 1


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

    def __init__(self, come: Callable[[], subprocess.Popen[bytes]], hang_up: Callable[[], None]) -> None:
        """`come` starts it, or raises ManyhostsError; `hang_up`, from another thread, has it give up soon."""
        self._come, self._hang_up = come, hang_up
        self._agent: subprocess.Popen[bytes] | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._coming = threading.Thread(target=self._try, name="deferred-agent", daemon=True)
        self._coming.start()

    def _try(self) -> None:
        try:
            agent = self._come()
        except ManyhostsError:
            return  # whoever calls the host again says why
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
        self._end(subprocess.Popen.terminate)

    def kill(self) -> None:
        """End it."""
        self._end(subprocess.Popen.kill)

    def _end(self, how: Callable[[subprocess.Popen[bytes]], None]) -> None:
        with self._lock:
            self._given_up = True
            if self._agent is not None:
                how(self._agent)
        if self._coming.is_alive():
            self._hang_up()
