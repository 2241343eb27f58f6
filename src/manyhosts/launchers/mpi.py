"""Agents started by Open MPI's mpirun. It only starts them: PyTorch's wheels have no MPI backend, Gloo and NCCL do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from manyhosts.control.job import Job
from manyhosts.errors import ConfigError
from manyhosts.launchers import container_options
from manyhosts.launchers.engine import Engine

_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")


class Mpi(Engine):
    """Has mpirun start one agent per host, with this process as their head."""

    NAME = "mpi"
    OPTIONS: ClassVar[Mapping[str, str]] = {
        "mpirun": "the mpirun to call, if it is not the first on the PATH",
        "python": "the Python on every host, or in the container, if it is not where it is here",
        "mca": "one parameter of Open MPI more: NAME:VALUE",
        **container_options.options(container_options.ON_HOSTS),
    }
    RUNTIMES = container_options.ON_HOSTS
    TASK_VARIABLES = ("OMPI_*", "PMIX_*", "PMI_*", "PRTE_*")
    ENVIRONMENT: ClassVar[Mapping[str, str]] = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }

    def hosts(self, job: Job) -> Sequence[str]:
        """Those that are named, in this order; this machine where none is.

        Raises:
            ConfigError: one is named twice, or is none that mpirun takes.
        """
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
        return hosts

    def command(self, job: Job, hosts: Sequence[str], nodes: Sequence[int]) -> Sequence[str]:
        """One mpirun with a part for each host: its own ranks begin with this machine, however hosts are named."""
        name, _, value = job.options.get("mca", "").partition(":")
        command = [
            job.options.get("mpirun", "mpirun"),
            *("--bind-to", "none"),  # or every worker of a host shares the one core of its agent
            *("--mca", "plm_rsh_agent", "ssh"),
            *("--mca", "orte_abort_on_non_zero_status", "0"),  # or it kills the other agents while they tidy up
            *(("--mca", name, value) if name else ()),
        ]
        passed_on = [name for name in _PASSED_ON if name in self._present]  # mpirun complains of others
        for number, node in enumerate(nodes):
            command += [":"] if number else []
            command += ["-np", "1", "--host", f"{hosts[node]}:1"]
            for variable in passed_on:
                command += ["-x", variable]
            command += self.agent(job, [node])
        return command
