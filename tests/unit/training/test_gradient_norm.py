"""The norm of the gradient is told now and then where nobody clips by it, and nothing is judged by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import images_and_labels, network, step_lines
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import TrainingError

IMAGES, LABELS = images_and_labels(20)


def trainer(run_dir: Path, **more: Any) -> mh.Trainer:
    given: dict[str, Any] = {
        "model": network,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "data": mh.Data(train=TensorDataset(IMAGES, LABELS), batch_size=20),
        "run_dir": run_dir,
    }
    return mh.Trainer(**{**given, **more})


def test_norm_of_one_step_in_twenty_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    nn.functional.cross_entropy(made.model(IMAGES), LABELS).backward()
    norm = torch.stack([each.grad.norm() for each in made.model.parameters() if each.grad is not None]).norm().item()
    made.model.zero_grad()
    made.fit("22 steps")
    found = {line["step"]: line["gradient_norm"] for line in step_lines(tmp_path)}
    assert [step for step, value in found.items() if value is not None] == [1, 21]
    assert found[1] == pytest.approx(norm, rel=1e-4)


class NotANumber(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # PyTorch's takes any number
        return gradient * float("nan")


def test_gradient_that_is_nan_is_told_as_in_the_steps_whose_norm_is_not_shown(tmp_path: Path) -> None:
    class Bad(nn.CrossEntropyLoss):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return NotANumber.apply(super().forward(outputs, targets))  # type: ignore[no-any-return, no-untyped-call]

    with pytest.raises(TrainingError, match="the update of step 1 left nan in the parameter"):
        trainer(tmp_path, loss=Bad()).fit("5 steps")


def test_sparse_gradients_of_one_worker_have_the_norm_of_dense_ones(tmp_path: Path) -> None:
    norms = []
    for sparse in (True, False):
        made = trainer(
            tmp_path / str(sparse),
            model=lambda sparse=sparse: nn.Sequential(nn.EmbeddingBag(5, 10, sparse=sparse)),
            data=mh.Data(train=TensorDataset(LABELS.reshape(-1, 1) % 5, LABELS), batch_size=20),
        )
        made.fit("2 steps")
        norms.append(step_lines(tmp_path / str(sparse))[0]["gradient_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0
