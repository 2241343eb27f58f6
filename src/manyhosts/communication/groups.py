"""What differs between the backends of torch.distributed: to gather rows without a copy, and to cut exchanges off."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_rows(rows: Tensor, own: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    """Begin to fill `rows`, shape (workers, …), with what every worker of `group` has in `own`; both contiguous."""
    if rows.is_cpu:  # Gloo wants each row by itself
        work: dist.Work = dist.all_gather(list(rows.unbind(0)), own, group=group, async_op=True)
    else:  # a list would be filled by way of a copy; PyTorch 2.13 has given the function another name
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(rows.view(-1), own.view(-1), group=group, async_op=True)
    return work


def abort_groups(of: torch.device) -> None:
    """Cut off what is under way between workers, on devices of the kind of `of`.

    PyTorch's own function for it also forgets the groups, while another thread may be using them.
    """
    known = dist.distributed_c10d._world.pg_names
    ordered = sorted(known, key=lambda group: known[group], reverse=True)
    backend: Any = None
    with suppress(RuntimeError):
        backend = ordered[-1]._get_backend(of)
    together = hasattr(backend, "_group_start")  # NCCL's communicators, which else may wait for each other
    if together:
        backend._group_start()
    for group in ordered:
        group.abort()
    if together:
        backend._group_end()


_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def live_without_others() -> str:
    """Have PyTorch not end a worker whose neighbour is gone. Returns what to say of the user's own choice, if anything.

    Not even its mildest way of handling may stay: it cuts exchanges off by itself, which leaves no mark. See
    `World.confirm`. Called before a group is formed, which reads the variable.
    """
    chosen = os.environ.get(_HANDLING, "0")
    os.environ[_HANDLING] = "0"
    if chosen in ("0", "1"):  # 1 is what launchers give: torchrun, and we
        return ""
    return (
        f"{_HANDLING}={chosen} has PyTorch cut workers off when another is lost; here they continue without it, so it "
        "is 0 in this run; started by torchrun or srun, workers have it as you set it"
    )
