"""What every launcher can do, and which there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from manyhands.launchers.display import Display
from manyhands.launchers.job import Job, Plan
from manyhands.table import Table


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
            ManyhandsError: workers failed; the error is that of the one that failed first.
        """


LAUNCHERS: Table[type[Launcher]] = Table(
    kind="target",
    group="manyhands.launchers",
    own={
        "kubernetes": "manyhands.launchers.kubernetes.kubernetes:Kubernetes",
        "local": "manyhands.launchers.local:Local",
        "mpi": "manyhands.launchers.mpi:Mpi",
        "ray": "manyhands.launchers.ray:Ray",
        "sagemaker": "manyhands.launchers.sagemaker.sagemaker:SageMaker",
        "ssh": "manyhands.launchers.ssh.ssh:Ssh",
        "slurm": "manyhands.launchers.slurm.slurm:Slurm",
    },
)
