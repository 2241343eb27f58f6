"""The learning rate of workers that step alone, against steps reckoned by hand and a model of noise."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

import manyhosts as mh
from manyhosts.errors import ConfigError
from manyhosts.strategies.local_rate import expect_noise, factor, multiplied

Make = Callable[[list[Tensor]], optim.Optimizer]


def one_weight(value: float = 0.0) -> nn.Parameter:
    return nn.Parameter(torch.full((1,), value))


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad])
def test_adaptive_optimizer_is_given_the_root_of_those_that_step_alone(kind: Callable[..., optim.Optimizer]) -> None:
    assert factor("auto", kind([one_weight()]), 9) == 3


def test_steps_that_grow_with_the_gradient_keep_their_rate() -> None:
    assert factor("auto", optim.SGD([one_weight()], lr=0.1, momentum=0.9), 9) == 1


def test_user_has_the_last_word() -> None:
    assert factor(None, optim.AdamW([one_weight()]), 9) == 1
    assert factor("sqrt", optim.SGD([one_weight()]), 9) == 3


def test_every_group_has_its_own_rate_again_afterwards_also_after_an_error() -> None:
    optimizer = optim.AdamW([{"params": [one_weight()], "lr": 0.1}, {"params": [one_weight()], "lr": 0.2}])

    def step_that_fails() -> None:
        with multiplied(optimizer, 3.0, decay=False):
            assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.3, 0.6])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        step_that_fails()
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.1, 0.01), (0.2, 0.01)]


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: optim.AdamW(weights, lr=0.1, weight_decay=0.5),
        lambda weights: optim.NAdam(weights, lr=0.1, weight_decay=0.5, decoupled_weight_decay=True),
    ],
    ids=["AdamW", "NAdam"],
)
def test_weights_decay_as_fast_as_without_it(make: Make) -> None:
    """No gradient: all that changes the weight is its decay, by the rate times 0.5."""
    weight = one_weight(1.0)
    weight.grad = torch.zeros(1)
    optimizer = make([weight])
    with multiplied(optimizer, 4.0, decay=False):
        optimizer.step()
    assert float(weight.detach()) == pytest.approx(1 - 0.1 * 0.5)


def test_weights_decay_with_the_rate_where_that_is_wanted() -> None:
    """As in a warm-up, which lowers all that a step does."""
    weight = one_weight(1.0)
    weight.grad = torch.zeros(1)
    optimizer = optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    with multiplied(optimizer, 0.5):
        optimizer.step()
    assert float(weight.detach()) == pytest.approx(1 - 0.05 * 0.5)


def walked(workers: int, rule: str | None) -> tuple[float, float]:
    """The mean of `workers` models after 400 steps of Adam along a noisy slope, and how far such means lie apart.

    Each of 2,000 weights is a run of its own: its gradient is 0.05 with noise of deviation 1 in a batch of one process,
    √workers in a worker's part of it.
    """
    noise = torch.Generator().manual_seed(7)
    ends = []
    for _ in range(workers):
        weights = nn.Parameter(torch.zeros(2_000))
        optimizer = optim.Adam([weights], lr=1e-3)
        for _ in range(400):
            weights.grad = 0.05 + torch.randn(2_000, generator=noise) * math.sqrt(workers)
            with multiplied(optimizer, factor(rule, optimizer, workers)):
                optimizer.step()
        ends.append(weights.detach())
    mean = torch.stack(ends).mean(0)
    return float(mean.mean()), float(mean.std())


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: optim.Adam(weights, lr=0.1, amsgrad=True),
        lambda weights: optim.AdamW(weights, lr=0.1),
        lambda weights: optim.NAdam(weights, lr=0.1),
        lambda weights: optim.RAdam(weights, lr=0.1),
        lambda weights: optim.RMSprop(weights, lr=0.1),
        lambda weights: optim.Adamax(weights, lr=0.1),
        lambda weights: optim.Adagrad(weights, lr=0.1),
    ],
    ids=["Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adamax", "Adagrad"],
)
def test_first_step_alone_is_as_long_as_the_last_one_together(make: Make) -> None:
    """Nine step alone from here on, each at three times the rate, with an optimizer that has seen 300 steps of all."""
    weights = [one_weight(), one_weight()]
    together, alone = (make([weight]) for weight in weights)
    for _ in range(300):
        for weight, optimizer in zip(weights, (together, alone), strict=True):
            weight.grad = torch.full((1,), 0.5)
            optimizer.step()
    before = [float(weight.detach()) for weight in weights]
    together.step()
    expect_noise(alone, 9)
    with multiplied(alone, factor("auto", alone, 9), decay=False):
        alone.step()
    lengths = [float(weight.detach()) - old for weight, old in zip(weights, before, strict=True)]
    assert lengths[1] == pytest.approx(lengths[0], rel=0.01)


def test_mean_of_workers_goes_as_far_as_one_process_and_is_as_noisy() -> None:
    alone, together, unscaled = walked(1, "auto"), walked(4, "auto"), walked(4, None)
    assert together == pytest.approx(alone, rel=0.08)
    assert unscaled[0] / alone[0] == pytest.approx(0.5, abs=0.06), "what the rule is for"


@pytest.mark.parametrize("kind", [mh.LocalSGD, mh.DiLoCo])
def test_unknown_rule_is_refused_with_those_there_are(kind: type[mh.LocalSGD | mh.DiLoCo]) -> None:
    with pytest.raises(ConfigError, match="local_lr_scaling is 'linear'") as error:
        kind(local_lr_scaling="linear")
    assert '"auto", "sqrt" or None' in str(error.value)
