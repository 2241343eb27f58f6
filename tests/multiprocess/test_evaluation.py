"""Evaluation counts each sample once, and gives the same bits on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import images_and_labels, network
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

import manyhosts as mh
from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.data.fetch import Fetcher
from manyhosts.evaluation.dataset_forward import ForwardPasses
from manyhosts.evaluation.evaluate import Evaluation
from manyhosts.evaluation.metrics import flattened
from manyhosts.loss.compute import autocast

pytestmark = pytest.mark.multiprocess
SIZES = (1, 2, 7, 21, 150)


class Confidence(Metric):
    """A metric whose state is a float that does not add up alike in every order."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("highest", torch.zeros(()), dist_reduce_fx="max")

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.total += outputs.softmax(1).amax(1).sum()
        self.highest = torch.maximum(self.highest, outputs.amax())

    def compute(self) -> dict[str, torch.Tensor]:
        return {"total": self.total, "highest": self.highest}


def evaluate(rank: int) -> dict[int, dict[str, float]]:
    world = World(Place.from_environment())
    torch.manual_seed(5)
    model = network()
    found = {}
    for size in SIZES:
        dataset = TensorDataset(*images_and_labels(size))
        metrics = flattened(
            {
                "all": MetricCollection([MulticlassAccuracy(10), MulticlassConfusionMatrix(10)]),
                "confidence": Confidence(),
                "auroc": MulticlassAUROC(10, thresholds=None),
            }
        )
        passes = ForwardPasses(
            Fetcher(dataset, seed=0, name="test"),
            size,
            batch=8,
            loader_workers=0,
            world=world,
            context=autocast("fp32", world.device),
        )
        evaluation = Evaluation(
            passes,
            loss=nn.CrossEntropyLoss(),
            step=None,
            metrics=metrics,
        )
        evaluation(model)  # twice, because nothing of the first time may be left in the second
        found[size] = evaluation(model)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, float]]:
    [answer] = run_ranks(1, evaluate)
    return answer


@pytest.mark.filterwarnings("ignore")
def test_one_process_agrees_with_a_plain_loop(alone: Any) -> None:
    torch.manual_seed(5)
    model = network()
    for size in SIZES:
        images, labels = images_and_labels(size)
        outputs = model(images).detach()
        assert alone[size]["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, labels).item(), rel=1e-6)
        expected = MulticlassAccuracy(10)(outputs, labels).item()
        assert alone[size]["MulticlassAccuracy"] == pytest.approx(expected, rel=1e-6)
        counted = sum(value for name, value in alone[size].items() if name.startswith("MulticlassConfusionMatrix"))
        assert counted == size


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_metrics_are_exactly_those_of_one_process(workers: int, alone: Any) -> None:
    for answer in run_ranks(workers, evaluate):
        assert answer == alone


def test_mean_squared_error_is_not_thrown_off_by_uneven_shares() -> None:
    """21 samples on two workers: padding would count one of them twice."""
    assert run_ranks(2, error_of_21) == [10.0, 10.0]


def error_of_21(rank: int) -> float:
    world = World(Place.from_environment())
    values = torch.arange(21.0)[:, None]
    passes = ForwardPasses(
        Fetcher(TensorDataset(values, values), seed=0, name="test"),
        21,
        batch=8,
        loader_workers=0,
        world=world,
        context=autocast("fp32", world.device),
    )
    evaluation = Evaluation(
        passes,
        loss=lambda outputs, targets: targets.mean(),
        step=None,
        metrics={"error": MeanSquaredError()},
    )
    return evaluation(nn.Identity())["loss"]


LOGITS = torch.linspace(-0.2, 0.9, 37)[:, None]
TARGETS = (torch.rand(37, 1, generator=torch.Generator().manual_seed(1)) < 0.4).float()


class Unchanged(nn.Module):
    """Gives its inputs back, and has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.factor * inputs


def among_rows(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A contrastive loss: each row against all others of its batch."""
    return nn.functional.cross_entropy(-torch.cdist(outputs, targets), torch.arange(len(outputs)))


def of_few(rank: int, folder: Path, loss: Any, size: int | None) -> dict[str, float]:
    rows = TensorDataset(LOGITS, TARGETS)
    trainer = mh.Trainer(
        model=Unchanged,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(rows, validation=rows, batch_size=37, evaluation_batch_size=size),
        metrics={"accuracy": BinaryAccuracy()},
        run_dir=folder,
    )
    return dict(trainer.validate())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("size", [None, 37, 20])
def test_small_set_is_not_cut_into_batches_of_two_samples(workers: int, size: int | None, tmp_path: Path) -> None:
    """Of two logits, both may well be between 0 and 1, and torchmetrics takes them for probabilities."""
    expected = BinaryAccuracy()
    for outputs, targets in zip(LOGITS.split(size or 37), TARGETS.split(size or 37), strict=True):
        expected.update(outputs, targets.int())
    for found in run_ranks(workers, of_few, tmp_path, nn.BCEWithLogitsLoss(), size):
        assert found["accuracy"] == pytest.approx(expected.compute().item())


@pytest.mark.parametrize("size", [37, 20, 10])
def test_loss_that_compares_the_rows_of_a_batch_is_that_of_a_loader_with_such_batches(
    size: int, tmp_path: Path
) -> None:
    rows = zip(LOGITS.split(size), TARGETS.split(size), strict=True)
    expected = sum(float(among_rows(*each)) * len(each[0]) for each in rows) / 37
    [found] = run_ranks(1, of_few, tmp_path, among_rows, size)
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
