"""Workers on this machine, on one node or on several that are rehearsed here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from manyhosts.cluster.ports import Range, needed
from manyhosts.control import variables
from manyhosts.control.agent.head_connection import inherited
from manyhosts.control.display import Display
from manyhosts.control.head.head import Head
from manyhosts.control.head.placement import AgentProcess
from manyhosts.control.job import Job, Plan
from manyhosts.errors import ConfigError
from manyhosts.hosts.ports import see_that_enough_are_free
from manyhosts.launchers import choices

_ADDRESS = "127.0.0.1"


class Local:
    """Starts one agent per node, all of them here."""

    OPTIONS: ClassVar[Mapping[str, str]] = {}

    def plan(self, job: Job) -> Plan:
        """One agent per node; several nodes are named node0, node1, …

        Raises:
            ConfigError: other hosts are named, or an option is given.
        """
        choices.check("local", replace(job, encrypt=False), self.OPTIONS)  # nothing leaves this machine
        if job.hosts:
            what = f"local runs on this machine alone, and hosts are named: {', '.join(job.hosts)}"
            raise ConfigError(what, where="--hosts", fix="leave --on out, or use --on ssh or --on mpi")
        hosts = [f"node{node}" for node in range(job.nodes)] if job.nodes > 1 else [socket.gethostname().split(".")[0]]
        return Plan(
            job=job,
            hosts=tuple(hosts),
            agents=tuple(_agent_command(node, "fd:NUMBER") for node in range(job.nodes)),
            workers=variables.of_all(job, address=_ADDRESS),
        )

    def submit(self, plan: Plan, display: Display) -> int:
        """Run the job to its end, with this process as the head.

        Raises:
            ConfigError: the run directory cannot be made.
        LaunchError: `--ports` has too few that are free.
            ManyhostsError: workers failed; the error is that of the one that failed first.
        """
        job = plan.job
        see_that_enough_are_free(_ADDRESS, Range.of(job.ports), needed(job.workers))
        try:
            plan.job.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise ConfigError(
                f"cannot make the run directory: {cause.strerror}",
                where=str(plan.job.run_dir),
                fix="give another --run-dir, on a disk that is writable and not full",
            ) from cause
        return Head(
            plan.job, plan.hosts, _nowhere_else, display, address=_ADDRESS, start_here=_start_agent, ways_are_known=True
        ).run()


def run(job: Job, display: Display) -> int:
    """Run `job` on this machine. Returns 0, or 130 if it was interrupted.

    Raises:
        ManyhostsError: workers failed; the error is that of the one that failed first.
    """
    launcher = Local()
    return launcher.submit(launcher.plan(job), display)


def _agent_command(node: int, head: str) -> tuple[str, ...]:
    words = [sys.executable, "-P", "-m", "manyhosts.control.agent.agent", "--head", head, "--node", str(node)]
    return (*words, "--address", _ADDRESS, *(["--stdin"] if node == 0 else []))


def _start_agent(node: int, connection: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        (*_agent_command(node, inherited(connection)), "--launcher", str(os.getpid())),
        env={**os.environ, **variables.of_one_machine(os.environ)},
        stdin=None if node == 0 else subprocess.DEVNULL,  # the first worker reads what this process was given
        pass_fds=(connection.fileno(),),
        start_new_session=True,  # Ctrl-C reaches the head alone, which then asks the workers
    )


def _nowhere_else(node: int, head: str, token: str) -> AgentProcess:
    raise AssertionError(f"node {node} is on this machine, as all of them are")
