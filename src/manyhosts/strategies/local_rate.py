"""The learning rate of workers that step alone, each with its part of the batch.

An adaptive optimizer (Adam and its relatives) divides the gradient by the root of its mean square. Where that is mostly
noise, the root grows as the batch shrinks: on an nth part of the batch it is √n times as large, and each step goes only
1/√n as far in the direction that all agree on. The mean over n workers takes the noise away, but does not give that
back: the run learns as if its rate were too small. √n times the rate does, and the mean then has the noise of a step
of one process.

Source: the square root rule for adaptive optimizers, Malladi, Lyu, Panigrahi and Arora 2022, "On the SDEs and Scaling
Rules for Adaptive Gradient Algorithms", arXiv:2205.10287, read from the large batch to the small one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, optim

ADAPTIVE: tuple[type[optim.Optimizer], ...] = (
    optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop, optim.Adagrad,
)  # fmt: skip
"""torch's optimizers whose step does not grow with the gradient. Adadelta's unit is its own, and not a rate."""

_SQUARES = {"exp_avg_sq": 1.0, "max_exp_avg_sq": 1.0, "square_avg": 1.0, "sum": 1.0, "exp_inf": 0.5}
"""What those optimizers call what they divide by, and which power of a gradient's square it grows with."""


def factor(rule: str | None, optimizer: object, count: int) -> float:
    """What the learning rate of `optimizer` is multiplied by where `count` step alone; `rule` as in `LocalSGD`."""
    return math.sqrt(count) if applies(rule, optimizer) else 1.0


def applies(rule: str | None, optimizer: object) -> bool:
    """Whether the rate of `optimizer` is multiplied by anything."""
    return rule == "sqrt" or (rule == "auto" and isinstance(optimizer, ADAPTIVE))


@torch.no_grad()
def expect_noise(optimizer: optim.Optimizer, by: float) -> None:
    """Let `optimizer` expect squared gradients that are `by` times as large as those it has seen.

    It remembers the mean square of a thousand gradients or so. Where others step together from now on than before, that
    mean is of the noise of another part of the batch: divided by its root, √n times the rate would be up to √n times
    too much until the mean has followed. With both multiplied, the first step is as long as those before it.
    """
    for state in optimizer.state.values():
        for name, power in _SQUARES.items():
            if isinstance(state, dict) and isinstance(value := state.get(name), Tensor):
                value.mul_(by**power)


@contextmanager
def multiplied(optimizer: optim.Optimizer, by: float, *, decay: bool = True) -> Iterator[None]:
    """Within, every group's learning rate is `by` times what it is.

    Args:
        decay: Whether weights decay with it, where the optimizer multiplies its weight decay by the rate. If not, they
            decay as before.
    """
    before = [(group["lr"], group.get("weight_decay")) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * by
        # AdamW, and what says so, decays by the rate times `weight_decay`, and not by way of the gradient.
        if not decay and (isinstance(optimizer, optim.AdamW) or group.get("decoupled_weight_decay")):
            group["weight_decay"] = group["weight_decay"] / by
    try:
        yield
    finally:
        for group, (lr, weight_decay) in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr
            if weight_decay is not None:
                group["weight_decay"] = weight_decay
