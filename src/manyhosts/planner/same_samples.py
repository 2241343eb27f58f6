"""What strategies have in common whose workers compute the same samples, each its part of the model."""

from __future__ import annotations

from dataclasses import replace

from manyhosts.planner.compute import batch_of, slowdown
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Measured
from manyhosts.planner.step import Step, data_wait


def of_same_samples(measured: Measured, workers: int) -> Measured:
    """The training as each of `workers` has it where all read all samples of a batch."""
    return replace(measured, global_batch=batch_of(measured, workers), batch_grows=True)


def forward_share(measured: Measured) -> float:
    """Of the seconds of both passes."""
    largest = measured.compute[-1]
    return largest.forward_s / max(1e-12, largest.forward_s + largest.backward_s)


def step_of(same: Measured, group: Group, *, compute: float, exposed: float, updated: float) -> Step:
    """The step of workers that all compute for so long. `updated`: bytes of parameters that each of them updates in it.

    What varies from one worker to the next is not in it: they wait for each other within every pass.
    """
    slower = slowdown(same, group)
    update = slower * same.update_s * updated / max(1, same.parameter_bytes)
    other = slower * same.step_other_s
    other_s = compute + exposed + update + other
    return Step(
        compute=compute,
        straggler=0.0,
        communication_exposed=exposed,
        data_wait=data_wait(same, group, other_s=other_s, busy_s=(compute + update + other) / slower),
        update=update,
        other=other,
    )
