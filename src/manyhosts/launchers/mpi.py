"""Agents started by Open MPI's mpirun. It only starts them: PyTorch's wheels have no MPI backend, Gloo and NCCL do."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from manyhosts.control import variables
from manyhosts.control.agent.agent import TOKEN
from manyhosts.control.display import Display
from manyhosts.control.head.head import Head
from manyhosts.control.head.placement import Placement
from manyhosts.control.job import Job, Plan
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.hosts import addresses
from manyhosts.launchers import choices

OPTIONS = {
    "mpirun": "the mpirun to call, if it is not the first on the PATH",
    "python": "the Python on every host, if it is not where it is here",
    "mca": "one parameter of Open MPI more: NAME:VALUE",
}
"""What -o takes."""
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")


class Mpi:
    """Has mpirun start one agent per host, with this process as their head."""

    OPTIONS = OPTIONS

    def plan(self, job: Job) -> Plan:
        """One mpirun for all agents; ranks go by the order in which the hosts were named.

        Raises:
            ConfigError: a host is named twice, or an option is unknown.
        """
        choices.check("mpi", job, OPTIONS)
        hosts = job.hosts or ("localhost",)
        if unfit := [host for host in hosts if ":" in host or "@" in host]:
            raise ConfigError(
                f"mpirun takes names and IPv4 addresses alone, and a host is {unfit[0]!r}",
                where="--hosts",
                fix="give it a name in /etc/hosts, and its User and Port in ~/.ssh/config",
            )
        if len(hosts) != job.nodes or len(set(hosts)) != len(hosts):
            raise ConfigError(
                f"{job.nodes} nodes on the hosts {', '.join(hosts)}",
                where="--on mpi",
                fix="name every host once: --hosts a,b,c; --workers-per-node gives a host several workers",
            )
        everybody = range(len(hosts))
        return Plan(
            job=job,
            hosts=hosts,
            agents=tuple(_agent_words(job, "ADDRESS:PORT", node) for node in everybody),
            workers=variables.of_all(job),
            command=tuple(_command(job, hosts, everybody, "ADDRESS:PORT")),
        )

    def submit(self, plan: Plan, display: Display) -> int:
        """Run the job to its end.

        Raises:
            LaunchError: there is no mpirun, or a host was not reached.
            ManyhostsError: workers failed; the error is that of the one that failed first.
        """
        if shutil.which(plan.command[0]) is None:
            raise LaunchError(
                f"there is no {plan.command[0]} on this machine",
                where="PATH",
                fix="install Open MPI (openmpi-bin on Debian), or name it: -o mpirun=/path/to/mpirun",
            )
        job, hosts = plan.job, plan.hosts
        passed_on = [name for name in _PASSED_ON if name in os.environ]  # mpirun complains of others
        placement = Placement(
            len(hosts),
            lambda nodes, head: _command(job, hosts, nodes, head, passed_on),
            {TOKEN: "TOKEN", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        )
        return Head(job, hosts, placement.start_agent, display, address=addresses.towards(hosts)).run()


def _command(
    job: Job, hosts: Sequence[str], nodes: Sequence[int], head: str, passed_on: Sequence[str] = ()
) -> list[str]:
    """One command with a part for each host: mpirun's own ranks begin with this machine, however hosts are named."""
    name, _, value = job.options.get("mca", "").partition(":")
    command = [
        job.options.get("mpirun", "mpirun"),
        *("--bind-to", "none"),  # or every worker of a host shares the one core of its agent
        *("--mca", "plm_rsh_agent", "ssh"),
        *("--mca", "orte_abort_on_non_zero_status", "0"),  # or it kills the other agents while they tidy up
        *(("--mca", name, value) if name else ()),
    ]
    for number, node in enumerate(nodes):
        command += [":"] if number else []
        command += ["-np", "1", "--host", f"{hosts[node]}:1"]
        for variable in (TOKEN, *passed_on):
            command += ["-x", variable]  # its value stands in no command line
        command += _agent_words(job, head, node)
    return command


def _agent_words(job: Job, head: str, node: int) -> tuple[str, ...]:
    python = job.options.get("python", sys.executable)
    return (python, "-P", "-m", "manyhosts.control.agent.node", "--head", head, "--nodes", str(node))
