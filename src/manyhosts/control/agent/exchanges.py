"""The process group of a script: taken down without harm, counted in its exchanges, and refused where it cannot be."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from typing import Any

from manyhosts.errors import ConfigError

_made: list[int] = []
"""The exchanges of groups that were taken down."""


def begin(distributed: Any) -> None:
    """Watch over the groups that `torch.distributed.distributed_c10d` makes. Once per worker, before its script."""
    _spare_groups(distributed)
    _look_at_mpi(distributed)


def made() -> int | None:
    """How many exchanges this worker has begun in the group of all; None where there was none, or it does not count."""
    if _made:
        return _made[-1]
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):
        if distributed is not None and distributed.is_initialized():
            return int(distributed._get_default_group()._get_sequence_number_for_group())
    return None


def _spare_groups(distributed: Any) -> None:
    """Run no destructor of a group that the script takes down, unless another one is made after it.

    At the end of a script Gloo's hung in 7 of 14 runs: it waits for threads that wait for peers which are gone. What is
    left of the group ends with the process. A script that goes on in another group is to keep no port, no connection
    and no thread of the one before: its destructor runs on a thread of its own, which may wait as long as it likes.
    """
    take_down, make = distributed.destroy_process_group, distributed.init_process_group
    spared: list[Any] = []

    @functools.wraps(take_down)
    def destroy_process_group(group: Any = None) -> None:
        if group is None and (count := made()) is not None:
            _made.append(count)
        spared.extend(distributed._world.pg_map)
        take_down(group)

    @functools.wraps(make)
    def init_process_group(*arguments: Any, **named: Any) -> Any:
        group = make(*arguments, **named)
        if spared:
            groups = spared.copy()
            spared.clear()  # first, so that the last references are the other thread's
            threading.Thread(target=groups.clear, name="manyhosts-groups", daemon=True).start()
        return group

    _put(distributed, "destroy_process_group", destroy_process_group)
    _put(distributed, "init_process_group", init_process_group)


def _look_at_mpi(distributed: Any) -> None:
    """Say in a sentence why the MPI backend of torch is not to be had; where torch has it, see that it knows all.

    MPI takes its ranks from mpirun. A worker that mpirun knows nothing of is alone in its group, and trains alone.
    """
    make = distributed.init_process_group
    gloo = "give it 'gloo' on CPUs or 'nccl' on GPUs"

    @functools.wraps(make)
    def init_process_group(backend: Any = None, *arguments: Any, **named: Any) -> Any:
        by_mpi = str(backend or "").lower() == "mpi"
        if by_mpi and not distributed.is_mpi_available():
            raise ConfigError(
                "this torch has no MPI backend: PyTorch's wheels come without",
                where="torch.distributed.init_process_group",
                fix=f"{gloo}; `--on mpi` has mpirun start the hosts with either",
            )
        group = make(backend, *arguments, **named)
        known, workers = int(distributed.get_world_size()) if by_mpi else 0, os.environ.get("WORLD_SIZE", "1")
        if by_mpi and known != int(workers):
            raise ConfigError(
                f"mpirun knows {known} of the {workers} workers, and the MPI backend takes its ranks from it",
                where="torch.distributed.init_process_group",
                fix=f"{gloo}; or `--on mpi` with one worker per node; or start the script with mpirun itself",
            )
        return group

    _put(distributed, "init_process_group", init_process_group)


def _put(distributed: Any, name: str, replacement: Any) -> None:
    for module in (distributed, sys.modules["torch.distributed"]):  # the second takes it from the first, if not yet
        vars(module)[name] = replacement
