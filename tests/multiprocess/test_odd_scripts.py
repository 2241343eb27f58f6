"""Layers, hooks and optimizers that are used in another way than the usual: as in one process, or said by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from unusual import Case, in_plain_pytorch, rows, trainer_for, with_us

from manyhosts.errors import ManyhostsError

pytestmark = pytest.mark.multiprocess


class Normalised(nn.Module):
    """Calls one BatchNorm as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.norm, self.last = how, nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "in chunks":
            x = torch.cat([self.norm(each) for each in x.chunk(2)])
        elif self.how == "twice":
            x = self.norm(self.norm(x).tanh())
        else:
            x = self.norm(x)
        return self.last(x.tanh())


def trained(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        how: with_us(0, Case(lambda how=how: Normalised(how)), folder / how, 2)
        for how in ("in chunks", "twice")  # type: ignore[misc]
    }
    chunks = Case(lambda: Normalised("in chunks"))
    found["in chunks, virtual"] = with_us(0, chunks, folder / "virtual", 2, virtual_workers=2)
    found["one sample"] = with_us(0, Case(lambda: Normalised(""), data=lambda: rows(21)), folder / "one")
    model = Normalised("")
    try:
        trainer_for(Case(lambda: model), folder / "eval", listeners=[lambda _: model.norm.eval()]).fit("20 steps")
        found["evaluated"] = ""
    except ManyhostsError as error:
        found["evaluated"] = str(error)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, trained, tmp_path_factory.mktemp("two"), timeout_s=100)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    [found] = run_ranks(1, trained, tmp_path_factory.mktemp("one"))
    return found


def test_batch_norm_that_is_called_in_chunks_is_refused_where_workers_would_meet_in_it(two: Any, one: Any) -> None:
    for each in two:
        assert "the BatchNorm 'norm' is called several times in a forward pass" in each["in chunks"]
        assert_close(each["in chunks, virtual"], one["in chunks, virtual"], 0.0)
        assert_close(each["twice"], one["twice"], 1e-5)
    assert_close(one["in chunks"], in_plain_pytorch(Case(lambda: Normalised("in chunks")), 2), 1e-6)


def test_batch_of_one_sample_is_refused_in_the_same_words_on_any_number_of_workers(two: Any, one: Any) -> None:
    for each in [*two, one]:
        assert "BatchNorm is given one value for each of 8 channels" in each["one sample"]


def test_batch_norm_that_is_evaluated_on_one_rank_is_named(two: Any, one: Any) -> None:
    for each in two:
        assert "the BatchNorm 'norm' is in evaluation mode on rank 0" in each["evaluated"]
    assert not one["evaluated"]


def assert_close(found: Any, expected: dict[str, Tensor], tolerance: float) -> None:
    assert not isinstance(found, str), found
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


# Optimizers around others.


class Lookahead(torch.optim.Optimizer):
    """As it is found in many places: without `Optimizer.__init__`, and with a state by `id`."""

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 2) -> None:
        self.optimizer, self.k, self.param_groups = optimizer, k, optimizer.param_groups
        self.state: Any = {}
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["counter"] += 1
            for each in group["params"]:
                slow = self.state.setdefault(each, {"slow": each.detach().clone()})["slow"]
                if group["counter"] % self.k == 0:
                    each.copy_(slow.lerp_(each, 0.5))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {**self.optimizer.state_dict(), "slow": {id(each): kept for each, kept in self.state.items()}}

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict({name: each for name, each in state.items() if name != "slow"})
        self.param_groups = self.optimizer.param_groups  # those that were loaded, with their counter
        own = {id(each): each for group in self.param_groups for each in group["params"]}
        self.state = {own[number]: kept for number, kept in state["slow"].items()}


class Sharpness(torch.optim.SGD):
    """The two steps of SAM."""

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class WantsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None, "it requires a closure"


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def around(parameters: Any) -> torch.optim.Optimizer:
    return Lookahead(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))


def by_hand(steps: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = plain()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    slow = []
    for number in range(steps):
        begin = number % 3 * 10
        batch = [each[begin : begin + 10] for each in rows().tensors]
        base.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        base.step()
        with torch.no_grad():
            slow = slow or [each.clone() for each in model.parameters()]
            if number % 2:
                for each, kept in zip(model.parameters(), slow, strict=True):
                    each.copy_(kept.lerp_(each, 0.5))
    return {name: each.detach() for name, each in model.named_parameters()}


def with_lookahead(rank: int, folder: Path, steps: int = 5) -> Any:
    return with_us(0, Case(plain, optimizer=around), folder, steps)


@pytest.mark.parametrize("workers", [1, 2])
def test_optimizer_around_another_is_that_of_a_plain_loop_and_its_state_by_id_is_told(
    workers: int, tmp_path: Path
) -> None:
    for found in run_ranks(workers, with_lookahead, tmp_path):
        assert_close(found, by_hand(5), 1e-5)
    assert "the optimizer keeps something under id(parameter)" in (tmp_path / "metrics.jsonl").read_text()
    for found in run_ranks(workers, with_lookahead, tmp_path, 8):  # other numbers, in other processes
        assert_close(found, by_hand(8), 1e-5)


@pytest.mark.parametrize("kind", [Sharpness, WantsClosure])
def test_optimizer_that_takes_several_gradients_is_refused_in_a_sentence(kind: Any, tmp_path: Path) -> None:
    said = with_us(0, Case(plain, optimizer=lambda params: kind(params, lr=0.1)), tmp_path, 1)
    assert "computes the loss several times in a step" in said
