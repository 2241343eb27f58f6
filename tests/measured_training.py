"""A small training that was measured, for tests that change one thing about it."""

from __future__ import annotations

import math

from manyhosts.planner.catalog import Machines
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Bucket, Compression, Compute, Measured, Network

MEASURED = Measured(
    compute=(
        Compute(samples=1, forward_s=0.1, backward_s=0.2, spread_s=0.0, activation_bytes=1000),
        Compute(samples=9, forward_s=0.9, backward_s=1.8, spread_s=0.0, activation_bytes=9000),
    ),
    update_s=0.05,
    step_other_s=0.01,
    buckets=(Bucket(bytes=400, ready=0.25), Bucket(bytes=600, ready=1.0)),
    parameter_bytes=1000,
    gradient_bytes=1000,
    optimizer_bytes=2000,
    buffer_bytes=16,
    loader_samples_per_second=math.inf,
    loader_processes=2,
    samples=64,
    global_batch=8,
    cores=64,
    compression={"bf16": Compression(arithmetic_s=0.0, reduced_bytes=500, gathered_bytes=0, exchanges=4)},
)
"""A pass of n samples takes n times 0.1 s forward and 0.2 s backward."""

INSTANT = Network(latency_s=0.0, bytes_per_second=1e30)


def group(nodes: int, each: int = 1, *, latency_s: float = 0.0, bytes_per_second: float = 1e30) -> Group:
    """Machines between which, and within which, a message takes as long."""
    network = Network(latency_s=latency_s, bytes_per_second=bytes_per_second)
    return Group(nodes=nodes, workers_per_node=each, between=network, within=network)


def machines(
    count: int, each: int = 1, *, network: Network = INSTANT, name: str = "", price: float | None = None
) -> Machines:
    """Machines with one network between them and within."""
    return Machines(name=name, count=count, workers=each, between=network, within=network, price=price)
