"""Several trainers train one model in turn, each as if it were the only one."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from unusual import Case, rows, state_of, trainer_for

pytestmark = pytest.mark.multiprocess

UNEVEN = Case(
    lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)),
    data=lambda: rows(22),  # the last batch has 2 samples, and a third worker none
)
TURNS = [{"batch_norm": "local"}, {}, {"virtual_workers": 4}, {}, {"virtual_workers": 4}, {"batch_norm": "local"}]


def take_turns(rank: int, run_dir: Path) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    model, found = UNEVEN.model(), []
    for turn, settings in enumerate(TURNS):
        steps = 2 if "batch_norm" in settings else 5  # PyTorch normalises no batch of one sample
        fresh = copy.deepcopy(model)
        assert type(fresh[1]) is nn.BatchNorm1d
        for name, each in (("again", model), ("alone", fresh)):
            trainer_for(UNEVEN, run_dir / f"{turn} {name}", each, **settings).fit(f"{steps} steps")
        for name, value in state_of(model).items():
            assert torch.equal(state_of(fresh)[name], value), f"turn {turn}, {name}"
        found.append(state_of(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert type(read[1]) is nn.BatchNorm1d
    read.train()(torch.randn(4, 6)).sum().backward()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    [found] = run_ranks(1, take_turns, tmp_path_factory.mktemp("alone"))
    return found


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_of_several_trainers_of_one_model_trains_it_as_if_alone(workers: int, alone: Any, tmp_path: Path) -> None:
    together = run_ranks(workers, take_turns, tmp_path)
    for turn, (first, *others) in enumerate(zip(*together, strict=True)):
        for found in others:
            for name, value in first.items():
                assert torch.equal(found[name], value), f"turn {turn}, {name}"
    assert together[0][2]["0.weight"].isfinite().all()
    assert not torch.equal(together[0][2]["1.running_mean"], together[0][1]["1.running_mean"])
