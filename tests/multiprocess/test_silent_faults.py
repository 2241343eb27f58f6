"""Faults of PyTorch's collectives that are silent over Gloo: which this version has, and that a new one is seen."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from manyhosts.doctor import exercise, network

pytestmark = pytest.mark.multiprocess


def found(rank: int, wrong: str) -> list[str]:
    """By four processes, of which a collective is made `wrong`."""
    dist.init_process_group("gloo")
    average, scatter = dist.all_reduce, dist.reduce_scatter

    def summing(tensor: Tensor, op: object = dist.ReduceOp.SUM) -> None:
        average(tensor, op=dist.ReduceOp.SUM)

    def wrong_sums(output: Tensor, parts: list[Tensor]) -> None:
        scatter(output, parts)
        output += 1

    def many_bytes(output: Tensor, parts: list[Tensor]) -> None:
        for _ in range(dist.get_world_size()):
            scatter(output, parts)

    changed = {"average": ("all_reduce", summing), "reduce_scatter": ("reduce_scatter", wrong_sums),
               "reduce_scatter bytes": ("reduce_scatter", many_bytes)}  # fmt: skip
    if wrong:
        setattr(dist, *changed[wrong])
    return exercise.silent_faults(rank, dist.get_world_size())


def test_faults_of_this_version_are_known_and_those_of_others_are_seen() -> None:
    now = run_ranks(4, found, "")
    assert now[1:] == now[:-1], "all processes see the same"
    assert set(now[0]) <= network.FAULTS.keys()
    for wrong in ("average", "reduce_scatter", "reduce_scatter bytes"):
        assert all(wrong in each for each in run_ranks(4, found, wrong)), wrong
