"""Workers on hosts that ssh reaches, all started from this terminal."""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, ClassVar, TypeVar

from manyhands import __version__
from manyhands.errors import ConfigError, LaunchError
from manyhands.launchers import interfaces, variables
from manyhands.launchers.display import Display
from manyhands.launchers.head.head import Head
from manyhands.launchers.interfaces import Interface
from manyhands.launchers.job import Job, Plan
from manyhands.launchers.ssh import agreement as ssh_agreement
from manyhands.launchers.ssh import outpost as ssh_outpost
from manyhands.launchers.ssh import sync
from manyhands.launchers.ssh.connection import Connection
from manyhands.records import run_directory
from manyhands.table import nearest

T = TypeVar("T")
_STILL_THERE_S = 8.0
"""How long a host has at the end of a run to say that it is there: one that was lost is not waited for long."""


class Ssh:
    """Starts one agent per host through the system's ssh, and is their head."""

    OPTIONS: ClassVar[Mapping[str, str]] = {"python": "the Python on every host, if it is not where it is here"}

    def plan(self, job: Job) -> Plan:
        """One agent per host; ranks go by the order in which the hosts were named.

        Raises:
            ConfigError: no hosts are named, one is named twice, or an option is unknown.
        """
        _check(job)
        agents = (
            ("ssh", host, _agent_words(job.options.get("python", sys.executable), "ADDRESS:PORT", node, None))
            for node, host in enumerate(job.hosts)
        )
        return Plan(job=job, hosts=job.hosts, agents=tuple(agents), workers=variables.of_all(job))

    def submit(self, plan: Plan, display: Display) -> int:
        """Reach all hosts, see that they agree, bring the working directory, and run the job to its end."""
        job = plan.job
        with connected(plan.hosts, pythons(job)) as hosts:
            cluster = _Cluster(job, hosts)
            cluster.survey()
            display.say(cluster.interfaces_in_words())
            cluster.bring_files()
            try:
                return Head(
                    cluster.job_there(),
                    plan.hosts,
                    cluster.start_agent,
                    display,
                    address=cluster.head_address,
                    ways_are_known=True,
                ).run()
            finally:
                cluster.fetch_record(display)


