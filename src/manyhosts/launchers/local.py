"""Workers on this machine, on one node or on several that are rehearsed here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from manyhosts.cluster.ports import Range, needed
from manyhosts.control import variables
from manyhosts.control.agent.head_connection import inherited
from manyhosts.control.display import Display
from manyhosts.control.head.run import Head
from manyhosts.control.head.state import AgentProcess
from manyhosts.control.job import Job
from manyhosts.control.plan import Later, Plan, filled
from manyhosts.errors import ConfigError
from manyhosts.hosts import addresses
from manyhosts.hosts.ports import see_that_enough_are_free
from manyhosts.launchers.engine import Engine

CONNECTION = Later("connection", "fd:NUMBER")
"""The end of a pair of sockets that an agent is born with."""


class Local(Engine):
    """Starts one agent per node, all of them here."""

    NAME = "local"
    ENCRYPTS = True  # nothing leaves this machine
    SHARES_DISK = False  # there is none to be seen to

    def plan(self, job: Job) -> Plan:
        """One agent per node; several nodes are named node0, node1, …

        Raises:
            ConfigError: other hosts are named, or an option is given.
        """
        job = self.check(job)
        if job.hosts:
            what = f"local runs on this machine alone, and hosts are named: {', '.join(job.hosts)}"
            raise ConfigError(what, where="--hosts", fix="leave --on out, or use --on ssh or --on mpi")
        hosts = [f"node{node}" for node in range(job.nodes)] if job.nodes > 1 else [socket.gethostname().split(".")[0]]
        return Plan(
            job=job,
            hosts=tuple(hosts),
            agents=tuple(_agent_command(node) for node in range(job.nodes)),
            workers=variables.of_all(job, address=addresses.LOOPBACK),
            environment=variables.of_one_machine(self._present),
        )

    def address(self, plan: Plan) -> str:
        """Loopback: no other machine is to reach it."""
        return addresses.LOOPBACK

    def submit(self, plan: Plan, display: Display) -> int:
        """Run the job to its end, with this process as the head.

        Raises:
            ConfigError: the run directory cannot be made.
            LaunchError: `--ports` has too few that are free.
            ManyhostsError: workers failed; the error is that of the one that failed first.
        """
        job = plan.job
        see_that_enough_are_free(addresses.LOOPBACK, Range.of(job.ports), needed(job.workers))
        try:
            job.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise ConfigError(
                f"cannot make the run directory: {cause.strerror}",
                where=str(job.run_dir),
                fix="give another --run-dir, on a disk that is writable and not full",
            ) from cause

        def start_here(node: int, connection: socket.socket) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                filled(plan.agents[node], {"connection": inherited(connection), "launcher": str(os.getpid())}),
                env={**os.environ, **plan.environment},
                stdin=None if node == 0 else subprocess.DEVNULL,  # the first worker reads what this process was given
                pass_fds=(connection.fileno(),),
                start_new_session=True,  # Ctrl-C reaches the head alone, which then asks the workers
            )

        return Head(
            job,
            plan.hosts,
            _nowhere_else,
            display,
            address=addresses.LOOPBACK,
            start_here=start_here,
            ways_are_known=True,
        ).run()


def _agent_command(node: int) -> tuple[str, ...]:
    words = (sys.executable, "-P", "-m", "manyhosts.control.agent.agent", "--head", CONNECTION, "--node", str(node))
    stdin = ("--stdin",) if node == 0 else ()
    return (*words, "--address", addresses.LOOPBACK, *stdin, "--launcher", Later("launcher", "PROCESS"))


def _nowhere_else(node: int, head: str, token: str) -> AgentProcess:
    raise AssertionError(f"node {node} is on this machine, as all of them are")
