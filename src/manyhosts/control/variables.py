"""The environment of a worker: exactly what torchrun promises to scripts, and a few defaults of ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhosts.cluster import membership, store_line
from manyhosts.control.job import Job

RUN_DIR = "MANYHOSTS_RUN_DIR"
"""What an agent shows that it belongs to the run by."""
NOT_RESUMED = "MANYHOSTS_NOT_RESUMED"
"""Set for a command of ours that a user never types: it says no line to resume with."""
FIRST = "MANYHOSTS_FIRST"
"""Names modules whose `begin()` a worker calls before its script."""
CHOSEN_AT_START = "(chosen at the start)"

OF_ONE_WORKER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
"""Variables in which workers differ: one value for all of them would be wrong."""
OVERRULED = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"),
)
"""Defaults for a worker's variables, unless the user has said otherwise (`--env`)."""


def of_worker(
    job: Job,
    *,
    node: int,
    local_rank: int,
    generation: int,
    store: tuple[str, int | str],
    agent_store: bool = True,
    listens: bool = True,
) -> dict[str, str]:
    """The variables that torchrun would set for this worker. `generation` counts how often the workers were started.

    `agent_store`: it need not open the store itself. `listens`: nor ask for it before it uses it.
    """
    rank = job.first_rank(node) + local_rank
    address, port = store
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(node),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(job.workers),
        "LOCAL_WORLD_SIZE": str(job.workers_on(node)),
        "GROUP_WORLD_SIZE": str(job.nodes),
        "ROLE_WORLD_SIZE": str(job.workers),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "TORCHELASTIC_MAX_RESTARTS": str(job.restarts),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(agent_store),
        store_line.PORT: str(port),
        **({} if listens else {store_line.SHUT: "1"}),
        **{name: value for name, value in job.environment.items() if name in OVERRULED},
    }


def of_all(job: Job, *, address: str = CHOSEN_AT_START) -> tuple[Mapping[str, str], ...]:
    """What is known of every worker's variables, by rank, before there is a store at `address`."""
    places = [(node, local_rank) for node in range(job.nodes) for local_rank in range(job.workers_on(node))]
    store = (address, CHOSEN_AT_START)
    return tuple(of_worker(job, node=node, local_rank=rank, generation=0, store=store) for node, rank in places)


def of_member(job: Job, *, member: int, late: bool, layout: Mapping[str, Any]) -> dict[str, str]:
    """What a worker needs to continue when others are lost, or to come to them while they train.

    `layout`: how those make copies of a model, and which part of one it is to have; empty where each has all of it.
    """
    if not job.recovers:
        return {}
    joins = {membership.JOINS: "1"} if late else {}
    return {membership.MEMBER: str(member), **joins, **({membership.PART: json.dumps(layout)} if layout else {})}


def of_host(present: Mapping[str, str], *, cores: int, workers: int) -> dict[str, str]:
    """Defaults for all workers of a host, as far as the user has not set them.

    Threads: the cores of the host are shared out, so that workers do not fight for them (torchrun gives each one).
    Errors come without C++ frames, and without the seconds it takes to look their symbols up.
    Sets of strings have one order on all hosts and in each start: classes that are numbered by one keep their numbers.
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // workers)),
        "PYTHONHASHSEED": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_SHOW_CPP_STACKTRACES": "0",
        "TORCH_DISABLE_ADDR2LINE": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs must not start CUDA in what is forked later
    }
    return {name: value for name, value in defaults.items() if name not in present}


def of_one_machine(present: Mapping[str, str]) -> dict[str, str]:
    """For workers that are all on this machine: Gloo need not look up the host's name, which may have no address."""
    if "GLOO_SOCKET_IFNAME" in present or not (sys.platform == "linux" and Path("/sys/class/net/lo").exists()):
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo"}