class _Cluster:
    """All hosts of one run, each with its connection."""

    def __init__(self, job: Job, hosts: Sequence[Connection]) -> None:
        self._job, self._hosts = job, hosts
        self._facts: list[dict[str, Any]] = []
        self._interfaces: list[Interface] = []
        self._share_record: list[bool] = []
        self._tunnelled: list[bool] = []
        self.head_address = ""

    def survey(self) -> None:
        """Ask every host what it is and whom it reaches.

        Raises:
            LaunchError: a host is not there, differs from this machine, or cannot reach another one.
            ConfigError: encryption is required, and a link has none.
        """
        self._facts = self._of_all(lambda host, _: host.facts())
        names = [host.host for host in self._hosts]
        ssh_agreement.see_that_they_agree(dict(zip(names, self._facts, strict=True)), ssh_agreement.here(__version__))
        self._find_interfaces()
        if self._job.encrypt:
            interfaces.require_encryption(dict(zip(names, self._interfaces, strict=True)))
        ports = self._of_all(lambda host, node: host.ask("listen", address=self._interfaces[node].address))
        with socket.create_server((self._choose_head_address(), 0), backlog=256) as waiting:
            places = [(each.address, port) for each, port in zip(self._interfaces, ports, strict=True)]
            places.append((self.head_address, waiting.getsockname()[1]))
            answers = self._of_all(lambda host, _: host.ask("knock", places=places))
        ssh_agreement.see_that_they_meet(names, places, [answer[:-1] for answer in answers])
        self._tunnelled = [bool(answer[-1]) or self.head_address == "127.0.0.1" for answer in answers]

    def interfaces_in_words(self) -> str:
        """Which interface each host uses, in one line."""
        by_name: dict[str, list[str]] = {}
        for host, one in zip(self._hosts, self._interfaces, strict=True):
            by_name.setdefault(one.name, []).append(f"{host.host} ({one.address})")
        return "\n".join(f"manyhands: {', '.join(hosts)} talk over {name}" for name, hosts in by_name.items())

    def bring_files(self) -> None:
        """Make the working directory on every host what it is here, where it is not the same one.

        Raises:
            LaunchError: a host did not take it, or has no such script.
        """
        folder, run_dir = self._job.folder, self._job.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        here = [ssh_outpost.stamp(str(path)) for path in (folder, run_dir)]
        stamps = self._of_all(lambda host, _: host.ask("stamp", paths=[str(folder), str(run_dir)]))
        self._share_record = [stamp[1] == here[1] for stamp in stamps]
        if self._job.sync:
            files = sync.files_to_bring(folder, leave_out=run_dir)
            self._of_all(
                lambda host, node: (
                    None
                    if stamps[node][0] == here[0]
                    else sync.bring(host, folder, files, with_rsync=self._has_rsync(node))
                )
            )
        if self._job.kind == "script":
            path = str(folder / self._job.program)
            there = self._of_all(lambda host, _: host.ask("exists", path=path))
            ssh_agreement.see_that_all_have(path, [host.host for host in self._hosts], there, synced=self._job.sync)

    def job_there(self) -> Job:
        """The job, and what workers must know of the hosts' disks."""
        if len(self._hosts) == 1 or all(self._share_record):
            return self._job
        return replace(self._job, environment={**self._job.environment, run_directory.APART: "1"})

    def start_agent(self, node: int, head: str, token: str) -> subprocess.Popen[bytes]:
        """Start the agent of a host. The token goes through ssh's standard input, where no other process sees it."""
        host = self._hosts[node]
        if self._tunnelled[node]:
            address, _, port = head.rpartition(":")
            head = f"127.0.0.1:{host.tunnel(address, int(port))}"
        words = _agent_words(self._facts[node]["executable"], head, node, self._interfaces[node])
        # No stream of ours: ssh has writes to a pipe fail instead of wait, also ours, and lines would be lost.
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        agent = subprocess.Popen(host.command(words), stdin=pipe, stdout=nothing, stderr=pipe, start_new_session=True)
        assert agent.stdin is not None, "it was asked for as a pipe"
        assert agent.stderr is not None, "it was asked for as a pipe"
        threading.Thread(target=_pass_on, args=(agent.stderr,), daemon=True).start()
        agent.stdin.write(f"{token}\n".encode())
        agent.stdin.close()
        return agent

    def fetch_record(self, display: Display) -> None:
        """Bring the run directory of the host that led here, and the logs of the others."""
        run_dir = self._job.run_dir
        have = self._who_has(str(run_dir / "summary.json"))
        # The first host; or, where the run went on without it and ended on another one's disk, that one.
        leader = have.index(True) if True in have else 0

        def fetch(host: Connection, node: int) -> str:
            if self._share_record[node]:
                return ""
            stays = f"manyhands: the record on {host.host} stays there, in {run_dir}"
            if have[node] is None:
                return f"{stays}: it does not answer"
            try:
                sync.fetch(host, run_dir, only="." if node == leader else "logs", with_rsync=self._has_rsync(node))
            except (LaunchError, OSError) as trouble:
                return f"{stays}: {trouble}".partition("\n")[0]
            return ""

        for words in filter(None, self._of_all(fetch)):
            display.say(words)

    def _who_has(self, path: str) -> list[bool | None]:
        """For every host whether `path` is there; None where it does not answer any more."""

        def has(host: Connection, node: int) -> bool | None:
            with contextlib.suppress(LaunchError, OSError):
                return bool(host.ask("exists", path=path, timeout_s=_STILL_THERE_S))
            return None

        return self._of_all(has)

    def _find_interfaces(self) -> None:
        """For every host, the interface that its routes to the first one lead through; for that, to the second."""
        addresses = [facts["address"] for facts in self._facts]
        targets = [addresses[1] if len(addresses) > 1 else addresses[0], *([addresses[0]] * (len(addresses) - 1))]
        ways = self._of_all(lambda host, node: host.ask("way", address=targets[node]))
        for host, facts, way, target in zip(self._hosts, self._facts, ways, targets, strict=True):
            found = interfaces.with_address(facts["interfaces"], way or facts["address"])
            if found is None:
                raise LaunchError(
                    f"host {host.host} has no route to {target}, where the others are",
                    where=f"host {host.host}",
                    fix="name the hosts by addresses of one network that all of them are on",
                )
            self._interfaces.append(found)

    def _choose_head_address(self) -> str:
        """Where this machine listens: the address that most hosts are talked to from."""
        ways = Counter(filter(None, (ssh_outpost.way_to(facts["address"]) for facts in self._facts)))
        self.head_address = ways.most_common(1)[0][0] if ways else "127.0.0.1"
        return self.head_address

    def _has_rsync(self, node: int) -> bool:
        return bool(self._facts[node]["rsync"]) and sync.rsync_here()

    def _of_all(self, ask: Callable[[Connection, int], T]) -> list[T]:
        """What `ask` gives for every host, all at the same time. The first trouble, by order of hosts, is raised."""
        with ThreadPoolExecutor(len(self._hosts)) as pool:
            return list(pool.map(ask, self._hosts, range(len(self._hosts))))


