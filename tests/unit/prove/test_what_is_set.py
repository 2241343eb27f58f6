"""What takes chance out of a trial, and what is said where a trial shows nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manyhosts.data.order import Order
from manyhosts.errors import ConfigError
from manyhosts.loss.set_draws import SetDraws
from manyhosts.prove import compare, promises
from manyhosts.prove.in_worker.calm import RowDraws
from manyhosts.prove.trace import Trace
from manyhosts.prove.trials import Asked, Setup, Trial

SIZES = {6, 3}


def drawn(draws: SetDraws, rows: int) -> list[torch.Tensor]:
    with draws:
        x = torch.zeros(rows, 2)
        return [
            torch.randn(rows, 4), torch.rand_like(x), x.clone().uniform_(2, 3), torch.normal(x, 1.0),
            torch.bernoulli(x + 0.5), torch.randint(0, 100, (rows, 5)),
        ]  # fmt: skip


def test_that_each_sample_has_numbers_of_its_own_however_a_batch_is_cut() -> None:
    samples = [7, 3, 9, 1, 4, 2]
    whole = drawn(RowDraws(samples, SIZES), 6)
    halves = [drawn(RowDraws(part, SIZES), 3) for part in (samples[:3], samples[3:])]
    for all_of_it, one, two in zip(whole, *halves, strict=True):
        assert torch.equal(all_of_it, torch.cat([one, two]))
    assert all(each[0].ne(each[1]).any() for each in whole[:1]), "two samples differ"
    assert all(each.unique().numel() == 1 for each in drawn(SetDraws(0.3, SIZES), 6)), "there they do not"


def test_that_what_has_no_row_for_each_sample_is_told_from_what_has() -> None:
    shapes = []
    for samples in ([1, 2, 3, 4, 5, 6], [1, 2, 3]):
        with RowDraws(samples, SIZES) as draws:
            torch.randn(len(samples), 4)
            torch.randn(2, len(samples))
            torch.rand(())
        shapes.append(draws.shapes)
    assert [one == other for one, other in zip(*shapes, strict=True)] == [True, False, True]


def test_that_slopes_of_rrelu_are_set_in_both_passes() -> None:
    x = torch.linspace(-1, 1, 6, requires_grad=True)
    with SetDraws(0.3, SIZES):
        nn.functional.rrelu(x, 0.1, 0.3, training=True).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(x > 0, 1.0, 0.2))


def trace(*steps: dict[str, float]) -> Trace:
    lines = [{"gradients": {name: ["", size] for name, size in gradients.items()}} for gradients in steps]
    return Trace(steps={number: {0: line} for number, line in enumerate(lines, 1)})


@pytest.mark.parametrize(("size", "small"), [(1e-4, False), (1e-6, True), (1e-11, True), (1e-14, False), (0.0, False)])
def test_that_a_small_gradient_is_told_from_rounding_by_float64(size: float, small: bool) -> None:
    assert compare.small(trace({"main": 1.0}, {"main": 1.0, "side": size})) == small


class Refused:
    """Trials of a script that two workers are refused."""

    asked = Asked(script="script.py", folder=Path("/"), workers=(1, 2))

    def __init__(self, untried: str = "") -> None:
        self.trace = Trace(begins={0: {"untried": untried}} if untried else {})

    def run(self, setup: Setup) -> Trial:
        error = ConfigError("the loss is a sum", where="loss", fix="a mean")
        return Trial(setup=setup, trace=self.trace, error=error, output=(), seconds=0.0)


def test_that_a_refusal_breaks_the_promise_of_the_same_answer_and_no_other() -> None:
    found = {name: promise(Refused()) for name, (_, promise) in promises.PROMISES.items()}  # type: ignore[arg-type]
    assert {name: verdict.status for name, verdict in found.items()} == {
        "workers": "fails", "micro": "not judged", "resume": "not judged", "samples": "not judged",
        "ranks": "not judged",
    }  # fmt: skip
    assert found["ranks"].note == "with 2 workers it could not be tried, because the loss is a sum; a mean"


def test_that_what_prove_cannot_try_is_no_fault_of_the_script() -> None:
    trials: Any = Refused("a stage has its own tensors alone")
    verdict = promises.workers(trials)
    assert verdict.status == "not judged"
    assert "could not be tried, because a stage has its own tensors alone" in verdict.note


def test_that_an_order_of_the_scripts_may_repeat_samples() -> None:
    assert not Order(10, batch=2, seed=0).repeats
    assert Order(10, batch=2, seed=0, own=lambda _: [0] * 10).repeats
