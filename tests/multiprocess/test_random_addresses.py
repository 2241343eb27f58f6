"""Random numbers of `collate`, the step, an evaluation and the update: the same on any number of workers, and resumed.

Every one of them draws from torch, NumPy and Python's `random` alike.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from ranks import run_ranks
from runs import images_and_labels
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset, default_collate

import manyhosts as mh

pytestmark = pytest.mark.multiprocess


def drawn() -> float:
    """One number, in which all three generators have a part."""
    return torch.rand(()).item() + numpy.random.rand() + random.random()


def mixing_collate(samples: list[Any]) -> list[Tensor]:
    """Mixup: what it draws is for the whole batch."""
    images, labels = default_collate(samples)
    return [images + 0.1 * drawn() * images.flip(0), labels]


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.2), nn.Linear(16, 10))


def noisy_step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images * (1 + 0.1 * drawn())), labels)


class Langevin(torch.optim.Optimizer):
    """Gradient descent with noise of its own (SGLD)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                parameter -= group["lr"] * (parameter.grad + 0.01 * drawn() * torch.randn_like(parameter))


class Plain(IterableDataset[Any]):
    """The digits as a stream."""

    def __iter__(self) -> Any:
        return iter(TensorDataset(*images_and_labels(60)))


def fitted(rank: int, run_dir: Path, duration: str, random_batches: bool, more: dict[str, Any]) -> list[Any]:
    """Hash, validation and what the generators give afterwards. With `random_batches` every part of a step draws."""
    randomness_before = drawn_from_fixed_seeds()
    stream = more.pop("stream", False)
    loader_workers = more.pop("loader_workers", 0)
    batches: dict[str, Any] = {"collate": mixing_collate} if random_batches else {}
    trainer = mh.Trainer(
        model=Model if random_batches else lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        optimizer=Langevin,
        data=mh.Data(
            train=Plain() if stream else TensorDataset(*images_and_labels(60)),
            validation=TensorDataset(*images_and_labels(40, first=100)),
            batch_size=21,
            loader_workers=loader_workers,
            **batches,
        ),
        run_dir=run_dir,
        **({"step": noisy_step} if random_batches else {"loss": nn.CrossEntropyLoss()}),
        **more,
    )
    seed_fixed()
    result = trainer.fit(duration)
    assert drawn() == randomness_before, "fit gives the script's generators back as they were"
    return [result.weights_sha256, result.validation["loss"], [p.tolist() for p in trainer.model.parameters()]]


def seed_fixed() -> None:
    torch.manual_seed(5)
    numpy.random.seed(5)
    random.seed(5)


def drawn_from_fixed_seeds() -> float:
    seed_fixed()
    return drawn()


def train(workers: int, run_dir: Path, *, duration: str = "5 steps", random_batches: bool = True, **more: Any) -> Any:
    first, *others = run_ranks(workers, fitted, run_dir, duration, random_batches, more)
    assert all(other[:2] == first[:2] for other in others), "workers hold the same"
    return first


def test_with_virtual_workers_no_bit_depends_on_workers_or_loader_processes(tmp_path: Path) -> None:
    same = {"virtual_workers": 3, "micro_batch_size": 4}
    one = train(1, tmp_path / "1", **same)[:2]
    for workers in (2, 3):
        assert train(workers, tmp_path / str(workers), **same)[:2] == one, workers
    # In this process: those of `run_ranks` may not have processes of their own.
    assert fitted(0, tmp_path / "loaders", "5 steps", True, {**same, "loader_workers": 2})[:2] == one


@pytest.mark.parametrize("stream", [False, True])
def test_resume_draws_what_the_whole_run_draws(stream: bool, tmp_path: Path) -> None:
    for workers in (1, 2):
        whole = train(workers, tmp_path / f"whole-{workers}", stream=stream)
        train(workers, tmp_path / f"cut-{workers}", stream=stream, duration="2 steps")
        assert train(workers, tmp_path / f"cut-{workers}", stream=stream)[:2] == whole[:2]


def test_noise_of_the_update_is_the_same_on_every_worker_and_on_any_number(tmp_path: Path) -> None:
    one = train(1, tmp_path / "1", random_batches=False)
    for workers in (2, 3):
        other = train(workers, tmp_path / str(workers), random_batches=False)
        assert other[1] == pytest.approx(one[1], rel=1e-6)
        for own, theirs in zip(one[2], other[2], strict=True):
            torch.testing.assert_close(torch.tensor(theirs), torch.tensor(own), rtol=1e-5, atol=1e-6)


def test_neighbouring_steps_and_batches_draw_different_numbers(tmp_path: Path) -> None:
    """A seed that was the same everywhere would pass all of the above."""
    batches: list[float] = []

    def collate(samples: list[Any]) -> list[Tensor]:
        batches.append(drawn())
        return list(default_collate(samples))

    steps: list[float] = []

    def step(model: nn.Module, batch: list[Tensor]) -> Tensor:
        if model.training:
            steps.append(drawn())
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    mh.Trainer(
        model=nn.Linear(2, 1),
        step=step,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=TensorDataset(torch.randn(12, 2), torch.randn(12, 1)), batch_size=4, collate=collate),
        micro_batch_size=2,
        weight="samples",  # so that nobody looks at the loss beforehand, which takes one more batch
        run_dir=tmp_path,
    ).fit("2 epochs")
    assert len(set(batches)) == len(batches) == 12
    assert len(set(steps)) == len(steps) == 12
