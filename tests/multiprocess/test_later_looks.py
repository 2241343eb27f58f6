"""Looks that come again, on two workers: both refuse what one of them meets, after a resume too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import step_lines
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from unusual import rows

import manyhosts as mh
from manyhosts.errors import ManyhostsError

pytestmark = pytest.mark.multiprocess
BEGINS = 14
"""The step from which on the loss is no mean: between looks."""


class Aged(nn.Linear):
    """Knows how many steps it has been trained, in a buffer."""

    def __init__(self) -> None:
        super().__init__(6, 2)
        self.register_buffer("age", torch.zeros((), dtype=torch.long))


class Ageing(mh.Callback):
    def after_step(self, moment: Any) -> None:
        moment.model.age.fill_(moment.step)


def later(model: Any, batch: Any) -> Tensor:
    outputs = model(batch[0])
    loss = nn.functional.mse_loss(outputs, batch[1])
    return loss + outputs.square().sum() if model.age >= BEGINS else loss


def fitted(rank: int, folder: Path, durations: list[str]) -> str:
    torch.manual_seed(0)
    for duration in durations:
        made = mh.Trainer(
            model=Aged(),
            step=later,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            data=mh.Data(train=TensorDataset(*rows().tensors), batch_size=10),
            callbacks=[Ageing()],
            run_dir=folder,
        )
        try:
            made.fit(duration)
        except ManyhostsError as error:
            return str(error)
    return ""


def all_fitted(rank: int, folder: Path) -> list[str]:
    found = []
    for name, every, durations in (
        ("later", 6, ["30 steps"]),
        ("resumed", 0, ["16 steps", "20 steps"]),
        ("never", 0, ["16 steps"]),
    ):
        os.environ["MANYHOSTS_SET"] = f'{{"look_every": "{every}"}}'
        found.append(fitted(rank, folder / name, durations))
    del os.environ["MANYHOSTS_SET"]
    return found


def test_later_look_and_the_one_after_a_resume_refuse_on_both_workers(tmp_path: Path) -> None:
    one, two = run_ranks(2, all_fitted, tmp_path, timeout_s=100)
    assert one == two
    assert "the loss is no mean over the samples" in one[0]
    assert len(step_lines(tmp_path / "later")) == 17, "the eighteenth step is looked at"
    assert "the loss is no mean over the samples" in one[1]
    assert len(step_lines(tmp_path / "resumed")) == 16, "what is resumed is looked at before its first step"
    assert not one[2]
