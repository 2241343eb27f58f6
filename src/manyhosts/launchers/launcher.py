"""Which engines there are."""

from __future__ import annotations

from manyhosts.launchers.engine import Engine
from manyhosts.table import Table

LAUNCHERS: Table[type[Engine]] = Table(
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
