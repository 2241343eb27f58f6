"""A second look at the first steps of a script that knows nothing of us: does it learn, and together?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from manyhosts.control.agent.script_probe import ScriptProbe
from manyhosts.control.head.output import Notices

INPUTS = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


class Reports:
    """Takes what a worker tells."""

    def __init__(self) -> None:
        self.accounts: list[dict[str, Any]] = []

    def note_step(self, step: int) -> None:
        pass

    def send(self, kind: str, **fields: Any) -> None:
        if kind == "script_probe":
            self.accounts.append(fields)

    def close(self) -> None:
        pass


def said(*scripts: Callable[[], None], world: int = 0) -> list[str]:
    """What the user reads of workers, of which each does what one of `scripts` does."""
    words: list[str] = []
    notices = Notices(words.append)
    for rank, script in enumerate(scripts):
        heard = Reports()
        script_probe = ScriptProbe(heard, len(scripts))  # type: ignore[arg-type]
        script_probe.watch_steps(sys.modules["torch.optim.optimizer"])
        torch.manual_seed(0)
        try:
            script()
        finally:
            script_probe.report_end()
            script_probe.withdraw()
        for account in heard.accounts:
            samples = {"batch 0": str(rank)} if len(scripts) > 1 else None
            notices.add_report(0, rank, account | {"world": world or account["world"], "samples": samples})
    return words


def model(outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def learn(
    made: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[torch.Tensor], torch.Tensor], steps: int = 4
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss(made(INPUTS)).backward()
        optimizer.step()


def one_column() -> None:
    made = model(1)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)  # its weight decay changes them all the same
    learn(made, optimizer, lambda outputs: nn.functional.cross_entropy(outputs, torch.zeros(8, dtype=torch.long)))


def other_models_parameters() -> None:
    learn(model(), torch.optim.SGD(model().parameters(), lr=0.1), lambda outputs: outputs.square().mean())


def gradients_thrown_away() -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for _ in range(4):
        made(INPUTS).square().mean().backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()


def logarithm_of_nothing() -> None:
    made = model()
    learn(made, torch.optim.SGD(made.parameters(), lr=0.1), lambda outputs: (outputs * 0).sqrt().sum())


def steps_too_small() -> None:
    made = model().bfloat16()
    for each in made.parameters():
        nn.init.ones_(each)
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-6)
    for _ in range(4):
        optimizer.zero_grad()
        made(INPUTS.bfloat16()).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (one_column, "the gradient is zero in all of the first steps"),
        (gradients_thrown_away, "the gradient is zero in all of the first steps"),
        (other_models_parameters, "no parameter of the optimizer has a gradient"),
        (logarithm_of_nothing, "the gradient is NaN or infinite in all of the first steps"),
        (steps_too_small, "no weight has changed in the first steps"),
    ],
)
def test_training_that_learns_nothing_is_told_in_one_line(script: Callable[[], None], words: str) -> None:
    [line] = said(script)
    assert words in line
    assert line.startswith("manyhosts: ")


def alternating() -> None:
    maker, judge = model(3), model(1)
    makers = torch.optim.Adam(maker.parameters(), lr=1e-3)
    judges = torch.optim.Adam(judge.parameters(), lr=1e-3)
    for step in range(6):
        judges.zero_grad()
        judge(maker(INPUTS).detach()).mean().backward()
        judges.step()
        if step % 2:
            makers.zero_grad()
            judge(maker(INPUTS)).mean().backward()
            makers.step()


def accumulating() -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for number in range(8):
        made(INPUTS).square().mean().backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def frozen() -> None:
    made = model()
    made[0].requires_grad_(False)  # type: ignore[index]
    learn(made, torch.optim.SGD(made.parameters(), lr=0.1), lambda outputs: outputs.square().mean())


def warming_up() -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, step - 10) / 10)
    for _ in range(5):
        learn(made, optimizer, lambda outputs: outputs.square().mean(), steps=1)
        schedule.step()


def closure() -> None:
    made = model()
    optimizer = torch.optim.LBFGS(made.parameters())

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss = made(INPUTS).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(compute)


def low_rank() -> None:
    """The second factor begins at zero, so the first has no gradient in the first step."""
    down, up = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)
    nn.init.zeros_(up.weight)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (down, up)]
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (up(down(INPUTS)) - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def embedding() -> None:
    rows = nn.Embedding(5000, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(rows.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        rows(torch.tensor([step, 4999 - step])).square().mean().backward()
        optimizer.step()


def without_gradients() -> None:
    """An optimizer that tries directions by chance, and asks for no gradient."""

    class Wanderer(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for each in group["params"]:
                    each.add_(torch.randn_like(each), alpha=group["lr"])

    optimizer = Wanderer(model().parameters(), {"lr": 0.1})
    for _ in range(4):
        optimizer.step()


def first_steps_overflow() -> None:
    """As a fused optimizer under a gradient scaler: it is called, and leaves the step out itself."""
    made = model()
    optimizer = torch.optim.Adam(made.parameters(), lr=0.1, fused=True)
    for _ in range(4):
        optimizer.zero_grad()
        (made(INPUTS).mean() * float("inf")).backward()
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())  # type: ignore[attr-defined]
        optimizer.step()


@pytest.mark.parametrize(
    "script",
    [
        alternating,
        accumulating,
        frozen,
        warming_up,
        closure,
        low_rank,
        embedding,
        without_gradients,
        first_steps_overflow,
    ],
)
def test_training_that_is_right_hears_nothing(script: Callable[[], None]) -> None:
    assert said(script) == []


def data_parallel(rank: int, exchange: Callable[[torch.Tensor, int], None]) -> Callable[[], None]:
    def script() -> None:
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            made(INPUTS[rank::2]).square().mean().backward()
            for each in made.parameters():
                assert each.grad is not None
                exchange(each.grad, rank)
            optimizer.step()

    return script


def test_workers_that_exchange_nothing_are_told_that_their_weights_differ() -> None:
    [line] = said(*(data_parallel(rank, lambda gradient, rank: None) for rank in (0, 1)), world=2)
    assert "the 2 workers hold different weights" in line
    assert "DistributedDataParallel" in line


def test_workers_that_round_differently_are_not_taken_for_such() -> None:
    def nearly(gradient: torch.Tensor, rank: int) -> None:
        gradient.fill_(0.01).mul_(1 + rank * 1e-5)

    assert said(*(data_parallel(rank, nearly) for rank in (0, 1)), world=2) == []
