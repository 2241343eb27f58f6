"""What every launcher can do, and which there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from manyhosts.control.display import Display
from manyhosts.control.job import Job, Plan
from manyhosts.table import Table


class Launcher(Protocol):
    """One way to start a job on hosts."""

    OPTIONS: ClassVar[Mapping[str, str]]
    """What `-o KEY=VALUE` may ask of it: key → what it means."""

    def plan(self, job: Job) -> Plan:
        """Decide everything, touch nothing: same job, same plan, on any machine."""

    def submit(self, plan: Plan, display: Display) -> int:
        """Carry `plan` out, to its end. Returns the exit code: 0, or 130 if it was interrupted.

        Raises:
            LaunchError: a host could not be reached, or refused.
            ManyhostsError: workers failed; the error is that of the one that failed first.
        """


LAUNCHERS: Table[type[Launcher]] = Table(
    kind="target",
    group="manyhosts.launchers",
    own={
        "join": "manyhosts.launchers.join:Join",
        "kubernetes": "manyhosts.launchers.kubernetes.kubernetes:Kubernetes",
        "local": "manyhosts.launchers.local:Local",
        "mpi": "manyhosts.launchers.mpi:Mpi",
        "ray": "manyhosts.launchers.ray:Ray",
        "sagemaker": "manyhosts.launchers.sagemaker.sagemaker:SageMaker",
        "ssh": "manyhosts.launchers.ssh.ssh:Ssh",
        "slurm": "manyhosts.launchers.slurm.slurm:Slurm",
    },
)
