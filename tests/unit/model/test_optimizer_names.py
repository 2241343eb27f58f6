"""An optimizer's state goes by the names of parameters, and comes back to them whatever their order was."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR, SequentialLR
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import SnapshotError
from manyhosts.model.combined_optimizer import each_of
from manyhosts.model.optimizer_state import InitialOptimizer, by_name, load_by_name, options_of
from manyhosts.model.trained_module import ModelAndLoss, names_kept
from manyhosts.records.contents import unflatten
from manyhosts.snapshot.flatten import flatten

INPUTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Make = Callable[[list[nn.Parameter]], Optimizer]


class Tied(nn.Module):
    """Two layers that share a weight, one that is frozen, one scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self.frozen(self.second(self.first(inputs)).tanh())


class Odd(torch.optim.SGD):
    """Keeps numbers and nested things, also under a key that is no parameter."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.state["all"] = {"steps": self.state.get("all", {}).get("steps", 0) + 1}
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = [torch.ones(2), {"count": 3}, None]


class Counting(torch.optim.SGD):
    """Keeps values of its own beside those of its parameters, one of them in another dtype than theirs."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.state["count"] = self.state.get("count", 0) + 1
        self.state["mean"] = torch.full((2,), 1 / 3, dtype=torch.float64)
        return None


