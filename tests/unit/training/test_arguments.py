"""What people bring from other trainers is answered with what to write here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from runs import images_and_labels, network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manyhosts as mh
from manyhosts.config.arguments import OF_DATA, OF_TRAINER
from manyhosts.errors import ConfigError


def dataset() -> TensorDataset:
    return TensorDataset(*images_and_labels(20))


def trainer(**more: Any) -> mh.Trainer:
    given: dict[str, Any] = {
        "model": network,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "data": mh.Data(train=dataset(), batch_size=5),
    }
    return mh.Trainer(**{**given, **more})


SLIPS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "epochs for the trainer": (lambda: trainer(max_epochs=3), "no argument 'max_epochs'", 'trainer.fit("20 epochs")'),
    "workers for the trainer": (lambda: trainer(devices=2), "no argument 'devices'", "manyhosts run --workers 2"),
    "a slip of the pen": (lambda: trainer(clip_gradient=1), "no argument 'clip_gradient'", "'clip_gradients'"),
    "arguments without names": (lambda: mh.Trainer(network()), "by name, but a Sequential", "model=…"),
    "processes of a loader": (lambda: mh.Data(dataset(), num_workers=2), "no argument 'num_workers'", "loader_workers"),
    "a batch size without a name": (lambda: mh.Data(dataset(), 64), "by name, but a int", "batch_size=…"),
    "an optimizer that is made": (
        lambda: trainer(optimizer=torch.optim.AdamW(network().parameters(), lr=0.003)),
        "optimizer is the AdamW of a model",
        "lambda params: torch.optim.AdamW(params, lr=0.003)",
    ),
    "a loader as data": (lambda: trainer(data=DataLoader(dataset())), "data is a DataLoader", "mh.Data(train="),
    "a loader as a set": (
        lambda: mh.Data(train=DataLoader(dataset(), batch_size=7)),
        "the train set is a DataLoader",
        "mh.Data(train=loader.dataset, batch_size=7)",
    ),
    "weights that are not there": (lambda: trainer(init_from="nowhere.pt"), "no such file", "state_dict"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_slip_is_answered_with_what_to_write(slip: str) -> None:
    act, what, fix = SLIPS[slip]
    with pytest.raises(ConfigError) as raised:
        act()
    assert what in raised.value.what
    assert fix in raised.value.fix


def test_no_answer_is_for_an_argument_that_there_is() -> None:
    for kind, answers in ((mh.Trainer, OF_TRAINER), (mh.Data, OF_DATA)):
        for name in answers:
            with pytest.raises(ConfigError, match=f"no argument '{name}'"):
                kind(**{name: 1})
