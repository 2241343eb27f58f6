"""The way of a host that reaches this machine through ssh alone is opened again where ssh gives it up."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from launching import wait_until

from manyhosts.control.head.state import AgentProcess
from manyhosts.errors import LaunchError
from manyhosts.hosts.connection import Connection, Unreachable
from manyhosts.launchers.ssh import remote_agent
from manyhosts.launchers.ssh.host import Host
from manyhosts.launchers.ssh.remote_agent import TunnelledAgent

LOST_BY_SSH = 255


class Reached:
    """A connection to a host that is cut off and comes back; its ports there are held while `holds` is not 0."""

    host = "far"

    def __init__(self, log: list[str], holds: list[int]) -> None:
        self.log, self.holds = log, holds
        self.ended = threading.Event()

    @property
    def is_open(self) -> bool:
        return not self.ended.is_set()

    def wait_for_end(self) -> None:
        self.ended.wait()

    def close(self) -> None:
        self.ended.set()

    def again(self) -> Reached:
        self.log.append("connect")
        return Reached(self.log, self.holds)

    def facts(self) -> dict[str, Any]:
        if self.log.count("connect") == 1:
            self.ended.set()
            raise Unreachable("host far does not answer")
        return {}

    def tunnel(self, address: str, port: int, there: int = 0) -> int:
        self.log.append(f"{there} to {address} port {port}")
        if self.holds:
            self.holds.pop()
            raise LaunchError("the host holds the port still")
        return there


class Agent:
    """ssh, as it ends when the host does not answer."""

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(remote_agent, "_AGAIN_S", 0.01)
    return Host(0, cast(Connection, Reached([], [])), tunnel=4000)


def reached(host: Host) -> Reached:
    return cast(Reached, host.connection)


def test_tunnel_that_ssh_gave_up_is_opened_again_on_its_port_and_its_agent_counts_as_alive_until_then(
    host: Host,
) -> None:
    """The host does not answer at first, and then holds the port of the last tunnel for a while."""
    log, holds = reached(host).log, reached(host).holds
    holds += [1, 1]
    connections, process = [host.connection], Agent()
    tunnel = remote_agent.keep(host, connections, "10.0.0.1", 29400)
    agent: AgentProcess = TunnelledAgent(process, tunnel)
    assert agent.poll() is None
    with host.being_called:  # nobody reaches it meanwhile
        process.code = LOST_BY_SSH
        reached(host).ended.set()
        assert agent.poll() is None, "it may train on"
    wait_until(lambda: agent.poll() == LOST_BY_SSH, "the tunnel is open")
    way = "4000 to 10.0.0.1 port 29400"
    assert log == ["connect", "connect", way, way, way]
    assert (connections, host.was_cut_off) == ([host.connection], True)
    tunnel.close()
    host.connection.close()


def test_tunnel_of_an_agent_in_whose_place_there_is_another_is_opened_no_more(host: Host) -> None:
    first = remote_agent.keep(host, [host.connection], "10.0.0.1", 1)
    host.tunnel = 5000
    second = remote_agent.keep(host, [host.connection], "10.0.0.1", 1)
    old, connections = TunnelledAgent(Agent(), first), reached(host)
    connections.ended.set()
    wait_until(lambda: second.is_open and host.was_cut_off, "the second is open again")
    wait_until(lambda: first.is_open, "the first needs to be open no more")
    assert [line for line in connections.log if line.startswith("4000")] == []
    assert old.poll() is None
    second.close()
    host.connection.close()


def test_tunnel_is_left_alone_when_all_is_over(host: Host) -> None:
    tunnel = remote_agent.keep(host, [host.connection], "10.0.0.1", 1)
    log = reached(host).log
    tunnel.close()
    host.connection.close()
    tunnel._thread.join(120)
    assert (tunnel._thread.is_alive(), log) == (False, [])
