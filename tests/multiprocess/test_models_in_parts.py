"""Models of many shapes in parts, whole and computed again: the same weights as in one process, or refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models_in_parts import MODELS, WIDTH
from ranks import run_ranks
from torch import Tensor, nn
from unusual import Case, trainer_for

import manyhosts as mh
from manyhosts.errors import ManyhostsError

pytestmark = pytest.mark.multiprocess

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "again": {"activation_checkpointing": "all"},
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp again": {"strategy": "fsdp", "activation_checkpointing": "all"},
    "auto": {"strategy": "auto"},
}
QUICK = ["lists in lists", "lists of two kinds", "one layer", "lists of parameters", "block at three places"]
NO_BLOCKS = {"one layer", "lists of parameters"}
"""Of which nothing can be computed again."""
LATE = "modules made late"
DRAWS = "stochastic depth"
"""Other numbers in each piece, so it is compared with as many workers."""


def train(rank: int, names: list[str], ways: list[str], folder: Path) -> dict[tuple[str, str], dict[str, Tensor] | str]:
    """The weights that each way ends with, on the leader, or the error."""
    found: dict[tuple[str, str], dict[str, Tensor] | str] = {}
    for name in names:
        for way in ways:
            torch.manual_seed(0)
            run_dir = folder / f"{name} {way}"
            try:
                trainer_for(Case(MODELS[name]), run_dir, **WAYS[way]).fit("4 steps")
            except ManyhostsError as error:
                found[name, way] = str(error)
            else:
                found[name, way] = mh.load(run_dir, weights="last") if rank == 0 else {}
    return found


def check(names: list[str], folder: Path) -> None:
    alone = run_ranks(1, train, names, ["plain", "again", "auto"], folder / "alone", timeout_s=300)[0]
    two = run_ranks(2, train, names, ["ddp", "fsdp", "fsdp again", "auto"], folder / "two", timeout_s=500)[0]
    for (name, way), weights in {**alone, **two}.items():
        if way.endswith("again") and name in NO_BLOCKS:
            assert "the model has no blocks" in weights, (name, way)
        elif name == LATE:
            assert "has made the parameter 'body.blocks.0.weight' in its forward pass" in weights, (name, way)
        else:
            expected = (
                two[name, "ddp"] if name == DRAWS and (name, way) in two and way != "auto" else alone[name, "plain"]
            )
            if name != DRAWS or way != "auto":
                assert_alike(weights, expected, f"{name}, {way}")


def assert_alike(weights: Any, expected: Any, what: str) -> None:
    assert not isinstance(weights, str), f"{what}: {weights}"
    assert weights.keys() == expected.keys(), what
    for key, value in expected.items():
        torch.testing.assert_close(
            weights[key], value, rtol=2e-5, atol=2e-5, msg=partial("{}, {}: {}".format, what, key)
        )


def test_models_that_hold_their_blocks_in_other_ways(tmp_path: Path) -> None:
    check(QUICK, tmp_path)


@pytest.mark.slow  # in `make test`: the one above
@pytest.mark.timeout(900)
def test_models_of_all_kinds(tmp_path: Path) -> None:
    check([name for name in MODELS if name not in QUICK], tmp_path)


def fail_alone(rank: int, folder: Path) -> None:
    """A model that raises on one worker, where all of them look at the loss together."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if rank == 1:
            raise ValueError("rank 1 sees nothing")
        return (outputs - targets).square().mean()

    case = Case(MODELS["lists in lists"], loss=loss)
    trainer_for(case, folder, strategy="fsdp").fit("2 steps")


class TiedByHand(nn.Module):
    """The head takes the weight of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.body:
            inputs = block(inputs)
        found: Tensor = self.out(inputs @ self.body[0][0].weight)
        return found


def train_tied(rank: int, folder: Path) -> str:
    try:
        trainer_for(Case(TiedByHand), folder, strategy="fsdp").fit("2 steps")
    except ManyhostsError as error:
        return str(error)
    return ""


def test_weight_of_another_module_is_refused_before_the_first_step(tmp_path: Path) -> None:
    for said in run_ranks(2, train_tied, tmp_path):
        assert "a parameter was used outside the forward pass of the module that holds it" in said


def test_error_of_one_worker_in_the_look_at_the_loss_is_told(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed(.|\n)*ValueError: rank 1 sees nothing"):
        run_ranks(2, fail_alone, tmp_path)
