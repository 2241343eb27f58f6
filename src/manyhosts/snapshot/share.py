"""Which worker writes which tensors of a state that all workers have."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def share_out(tensors: Mapping[str, Tensor], workers: int) -> list[dict[str, Tensor]]:
    """The tensors of each worker, about equal in bytes: the largest first, each to whoever has least so far.

    Looks at sizes and order only, so every worker that has the same state comes to the same answer.
    """
    shares: list[dict[str, Tensor]] = [{} for _ in range(workers)]
    loads = [0] * workers
    for name in sorted(
        tensors, key=lambda name: -tensors[name].nbytes
    ):  # sorting is stable: equal ones keep their order
        least = loads.index(min(loads))
        shares[least][name] = tensors[name]
        loads[least] += tensors[name].nbytes
    return shares
