"""An agent that is given its secret: of this machine, or of a host over ssh, at once or when that has been reached."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import IO

from manyhosts.control.display import Display
from manyhosts.control.head.state import AgentProcess
from manyhosts.errors import ManyhostsError

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
    with contextlib.suppress(OSError):  # it has ended already; the head hears of that
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
