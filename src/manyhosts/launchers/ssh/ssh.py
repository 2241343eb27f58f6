"""Workers on hosts that ssh reaches, all started from this terminal."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from manyhosts.control import tls, variables
from manyhosts.control.display import Display
from manyhosts.control.head import takeover
from manyhosts.control.head.run import Head
from manyhosts.control.job import Job
from manyhosts.control.plan import Plan
from manyhosts.errors import ConfigError, ManyhostsError
from manyhosts.hosts import containers, remote_probe
from manyhosts.hosts.connection import Connection
from manyhosts.hosts.containers import Container
from manyhosts.launchers import container_options
from manyhosts.launchers.engine import Engine
from manyhosts.launchers.ssh.cluster import Cluster, agent_command


class Ssh(Engine):
    """Starts one agent per host through the system's ssh, and is their head."""

    NAME = "ssh"
    OPTIONS: ClassVar[Mapping[str, str]] = {
        "python": "the Python on every host, or in the container, if it is not where it is here",
        **container_options.options(container_options.ON_HOSTS),
    }
    RUNTIMES = container_options.ON_HOSTS
    ENCRYPTS = True
    SHARES_DISK = False
    USES_SSH = True

    def plan(self, job: Job) -> Plan:
        """One agent per host; ranks go by the order in which the hosts were named.

        Raises:
            ConfigError: no hosts are named, one is named twice, or an option is unknown.
        """
        job = self.check(job)
        _check_hosts(job)
        container = self.container(job)
        agents = (agent_command(host, node, self.python(job), container) for node, host in enumerate(job.hosts))
        files = {} if container is None else containers.files()
        return Plan(job=job, hosts=job.hosts, agents=tuple(agents), workers=variables.of_all(job), files=files)

    def submit(self, plan: Plan, display: Display) -> int:
        """Reach all hosts, see that they agree, bring the working directory, and run the job to its end."""
        job = plan.job
        left = takeover.left_for(job)
        tls.prepare()
        container = self.container(job)
        with connected(plan.hosts, pythons(job), container=container) as hosts:
            away = left is not None
            cluster = Cluster(job, hosts, display, agents=plan.agents, may_be_away=away, container=container)
            cluster.survey()
            display.warn(cluster.in_words())
            try:
                if left is not None:
                    with contextlib.suppress(takeover.NobodyCame):
                        return _take_over(cluster, plan, display, left)
                    display.warn("manyhosts: no host has kept its workers: the run starts again")
                    cluster.begin_anew()
                cluster.bring_files()
                return _run(cluster, plan, display)
            finally:
                cluster.forget()


def _take_over(cluster: Cluster, plan: Plan, display: Display, left: takeover.HeadCheckpoint) -> int:
    """Continue with a run whose command was killed.

    Raises:
        NobodyCame: no host has kept its workers.
    """
    gone = cluster.gone(left)
    if len(gone) == len(plan.hosts):
        raise takeover.no_agents(plan.job.run_dir)
    display.warn("manyhosts: the command that started this run is gone; this one takes it over")
    cluster.restore(left)
    return _run(cluster, plan, display, left, gone)


def _run(
    cluster: Cluster,
    plan: Plan,
    display: Display,
    left: takeover.HeadCheckpoint | None = None,
    gone: Sequence[int] = (),
) -> int:
    nobody_came = False
    try:
        return Head(
            cluster.job_there(),
            plan.hosts,
            cluster.start_agent,
            display,
            address=cluster.head_address,
            ways_are_known=True,
            succession=takeover.TakeoverConfig(job=plan.job, facts=cluster.facts, left=left, gone=gone),
        ).run()
    except takeover.NobodyCame:
        nobody_came = True
        raise
    finally:
        cluster.close_tunnels()
        try:
            if not nobody_came:
                cluster.fetch_record()
        except ManyhostsError as trouble:  # what the user gets is how the run itself ended
            display.warn(f"manyhosts: the record stays on the hosts, in {plan.job.run_dir}: {trouble.what}")


def pythons(job: Job) -> list[str]:
    """The Pythons that are tried on every host, in this order."""
    if "python" in job.options:
        return [job.options["python"]]
    return [*container_options.PYTHONS] if container_options.IMAGE in job.options else [sys.executable, "python3"]


def _place_of_sockets() -> str | None:
    """Where ssh's sockets go: not where TMPDIR has what ssh reads otherwise in a path, or leaves no room for a name."""
    place = tempfile.gettempdir()
    return None if re.fullmatch(r"[\w./+-]{1,60}", place) else "/tmp"  # noqa: S108  # the folder has a name of its own


@contextmanager
def connected(
    names: Sequence[str], pythons: Sequence[str], program: bytes = b"", container: Container | None = None
) -> Iterator[list[Connection]]:
    """Connections to all hosts, with regular signs of life from this side.

    `program` is what answers there, in place of a remote probe; `container` is what it runs in, if in any.
    """
    over = threading.Event()
    with tempfile.TemporaryDirectory(prefix="manyhosts-ssh-", dir=_place_of_sockets()) as folder:
        hosts = [Connection(name, Path(folder), pythons, program, container) for name in names]

        def pulse() -> None:
            while not over.wait(remote_probe.PULSE_S):
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


def _check_hosts(job: Job) -> None:
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
