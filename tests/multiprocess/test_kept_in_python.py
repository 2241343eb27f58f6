"""What a model, a loss or a step keeps in plain Python: as in one process, refused, or said in one line."""

from __future__ import annotations

import copy
import json
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from unusual import Case, in_plain_pytorch, with_us

from manyhosts.loss.comparison import KEEPS, Seen
from manyhosts.prove import promises
from manyhosts.training.loop.counting import KEPT, not_tried

pytestmark = pytest.mark.multiprocess


class Keeps(nn.Module):
    """Adds something to its output that it keeps from one batch to the next."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(6, 2)
        self.calls, self.pair, self.values = 0, (0.0, 0), deque([1.0], maxlen=3)
        self.statistics, self.tensors = {"mean": 0.0}, {"mean": torch.zeros(6)}

    def forward(self, x: Tensor) -> Tensor:
        mean = float(x.detach().mean())
        if self.how == "tensor in a dict":
            self.tensors["mean"].lerp_(x.detach().mean(0), 0.1)
            return self.layer(x + self.tensors["mean"])
        return self.layer(x) + self.added(mean)

    def added(self, mean: float) -> float:
        if self.how == "tuple":
            self.pair = (0.9 * self.pair[0] + 0.1 * mean, self.pair[1] + 1)
            return self.pair[0]
        if self.how == "deque":
            self.values.append(0.5 * self.values[-1])
            return sum(self.values)
        if self.how == "dict":
            self.statistics["mean"] = 0.9 * self.statistics["mean"] + 0.1 * mean
            return self.statistics["mean"]
        self.calls += 1
        return {"counter": 0.1 * self.calls, "later": 0.5 * (self.calls > 4)}[self.how]


class KeepingLoss:
    """Grows with its calls; no module."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.mse_loss(outputs, targets) * min(1.0, 0.1 * self.calls)


counts = {"steps": 0}


def counting_step(model: nn.Module, batch: Any) -> Tensor:
    counts["steps"] += 1
    return nn.functional.mse_loss(model(batch[0]), batch[1]) * min(1.0, 0.1 * counts["steps"])


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


KINDS = ["counter", "later", "tuple", "deque", "dict", "tensor in a dict"]
CASES = {name: Case(partial(Keeps, name)) for name in KINDS}
CASES |= {"loss": Case(plain, loss=KeepingLoss())}
CASES |= {"step": Case(plain, loss=None, step=counting_step)}
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "virtual workers": {"virtual_workers": 4},
}


def train_all(rank: int, folder: Path) -> dict[tuple[str, str], dict[str, Tensor] | str]:
    found = {}
    for name, case in CASES.items():
        for mode, more in MODES.items():
            counts["steps"] = 0
            found[name, mode] = with_us(0, copy.deepcopy(case), folder / name / mode, 5, **more)
    return found


@pytest.fixture(scope="module", params=[1, 2, pytest.param(3, marks=pytest.mark.slow)])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, Any]:
    folder = tmp_path_factory.mktemp("runs")
    return request.param, folder, run_ranks(request.param, train_all, folder)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_it_is_that_of_one_process_or_it_is_said(name: str, mode: str, answers: Any) -> None:
    workers, folder, ranks = answers
    found = [each[name, mode] for each in ranks]
    if isinstance(found[0], str):
        assert workers > 1 or mode != "whole", "in one piece nothing is cut"
        assert len(set(found)) == 1
        assert "is kept from one batch to the next" in found[0] or "no mean over the samples" in found[0]
        return
    counts["steps"] = 0
    expected = in_plain_pytorch(copy.deepcopy(CASES[name]), 5)
    if workers == 1 and mode == "whole":
        for tensor, value in expected.items():
            torch.testing.assert_close(found[0][tensor], value, rtol=1e-6, atol=1e-7)
        return
    said = json.loads((folder / name / mode / "run.json").read_text())["same_answer"]
    assert said["outcome"] == "not tried", said
    assert "is kept from one batch to the next" in said["text"]
    if mode == "whole":
        for tensor, value in expected.items():  # a counter of steps is right where each worker has one piece
            torch.testing.assert_close(found[0][tensor], value, rtol=1e-5, atol=1e-6)


def test_what_changes_the_loss_is_refused_where_one_worker_has_several_pieces(answers: Any) -> None:
    _, _, ranks = answers
    for name in CASES.keys() - {"later"}:
        assert isinstance(ranks[0][name, "virtual workers"], str), name


@pytest.mark.parametrize("promise", ["workers", "micro", "virtual", "resume"])
def test_prove_judges_no_promise_by_runs_that_keep_something(promise: str) -> None:
    said: Any = SimpleNamespace(
        not_tried=not_tried(Seen(because=KEPT.format("calls"), findings={KEEPS: "calls"})), error=None
    )
    silent: Any = SimpleNamespace(not_tried="", error=None)
    assert promises._holds(promise, "equal", silent, said).status == "not judged"
    assert promises._holds(promise, "equal", silent, silent).status == "holds"
