"""What a worker counts of a training loop that it knows nothing about."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from manyhands.launchers.witness import Steps


class Heard:
    """Takes reports, as the reporter does."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def send(self, kind: str, **fields: int) -> None:
        assert kind == "step"
        self.steps.append(fields["step"])


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def steps(heard: Heard) -> Iterator[Steps]:
    made = Steps(heard)  # type: ignore[arg-type]
    made.watch(sys.modules["torch.optim.optimizer"])
    yield made
    made.withdraw()


def optimizer() -> torch.optim.Optimizer:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    return torch.optim.SGD(layer.parameters(), lr=0.1)


def test_steps_are_counted_and_reported_now_and_then(steps: Steps, heard: Heard) -> None:
    one = optimizer()
    for _ in range(200):
        one.step()
    assert steps.done == 200
    assert heard.steps[0] == 1
    assert len(heard.steps) < 20


def test_two_optimizers_that_take_turns_make_one_step_together(steps: Steps) -> None:
    generator, discriminator = optimizer(), optimizer()
    for _ in range(5):
        discriminator.step()
        generator.step()
    assert steps.done == 5


def test_optimizer_that_wraps_another_counts_once(steps: Steps) -> None:
    inner = optimizer()

    class Outer(torch.optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]
            inner.step()

    outer = Outer(inner.param_groups, {})
    for _ in range(4):
        outer.step()
    assert steps.done == 4


def test_optimizer_that_takes_over_is_counted_on(steps: Steps) -> None:
    first, second = optimizer(), optimizer()
    for one in (first, second):
        for _ in range(10):
            one.step()
    assert steps.done >= 19, "progress must be seen after a change"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compiled_step_is_counted_as_well(steps: Steps) -> None:
    step = torch.compile(optimizer().step, backend="eager")
    for _ in range(3):
        step()
    assert steps.done == 3


def test_step_that_the_gradient_scaler_skips_is_none(steps: Steps) -> None:
    one = optimizer()
    scaler = torch.amp.GradScaler("cpu")
    for value in (1.0, float("inf")):
        one.zero_grad()
        scaler.scale(one.param_groups[0]["params"][0].sum() * value).backward()
        scaler.step(one)
        scaler.update()
    assert steps.done == 1


def test_nothing_is_counted_any_more_after_the_end(steps: Steps, heard: Heard) -> None:
    one = optimizer()
    one.step()
    steps.withdraw()
    one.step()
    assert (steps.done, heard.steps) == (1, [1])
