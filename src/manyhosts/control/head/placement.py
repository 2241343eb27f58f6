"""Agents that an engine places: one command starts them all, and looks like one process per node to the head."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Protocol

_END_S = 3.0


class AgentProcess(Protocol):
    """An agent as the head holds it: `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """None while it runs, or its exit code."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it."""


Start = Callable[[Sequence[int], str, str], subprocess.Popen[bytes]]
"""Starts the agents of some nodes by one command, given the head's address (host:port) and the run's token."""


class Placement:
    """Starts the agents of all nodes by one command, and the agent of a node that was lost by one of its own."""

    def __init__(self, nodes: int, start: Start, *, together: bool = True) -> None:
        """`together`: whether one command starts them all; else each is started by its own from the beginning."""
        self._nodes, self._start, self._is_together = nodes, start, together
        self._together: _Together | None = None
        self._placed: set[int] = set()

    def start_agent(self, node: int, head: str, token: str) -> AgentProcess:
        """What the head calls, once for every node and again for one that was lost."""
        if not self._is_together or node in self._placed:
            return _NodeAgent(_Together(self._start([node], head, token), 1))
        if self._together is None:
            self._together = _Together(self._start(range(self._nodes), head, token), self._nodes)
        self._placed.add(node)
        return _NodeAgent(self._together)


class _Together:
    """The one process behind the agents of all nodes."""

    def __init__(self, process: subprocess.Popen[bytes], nodes: int) -> None:
        self.process, self.wanted_by, self.patience_is_over = process, nodes, False

    def end(self) -> None:
        """Have the engine end what it has started; one that does not in time is killed."""
        self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


class _NodeAgent:
    """One node's part of it. The process is ended when no node wants it any more."""

    def __init__(self, together: _Together) -> None:
        self._together, self._given_up = together, False

    def poll(self) -> int | None:
        return self._together.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        if self._given_up and self._together.wanted_by:
            return 0  # the others' agents go on
        if self._together.patience_is_over and self._together.wanted_by:
            timeout = 0
        try:
            return self._together.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._together.patience_is_over = True  # it was waited for once; no second time for every other node
            raise

    def terminate(self) -> None:
        """Left to the agents: they end when the head has gone. srun, asked to end, kills those that still tidy up."""

    def kill(self) -> None:
        if not self._given_up:
            self._given_up = True
            self._together.wanted_by -= 1
        if not self._together.wanted_by:
            self._together.end()
