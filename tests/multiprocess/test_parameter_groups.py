"""Parameter groups by name train as groups that were made by hand, on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import images_and_labels, network
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError

pytestmark = pytest.mark.multiprocess
OPTIONS = {"0": {"lr": 0.02}, "norms": {"weight_decay": 0.0}, "biases": {"weight_decay": 0.0, "lr": 0.03}}


def named(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(mh.groups(params, OPTIONS), lr=0.05, weight_decay=0.1)


def by_hand(params: Any) -> torch.optim.Optimizer:
    conv, conv_bias, norm, norm_bias, linear, linear_bias = params
    groups = [
        {"params": [linear]},
        {"params": [conv], "lr": 0.02},
        {"params": [conv_bias], "lr": 0.03, "weight_decay": 0.0},
        {"params": [norm], "weight_decay": 0.0},
        {"params": [norm_bias], "lr": 0.03, "weight_decay": 0.0},
        {"params": [linear_bias], "lr": 0.03, "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.05, weight_decay=0.1)


def fitted(rank: int, folder: Path, strategy: str) -> list[dict[str, Tensor]]:
    found = []
    for number, optimizer in enumerate((named, by_hand)):
        trainer = mh.Trainer(
            model=lambda: network(batch_norm=True),
            loss=nn.CrossEntropyLoss(),
            optimizer=optimizer,
            data=mh.Data(TensorDataset(*images_and_labels(60)), batch_size=12),
            strategy=strategy,
            run_dir=folder / str(number),
        )
        trainer.fit("6 steps")
        holding = trainer.components.strategy.holding
        found.append({name: holding.full(value).clone() for name, value in trainer.model.state_dict().items()})
    return found


@pytest.mark.parametrize(("workers", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_groups_by_name_are_those_made_by_hand(workers: int, strategy: str, tmp_path: Path) -> None:
    for one, other in run_ranks(workers, fitted, tmp_path, strategy):
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-6, atol=1e-7)


def test_names_that_fit_nothing_and_lists_without_names_are_refused(tmp_path: Path) -> None:
    def trainer(make: Any) -> mh.Trainer:
        data = mh.Data(TensorDataset(*images_and_labels(60)), batch_size=12)
        return mh.Trainer(model=network, loss=nn.CrossEntropyLoss(), optimizer=make, data=data, run_dir=tmp_path)

    with pytest.raises(ConfigError, match="no parameter is called 'norms'"):
        trainer(named)
    with pytest.raises(ConfigError, match="no parameter is called 'backbone'"):
        trainer(lambda params: torch.optim.SGD(mh.groups(params, {"backbone": {"lr": 0.1}}), lr=0.1))
    with pytest.raises(ConfigError, match="parameters without names"):
        trainer(lambda params: torch.optim.SGD(mh.groups(list(params), {}), lr=0.1))
    with pytest.raises(ConfigError, match="a float, not a dict"):
        trainer(lambda params: torch.optim.SGD(mh.groups(params, {"*": 0.1}), lr=0.1))
