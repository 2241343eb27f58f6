"""All hosts of one run over ssh: surveyed, provided with files, each with its agent, and what they bring back."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from manyhosts import __version__
from manyhosts.cluster.ports import Range
from manyhosts.control.display import Display
from manyhosts.control.head.state import AgentProcess
from manyhosts.control.head.takeover import HeadCheckpoint
from manyhosts.control.job import Job
from manyhosts.control.plan import HEAD, Later, Shell, filled
from manyhosts.errors import LaunchError, ManyhostsError
from manyhosts.hosts import (
    addresses,
    connection,
    containers,
    interfaces,
    ports,
    remote_probe,
    version_check,
)
from manyhosts.hosts.connection import Connection, Unreachable
from manyhosts.hosts.containers import Container
from manyhosts.hosts.disks import Disks
from manyhosts.launchers import container_options
from manyhosts.launchers.ssh import remote_agent, run_files
from manyhosts.launchers.ssh.host import Host, of_all
from manyhosts.launchers.ssh.remote_agent import DeferredAgent, NotThere, Tunnel, TunnelledAgent
from manyhosts.launchers.ssh.run_files import RunFiles
from manyhosts.records import run_directory


class Cluster:
    """The hosts, in the order in which they were named."""

    def __init__(
        self,
        job: Job,
        connections: list[Connection],
        display: Display,
        *,
        agents: Sequence[Sequence[str]] = (),
        may_be_away: bool = False,
        container: Container | None = None,
    ) -> None:
        """`connections` is kept: where a host is reached only later, its place there is taken by another connection.

        `agents` are the commands that start them, as `agent_command` plans them.

        `may_be_away`: a run that continues is taken over, and so hosts need not be reached by ssh. `container` is what
        everything runs in there, if in any.
        """
        self._container = container
        self._may_be_away, self._agents = may_be_away, agents
        self._job, self._connections, self._display = job, connections, display
        self._hosts = [Host(node, connection) for node, connection in enumerate(connections)]
        self._ports: dict[int, int] = {}
        """Where a remote probe listens, by node, so that others can see whether they reach its host."""
        self._files = RunFiles(job, container, display)
        self._disks = Disks(job.folder, job.run_dir)
        self._separate_disks = False
        """Whether hosts have several run directories."""
        self.head_address = ""

    @property
    def _here(self) -> list[Host]:
        """Those that were reached."""
        return [host for host in self._hosts if host.away is None]

    def survey(self) -> None:
        """Ask every host what it is and whom it reaches.

        Raises:
            LaunchError: a host is not there, differs from this machine, or cannot reach another one. Where nodes may
                come later, those that do not answer are left out, as long as enough are there.
            ConfigError: encryption is required, and a link has none.
        """
        self._greet()
        here = self._here
        facts = {host.name: host.facts for host in here}
        version_check.see_that_each_is_named_once(facts)
        self._see_that_they_agree(facts)
        targets = [here[1 if len(here) > 1 else 0], *([here[0]] * (len(here) - 1))]
        of_all(here, lambda host: host.find_interface(targets[here.index(host)].facts["address"]))
        self._see_encryption(here)
        self._choose_head_address()
        self._ports = dict(zip((host.node for host in here), of_all(here, self._listen), strict=True))
        answers = of_all(here, lambda host: self._try_connections(host, here))
        places = [(host.address, self._ports[host.node]) for host in here]
        version_check.check_connections([host.name for host in here], places, answers)

    def _see_that_they_agree(self, facts: Mapping[str, Mapping[str, Any]]) -> None:
        if self._container is not None:
            version_check.see_that_images_agree(facts, self._container)
        version_check.see_that_they_agree(facts, version_check.here(__version__), self._container)

    def _greet(self) -> None:
        """Have every host say what it is; where enough do, the others may be away."""

        def greet(host: Host) -> None:
            try:
                host.facts = host.connection.facts()
            except Unreachable as error:
                host.away = error

        of_all(self._hosts, greet)
        away = [host.away for host in self._hosts if host.away is not None]
        enough = self._job.is_elastic and len(self._here) >= (self._job.least_nodes or 1)
        if away and not (enough or (self._may_be_away and self._here)):
            raise away[0]

    def _see_encryption(self, hosts: Sequence[Host]) -> None:
        if self._job.encrypt:
            interfaces.require_encryption({host.name: host.interface for host in hosts if host.interface is not None})

    def _choose_head_address(self) -> None:
        """Where this machine listens: the address that most hosts are talked to from."""
        ways = Counter(filter(None, (remote_probe.way_to(host.facts["address"]) for host in self._here)))
        self.head_address = ways.most_common(1)[0][0] if ways else "127.0.0.1"

    @property
    def _range(self) -> Range | None:
        return Range.of(self._job.ports)

    def _listen(self, host: Host) -> int:
        """Have a host listen. Returns the port.

        Raises:
            LaunchError: none of the range is free there.
        """
        chosen = self._range
        port = int(host.connection.ask("listen", address=host.address, ports=chosen and [chosen.first, chosen.last]))
        if not port:
            raise LaunchError(
                f"none of the ports {chosen} is free on host {host.name}",
                where=f"host {host.name}, address {host.address}",
                fix="give a wider range with --ports, or end what holds them: `ss -tlnp` lists it",
            )
        return port

    def _try_connections(self, host: Host, others: Sequence[Host]) -> list[str]:
        """For each of `others` why `host` cannot reach it, or nothing. Whether it reaches this machine is noted."""
        with ports.listen(self.head_address, self._range, backlog=256, what="hosts that connect") as waiting:
            places = [(other.address, self._ports[other.node]) for other in others]
            places.append((self.head_address, waiting.getsockname()[1]))
            answers: list[str] = host.connection.ask("try_connections", places=places)
            from_here = answers.pop()
        host.tunnelled = bool(from_here) or self.head_address == "127.0.0.1"
        return answers

    def in_words(self) -> str:
        """Which interface each host uses, and who is away."""
        by_name: dict[str, list[str]] = {}
        for host in self._here:
            assert host.interface is not None, "it was surveyed"
            by_name.setdefault(host.interface.name, []).append(f"{host.name} ({host.address})")
        lines = [f"manyhosts: {', '.join(hosts)} talk over {name}" for name, hosts in by_name.items()]
        for host in self._hosts:
            if host.away is not None:
                host.reported = host.away.what
                means = "the run begins without it, and takes it in when it is there"
                lines.append(f"manyhosts: {host.reported}{'' if self._may_be_away else f': {means}'}")
        return "\n".join(lines)

    # Files.

    def bring_files(self) -> None:
        """Make the working directory on every host what it is here, where it is not the same one.

        Raises:
            LaunchError: a host did not take it, or has no such script.
        """
        self._job.run_dir.mkdir(parents=True, exist_ok=True)
        self._files.choose()
        here = self._here
        first = self._disks.find({host.node: host.connection for host in here})
        self._files.bring([host for host in here if first[host.node] == host.node])
        self._files.see_script(here)
        disks = {self._disks.of(host.node) for host in here}
        self._separate_disks = len(disks) > 1
        if len(here) == 1 < len(self._hosts):  # unknown for hosts that are not here yet
            self._separate_disks = not here[0].connection.ask("network", folder=str(self._job.run_dir))

    # A run whose head was killed is taken over by another process.

    def facts(self) -> dict[str, Any]:
        """What another process must know of the hosts to continue with them."""
        return {
            "apart": self._separate_disks,
            "disks": list(self._disks.known.items()),
            "tunnels": {str(host.node): host.tunnel for host in self._hosts if host.tunnel},
        }

    def gone(self, left: HeadCheckpoint) -> list[int]:
        """The nodes whose agents are known to be no more; what is not known from here is left out."""

        def is_gone(host: Host) -> bool:
            process = left.state["agents"][host.node]["facts"].get("process")
            paths = [f"/proc/{process}", "/proc/1"]  # the second, for there are systems without such files
            there, known = (bool(host.connection.ask("exists", path=path)) for path in paths)
            return known and not there

        here = self._here
        return [host.node for host, gone in zip(here, of_all(here, is_gone), strict=True) if gone]

    def restore(self, left: HeadCheckpoint) -> None:
        """Continue with the hosts of another process, whose agents are there. Nothing is brought to those.

        Raises:
            LaunchError: a host that was reached does not answer any more.
        """
        self._files.choose()  # for hosts that are started again
        self._separate_disks = bool(left.launcher["apart"])
        self._disks.find_again({host.node: host.connection for host in self._here}, dict(left.launcher["disks"]))
        for host in self._hosts:
            host.called = host.began = True
            host.tunnel = int(left.launcher["tunnels"].get(str(host.node), 0))
            host.tunnelled = bool(host.tunnel)
            if host.tunnel and host.away is None:
                with contextlib.suppress(LaunchError):  # the last one may be open still
                    host.connection.tunnel(left.address, left.port, host.tunnel)
                remote_agent.keep(host, self._connections, left.address, left.port)

    def begin_anew(self) -> None:
        """There is no run to be taken over: every agent is to be started.

        Raises:
            LaunchError: a host is away.
        """
        self._may_be_away = False
        for host in self._hosts:
            host.called = host.began = False
            if host.away is not None and not self._job.is_elastic:
                raise host.away

    def job_there(self) -> Job:
        """The job, and what workers must know of the hosts' disks."""
        if not self._separate_disks:
            return self._job
        return replace(self._job, environment={**self._job.environment, run_directory.SEPARATE_DISKS: "1"})

    # Agents.

    def start_agent(self, node: int, head: str, token: str) -> AgentProcess:
        """Start the agent of a host; once the run has begun, in the background, when the host can be reached."""
        host = self._hosts[node]
        if not host.called:
            host.called = True
            return self._start_agent(host, head, token) if host.away is None else NotThere()
        if host.away is not None and host.away.what != host.reported:
            host.reported = host.away.what
            self._display.warn(f"manyhosts: {host.away}\nmanyhosts: {host.name} is called again now and then")

        def come() -> AgentProcess:
            with host.being_called:
                try:
                    if host.away is not None or host.was_cut_off or not host.still_answers():
                        self._receive(host)
                    host.away = None
                    return self._start_agent(host, head, token)
                except ManyhostsError as error:
                    host.away = error
                    raise
                except OSError as error:
                    fix = f"look at that with `ssh {host.name}`"
                    host.away = LaunchError(f"host {host.name} was lost on its way: {error}", where="ssh", fix=fix)
                    raise host.away from None

        return DeferredAgent(come, lambda: host.connection.close())

    def _receive(self, host: Host) -> None:
        """See that a host fits that comes when the others have begun, and bring it what it needs.

        Raises:
            LaunchError: it is not there, or does not fit.
        """
        others = [other for other in self._hosts if other is not host and other.facts]
        host.connect_again(self._connections)
        host.was_cut_off = False
        self._see_that_they_agree({each.name: each.facts for each in (*others, host)})
        host.find_interface((others or [host])[0].facts["address"])
        self._see_encryption([host])
        # One that was there before has reached the others, and some of these may be away themselves now.
        met = [] if host.began else [other for other in others if other.away is None and other.connection.is_open]
        places = [(host.address, 0), *((other.address, self._ports[other.node]) for other in met)]
        names = [host.name, *(other.name for other in met)]
        version_check.check_connections(names, places, [["", *self._try_connections(host, met)]])
        self._files.see_that_none_has_changed()
        if not self._disks.find_late(host.node, host.connection):
            self._files.bring_to(host)
        self._files.see_script([host])
        self._see_disk(host)
        self._ports[host.node] = self._listen(host)

    def _see_disk(self, host: Host) -> None:
        """See that a host that comes late shares the run directory with the others, where they have begun with one."""
        if self._separate_disks:
            return
        others = {self._disks.of(other.node) for other in self._here if other is not host}
        if others and self._disks.of(host.node) not in others:
            raise LaunchError(
                f"host {host.name} has a run directory of its own, and the run has begun on hosts that share one",
                where=f"host {host.name}, {self._job.run_dir}",
                fix="start the run again while this host is there: it continues from its newest snapshot",
            )

    def _start_agent(self, host: Host, head: str, token: str) -> AgentProcess:
        again, host.began = host.began, True
        way: Tunnel | None = None
        if host.tunnelled:
            address, port = addresses.address_and_port(head)
            host.tunnel = host.connection.tunnel(address, port)
            way = remote_agent.keep(host, self._connections, address, port)
            head = addresses.place("127.0.0.1", host.tunnel)
        assert host.interface is not None, "it was surveyed"
        values = {
            "socket": host.connection.socket,
            "disk": f"{run_directory.DISK}={self._disks.of(host.node) if self._separate_disks else ''}",
            "python": host.facts["executable"],
            "head": head,
            "address": host.interface.address,
            "interface": host.interface.name,
            "process": str(host.facts.get("process", 0)),
            containers.SCRIPT: containers.script(),
        }
        agent = remote_agent.start(filled(self._agents[host.node], values), token, self._display, again=again)
        return agent if way is None else TunnelledAgent(agent, way)

    # The end.

    def close_tunnels(self) -> None:
        """Open none again: the agents have ended."""
        for host in self._hosts:
            for way in host.ways:
                way.close()

    def fetch_record(self) -> None:
        """Bring the run directory of the host that led here, and the logs of the others: each disk's once."""
        for words in run_files.fetch_record(self._job.run_dir, self._here, self._disks, self._connections):
            self._display.warn(words)

    def forget(self) -> None:
        """Leave nothing here that only the hosts have looked for."""
        self._disks.forget()


def agent_command(host: str, node: int, python: str, container: Container | None = None) -> tuple[str, ...]:
    """What starts the agent of `host` over its open connection; most of it is known when the host was surveyed."""
    words = [
        "env",
        Later("disk", f"{run_directory.DISK}=DISK"),
        *(Later("python", python), "-P", "-m", "manyhosts.control.agent.agent"),
        *("--head", HEAD, "--node", str(node)),
        *("--address", Later("address", "ADDRESS"), "--interface", Later("interface", "INTERFACE")),
        *("--launcher", Later("process", "PROCESS")),  # on that host; it ends with this side of the connection
    ]
    agent = Shell(words if container is None else container_options.planned(container, words))
    return tuple(connection.command(host, Later("socket", "ControlPath=SOCKET"), agent))