def pythons(job: Job) -> list[str]:
    """The Pythons that are tried on every host, in this order."""
    return [job.options["python"]] if "python" in job.options else [sys.executable, "python3"]


@contextmanager
def connected(names: Sequence[str], pythons: Sequence[str], program: bytes = b"") -> Iterator[list[Connection]]:
    """Connections to all hosts, which are told every now and then that this side is there.

    `program` is what answers there, in place of an outpost.
    """
    over = threading.Event()
    with tempfile.TemporaryDirectory(prefix="manyhands-ssh-") as folder:
        hosts = [Connection(name, Path(folder), pythons, program) for name in names]

        def pulse() -> None:
            while not over.wait(ssh_outpost.PULSE_S):
                for host in hosts:
                    host.pulse()

        pulsing = threading.Thread(target=pulse, daemon=True)
        pulsing.start()
        try:
            yield hosts
        finally:
            over.set()
            pulsing.join()
            for host in hosts:
                host.close()


def _pass_on(words: IO[bytes]) -> None:
    """Show what ssh and an agent have to say, until they have ended."""
    with words, contextlib.suppress(OSError, ValueError):
        for line in words:
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()


def _check(job: Job) -> None:
    if not job.hosts:
        raise ConfigError(
            "ssh needs to know the hosts", where="--on ssh", fix="name them: --hosts a,b,c or --hostfile F"
        )
    twice = [host for host, count in Counter(job.hosts).items() if count > 1]
    if twice:
        raise ConfigError(
            f"host {twice[0]} is named twice",
            where="--hosts",
            fix="use --workers-per-node for several workers on a host",
        )
    for key in job.options:
        if key not in Ssh.OPTIONS:
            known = "; ".join(f"{name}: {meaning}" for name, meaning in Ssh.OPTIONS.items())
            raise ConfigError(
                f"ssh has no option {key!r}", where=f"-o {key}", fix=f"{nearest(key, Ssh.OPTIONS)}known here: {known}"
            )


def _agent_words(python: str, head: str, node: int, interface: Interface | None) -> str:
    """What a host's shell is told, to start the agent."""
    words = [python, "-P", "-m", "manyhands.launchers.host.agent", "--head", head, "--node", str(node)]
    if interface is not None:
        words += ["--address", interface.address, "--interface", interface.name]
    return "exec " + shlex.join(words)
