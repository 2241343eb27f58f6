"""An agent's part of the checks before a run: it reports its host's state, and tries connections in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manyhosts.cluster.ports import Range
from manyhosts.control.agent import host_state
from manyhosts.control.agent.head_connection import HeadConnection
from manyhosts.control.loop import Loop
from manyhosts.control.protocol import Condition, ConnectionsTried, Connectivity
from manyhosts.errors import LaunchError
from manyhosts.hosts import remote_probe
from manyhosts.hosts.ports import listen

_OPEN_S = 30.0
"""How long others may try to reach this host."""


class ConnectivityCheck:
    """Where other hosts connect. Nothing that comes is read."""

    def __init__(self, loop: Loop, head: HeadConnection, address: str) -> None:
        """`address` is where other hosts reach this one."""
        self._loop, self._head, self._address = loop, head, address

    def report_condition(
        self, run_dir: str, environment: Mapping[str, str], *, opens: bool, ports: Range | None
    ) -> None:
        """Say how this host is for workers with `environment`, and at which port others may try it, if it opens one."""
        port = self._open(ports) if opens else 0
        self._head.say(Condition(reported=host_state.gather(run_dir, environment), port=port))

    def report_port(self, ports: Range | None) -> None:
        """Say at which port others may connect."""
        try:
            port = self._open(ports)
        except (LaunchError, OSError):  # no port is free, or the address is gone: others are not shown a way here
            port = 0
        self._head.say(Connectivity(port=port))

    def _open(self, ports: Range | None) -> int:
        listening = listen(self._address, ports, backlog=256, what="hosts that connect")
        self._loop.after(_OPEN_S, listening.close)
        return int(listening.getsockname()[1])

    def try_connections(self, places: Sequence[Any]) -> None:
        """Try to reach other hosts: a firewall may keep that waiting for seconds."""
        self._loop.run_in_thread(
            lambda: remote_probe.try_all_connections(list(places)),
            lambda answers: self._head.say(ConnectionsTried(answers=answers)),
        )
