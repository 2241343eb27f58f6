"""Rank, world size and local rank of this process, from the environment variables of `torchrun` and `manyhosts run`."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from manyhosts.errors import ConfigError

REHEARSING = "MANYHOSTS_REHEARSING"
"""Set where a script for GPUs runs without them: `torch.cuda` then answers for some that are not there."""
REHEARSED_GPUS = "MANYHOSTS_REHEARSED_GPUS"
"""What `CUDA_VISIBLE_DEVICES` is to say in a rehearsal; without it each worker of a host has a GPU of its own."""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The ranks of one worker. A process that was started by hand is alone: rank 0 of 1."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    head_address: str = ""
    """The address of the store of the workers' rendezvous."""
    head_port: int = 0
    restart: int = 0
    """How often the workers were started again."""
    run_id: str = ""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> Place:
        """Read torchrun's contract; or that of mpirun and srun, where the script was started by them directly.

        Raises:
            ConfigError: some of the variables are set and others that belong to them are not.
        """
        variables = os.environ if variables is None else variables
        if "RANK" not in variables and "WORLD_SIZE" not in variables:
            return cls._of_a_task(variables)
        size = _number(variables, "WORLD_SIZE")
        rank = _number(variables, "RANK")
        if not 0 <= rank < size:
            raise ConfigError(
                f"RANK is {rank}, but WORLD_SIZE is {size}",
                where="environment",
                fix="start it with `manyhosts run`, or give ranks from 0 to WORLD_SIZE - 1",
            )
        local_size = _number(variables, "LOCAL_WORLD_SIZE", default=1 if size == 1 else size)
        return cls(
            rank=rank,
            size=size,
            local_rank=_number(variables, "LOCAL_RANK", default=rank % local_size),
            local_size=local_size,
            node_rank=_number(variables, "GROUP_RANK", default=rank // local_size),
            head_address=variables.get("MASTER_ADDR", "") if size == 1 else _text(variables, "MASTER_ADDR"),
            head_port=_number(variables, "MASTER_PORT", default=0 if size == 1 else None),
            restart=_number(variables, "TORCHELASTIC_RESTART_COUNT", default=0),
            run_id=variables.get("TORCHELASTIC_RUN_ID", ""),
        )

    @classmethod
    def _of_a_task(cls, variables: Mapping[str, str]) -> Place:
        """The place of a process that a user's own `mpirun python train.py` or `srun python train.py` started."""
        if _number(variables, "OMPI_COMM_WORLD_SIZE", default=1) > 1:
            size, local_size = (_number(variables, f"OMPI_COMM_WORLD_{part}") for part in ("SIZE", "LOCAL_SIZE"))
            rank, local_rank = (_number(variables, f"OMPI_COMM_WORLD_{part}") for part in ("RANK", "LOCAL_RANK"))
            job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid", "")
            first_host = _LOOPBACK if local_size == size else ""
            node = rank // local_size
        elif _number(variables, "SLURM_STEP_NUM_TASKS", default=1) > 1 and "SLURM_PROCID" in variables:
            size, rank = _number(variables, "SLURM_STEP_NUM_TASKS"), _number(variables, "SLURM_PROCID")
            local_rank, node = _number(variables, "SLURM_LOCALID"), _number(variables, "SLURM_NODEID", default=0)
            nodes = _number(variables, "SLURM_STEP_NUM_NODES", default=1)
            local_size = -(-size // nodes)
            job = f"{variables.get('SLURM_JOB_ID', '')}.{variables.get('SLURM_STEP_ID', '')}"
            first_host = _LOOPBACK if nodes == 1 else _first_of(variables.get("SLURM_STEP_NODELIST", ""))
        else:
            return cls()
        address = variables.get("MASTER_ADDR", first_host)
        if not address:
            raise ConfigError(
                f"this is rank {rank} of {size} that mpirun has started on several hosts, which does not give the"
                " address of rank 0",
                where="environment",
                fix="start it with `manyhosts run --on mpi --hosts a,b`, or give mpirun -x MASTER_ADDR=HOST-OF-RANK-0",
            )
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=node,
            head_address=address,
            head_port=_number(variables, "MASTER_PORT", default=_port_of(job)),
            run_id=job,
        )


def _first_of(nodes: str) -> str:
    """The first host of what Slurm writes as `gpu[07-09,12],cpu1`."""
    found = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""


def _port_of(job: str) -> int:
    """The port of the rendezvous of the ranks of `job`: all reckon the same one, and two jobs seldom share one."""
    return 15_000 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4]) % 15_000  # below what systems hand out


def _text(variables: Mapping[str, str], name: str) -> str:
    if name not in variables:
        raise ConfigError(
            f"{name} is not set, so this process does not know its place",
            where="environment",
            fix="start it with `manyhosts run`, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
        )
    return variables[name]


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in variables and default is not None:
        return default
    text = _text(variables, name)
    try:
        return int(text)
    except ValueError as cause:
        what = f"{name} is {text!r}, which is no number"
        raise ConfigError(what, where="environment", fix=f"unset {name}") from cause