class OfItsOwn(torch.optim.SGD):
    """Has a state of another form."""

    def state_dict(self) -> dict[str, Any]:
        return {"mine": [group["lr"] for group in self.param_groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group, lr in zip(self.param_groups, state_dict["mine"], strict=True):
            group["lr"] = lr


def two_groups(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW([{"params": parameters[2:], "lr": 0.3}, {"params": parameters[:2]}], lr=0.01, amsgrad=True)


def is_matrix(parameter: nn.Parameter) -> bool:
    return parameter.dim() > 1


class Filtered(torch.optim.SGD):
    """Is given a function for each group, as published optimizers with LARS are."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__([{"params": parameters, "decays": is_matrix}], lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in filter(group["decays"], group["params"]):
                each.data.mul_(0.99)
        return super().step(closure)


MAKERS: dict[str, Make] = {
    "one with a function": Filtered,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam in two groups": two_groups,
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1),
    "named by the script": lambda parameters: torch.optim.Adam([(f"its own {n}", p) for n, p in enumerate(parameters)]),
    "one with more than tensors": lambda parameters: Odd(parameters, lr=0.1, momentum=0.5),
    "one with values of its own": lambda parameters: Counting(parameters, lr=0.1, momentum=0.5),
    "one with a form of its own": lambda parameters: OfItsOwn(parameters, lr=0.1),
}


def made(make: Make, *, with_loss: bool = False, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    module: nn.Module = ModelAndLoss(Tied(), nn.Linear(3, 1)) if with_loss else Tied()
    return module, make([parameter for parameter in module.parameters() if parameter.requires_grad])


def train(module: nn.Module, optimizer: Optimizer, steps: int) -> None:
    inputs = torch.arange(12.0).reshape(4, 3) / 10

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        output = module.loss(module.model(inputs)) if isinstance(module, ModelAndLoss) else module(inputs)
        loss = output.square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)  # type: ignore[arg-type]  # of some kinds it may be None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("with_loss", [False, True], ids=["model", "model and loss"])
@pytest.mark.parametrize("kind", MAKERS)
def test_state_by_name_comes_back_as_it_was_and_trains_on_to_the_same_bits(kind: str, with_loss: bool) -> None:
    module, optimizer = made(MAKERS[kind], with_loss=with_loss)
    train(module, optimizer, 3)
    kept = copy.deepcopy(by_name(optimizer, module))
    weights = copy.deepcopy(module.state_dict())
    fresh, its_own = made(MAKERS[kind], with_loss=with_loss, seed=1)
    fresh.load_state_dict(weights)
    load_by_name(its_own, fresh, kept)
    assert same(its_own.state_dict(), optimizer.state_dict())
    train(module, optimizer, 2)
    train(fresh, its_own, 2)
    assert same(dict(fresh.state_dict()), dict(module.state_dict()))


def counted_run(folder: Path) -> tuple[mh.Run, list[Any]]:
    def step(run: mh.Run) -> None:
        for name in ("one", "two"):
            run.backward(lambda rows: run.models["two"](run.models["one"](rows[0])).square().mean(), name)
            run.update(name)

    run = mh.Run(
        models={"one": lambda: nn.Linear(3, 2), "two": lambda: nn.Linear(2, 1)},
        optimizers={name: lambda parameters: Counting(parameters, lr=0.1) for name in ("one", "two")},
        data=mh.Data(train=TensorDataset(INPUTS), batch_size=4),
        run_dir=folder,
    )
    return run, [step]


def counted_trainer(folder: Path) -> tuple[mh.Trainer, list[Any]]:
    trainer = mh.Trainer(
        model=lambda: nn.Linear(3, 1),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: Counting(parameters, lr=0.1, momentum=0.5),
        data=mh.Data(train=TensorDataset(INPUTS, INPUTS[:, :1]), batch_size=4),
        run_dir=folder,
        strategy="local-sgd",
    )
    return trainer, []


def counted(rank: int, folder: Path, kind: Any, *durations: str) -> tuple[str, list[Any]]:
    for each in durations:
        made, step = kind(folder)
        weights = made.fit(*step, each).weights_sha256
    states = [each.state for each in each_of(made.components.optimizer).values()]
    return weights, [(state["count"], state["mean"].tolist()) for state in states]


@pytest.mark.parametrize("kind", [counted_trainer, counted_run])
def test_values_of_an_optimizers_own_are_there_after_a_resume(kind: Any, tmp_path: Path) -> None:
    straight = counted(0, tmp_path / "straight", kind, "5 steps")
    assert counted(0, tmp_path / "resumed", kind, "2 steps", "5 steps") == straight


@pytest.mark.multiprocess
def test_values_of_an_optimizers_own_are_there_where_workers_step_alone(tmp_path: Path) -> None:
    straight = run_ranks(2, counted, tmp_path / "straight", counted_trainer, "5 steps")
    assert run_ranks(2, counted, tmp_path / "resumed", counted_trainer, "2 steps", "5 steps") == straight


def test_function_in_a_group_is_left_out_of_a_snapshot() -> None:
    module, optimizer = made(Filtered)
    train(module, optimizer, 1)
    flatten(by_name(optimizer, module))
    assert optimizer.param_groups[0]["decays"] is is_matrix


def test_names_are_those_under_which_a_snapshot_has_the_parameters() -> None:
    module, optimizer = made(MAKERS["Adam in two groups"], with_loss=True)
    train(module, optimizer, 1)
    kept = by_name(optimizer, module)
    assert [group["params"] for group in kept["param_groups"]] == [
        ["model.first.bias", "loss.weight", "loss.bias"],
        ["model.scale", "model.first.weight"],
    ]
    assert set(kept["state"]) == {"model.scale", "model.first.weight", "model.first.bias", "loss.weight", "loss.bias"}
    assert set(names_kept(Tied()).values()) >= {"model.scale", "model.first.weight"}


def test_state_finds_its_parameters_in_another_order() -> None:
    module, optimizer = made(MAKERS["Adam in two groups"])
    train(module, optimizer, 2)
    kept = by_name(optimizer, module)
    kept["param_groups"][1]["params"] = kept["param_groups"][1]["params"][::-1]
    kept["state"] = dict(reversed(kept["state"].items()))
    fresh, its_own = made(MAKERS["Adam in two groups"])
    load_by_name(its_own, fresh, kept)
    for (_, one), (_, other) in zip(module.named_parameters(), fresh.named_parameters(), strict=True):
        assert same(dict(optimizer.state.get(one, {})), dict(its_own.state.get(other, {})))


def test_numbers_of_snapshots_of_before_are_still_taken() -> None:
    module, optimizer = made(MAKERS["Adam in two groups"])
    train(module, optimizer, 2)
    fresh, its_own = made(MAKERS["Adam in two groups"])
    load_by_name(its_own, fresh, copy.deepcopy(optimizer.state_dict()))
    assert same(its_own.state_dict(), optimizer.state_dict())


def test_state_of_other_groups_is_refused_in_a_sentence() -> None:
    module, optimizer = made(MAKERS["Adam in two groups"])
    train(module, optimizer, 1)
    kept = by_name(optimizer, module)
    other, in_one = made(MAKERS["SGD"])
    with pytest.raises(SnapshotError, match="has 1 groups of parameters, and there were 2"):
        load_by_name(in_one, other, kept)
    moved = copy.deepcopy(kept)
    moved["param_groups"][0]["params"][0] = "model.elsewhere"
    with pytest.raises(SnapshotError, match=r"has model\.elsewhere in another group than it was, or it was not there"):
        load_by_name(optimizer, module, moved)


def test_parameter_without_a_name_and_a_taken_name_are_refused() -> None:
    module, optimizer = made(MAKERS["SGD with momentum"])
    optimizer.state["model.scale"] = {"x": 1}  # type: ignore[index]  # as a script may
    with pytest.raises(SnapshotError, match=r"keeps something under 'model\.scale', which is the name of a parameter"):
        by_name(optimizer, module)
    del optimizer.state["model.scale"]  # type: ignore[arg-type]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    with pytest.raises(SnapshotError, match=r"holds a parameter of shape \(2, 2\) that the model has not"):
        by_name(optimizer, module)


def test_kernels_are_those_of_the_optimizer_that_goes_on() -> None:
    module = Tied()
    kept = by_name(torch.optim.Adam(module.parameters(), fused=True), module)
    ours = torch.optim.Adam(module.parameters(), foreach=False)
    load_by_name(ours, module, kept)
    assert [(group["fused"], group["foreach"]) for group in ours.param_groups] == [(None, False)]


def test_worker_that_joins_has_the_rates_that_the_others_began_with() -> None:
    def made(lr: float) -> tuple[InitialOptimizer, Optimizer, dict[str, LRScheduler]]:
        model = nn.Linear(3, 2)
        groups = [
            {"params": [model.weight], "filter": torch.relu},
            {"params": [model.bias], "lr": torch.tensor(3 * lr)},
        ]
        optimizer = torch.optim.AdamW(groups, lr=lr)
        options, parts = (
            options_of(optimizer),
            (LambdaLR(optimizer, lambda step: step + 1), MultiStepLR(optimizer, [2])),
        )
        schedules: dict[str, LRScheduler] = {"": SequentialLR(optimizer, [*parts], [2])}
        named = {"": optimizer}
        return (
            InitialOptimizer.of(optimizer, schedules, named=named, options=options, model=model),
            optimizer,
            schedules,
        )

    first, *old = made(0.2)
    joined, *new = made(0.1)
    flat = flatten(first.given())
    joined = joined.taken(unflatten(json.loads(json.dumps(flat.nodes)), flat.tensors))
    assert joined.asked == first.asked
    assert joined.given() == first.given()
    for initial, (optimizer, schedules) in ((first, old), (joined, new)):
        initial.after_steps(optimizer, schedules, steps=5, kept={}, asked={})
        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.02, 0.06])
        assert optimizer.param_groups[0]["filter"] is torch.relu
