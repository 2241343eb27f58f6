"""Metrics of every kind are those that torchmetrics gives in one process, on one worker, two and three."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import Dataset
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric, PearsonCorrCoef
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryConfusionMatrix, BinaryF1Score
from torchmetrics.segmentation import MeanIoU
from torchmetrics.text import CharErrorRate, ROUGEScore
from torchmetrics.wrappers import BootStrapper, Running

from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.data.fetch import Fetcher
from manyhosts.evaluation.dataset_forward import ForwardPasses
from manyhosts.evaluation.evaluate import Evaluation
from manyhosts.evaluation.metrics import Metrics, flattened
from manyhosts.loss.compute import autocast

pytestmark = pytest.mark.multiprocess
SAMPLES, BATCH = 21, 4


class Boxes(Metric):
    """As mean average precision does: a list with what was found in each image, of which each has another number."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("found", default=[], dist_reduce_fx=None)
        self.add_state("outlines", default=[], dist_reduce_fx=None)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        for row in outputs:
            count = int(row[0] * 10) % 4
            self.found.append(row.expand(count, len(row)))
            self.outlines.append((count, b"\x00run" * count))  # no tensor at all

    def compute(self) -> dict[str, torch.Tensor]:
        most = max(range(len(self.found)), key=lambda image: (len(self.found[image]), image))
        return {
            "images": torch.tensor(len(self.found)),
            "boxes": torch.tensor(sum(len(each) for each in self.found)),
            "fullest": torch.tensor(most),
            "bytes": torch.tensor(sum(len(text) for _, text in self.outlines)),
        }


class Last(Metric):
    """A state that no rule puts together: what the last sample had, smoothed with one before the first."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("last", default=torch.zeros(()), dist_reduce_fx=None)
        self.add_state("smooth", default=torch.ones(()), dist_reduce_fx="sum")
        self.add_state("mean", default=torch.zeros(()), dist_reduce_fx="mean")
        self.add_state("own", default=torch.zeros(()), dist_reduce_fx=lambda states: states.amax(0))
        self.add_state("rows", default=[], dist_reduce_fx=lambda states: states)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.last = outputs[-1, 0]
        self.smooth = self.smooth + targets.sum()
        self.mean = 0.5 * self.mean + 0.5 * outputs.mean()
        self.own = torch.maximum(self.own, outputs.amax())
        self.rows.append(outputs[:, 0])

    def compute(self) -> dict[str, torch.Tensor]:
        rows = torch.tensor(len(self.rows))
        return {"last": self.last, "smooth": self.smooth, "mean": self.mean, "own": self.own, "rows": rows}


class Beside(Metric):
    """Keeps something in attributes that are no states, which torchmetrics alone never brings together."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", default=torch.zeros(()), dist_reduce_fx="sum")
        self.name = "beside"
        self._forget()

    def _forget(self) -> None:
        self.samples, self.peaks, self.by_target = 0, [0.0], dict[int, torch.Tensor]()

    def reset(self) -> None:
        super().reset()
        self._forget()

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.right = self.right + targets.sum()
        self.samples += len(targets)
        self.peaks.append(float(outputs.max()))
        for target in targets.tolist():
            self.by_target[target] = self.by_target.get(target, torch.zeros(())) + outputs.mean()

    def compute(self) -> dict[str, torch.Tensor]:
        peak = torch.tensor(sum(self.peaks) / len(self.peaks))
        return {"share": self.right / self.samples, "peak": peak, "ones": self.by_target[1]}


class Drawn(Metric):
    """Draws a number in each update, and keeps something in an attribute that is no state."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", default=torch.zeros(()), dist_reduce_fx="sum")
        self.updates = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.updates += 1
        self.total = self.total + torch.rand(())

    def compute(self) -> torch.Tensor:
        return self.total


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.rand(SAMPLES, 3, generator=generator)
        self.targets = (torch.rand(SAMPLES, generator=generator) > 0.4).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class On(Metric):
    """Feeds another metric with something made of the outputs and targets."""

    full_state_update = False

    def __init__(self, metric: Metric, made: Callable[..., tuple[Any, ...]]) -> None:
        super().__init__()
        self.metric, self.made = metric, made

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.metric.update(*self.made(outputs, targets))

    def compute(self) -> Any:
        return self.metric.compute()

    def reset(self) -> None:
        super().reset()
        self.metric.reset()


def first_column(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs[:, 0], targets


def column(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor]:
    return (outputs[:, 0],)


def floats(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs[:, 0], targets.float() + outputs[:, 1]


def words(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[list[str], list[str]]:
    said = ["".join("abcdefghij"[int(number * 10)] for number in row) for row in outputs]
    return said, ["abc" if target else "hij" for target in targets]


def masks(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (outputs > 0.5).long()[:, None], (outputs.roll(1, 1) > targets[:, None] * 0.6).long()[:, None]


def metrics() -> dict[str, Metric | MetricCollection]:
    return {
        "boxes": Boxes(),
        "last": Last(),
        "beside": Beside(),
        "auroc": On(BinaryAUROC(), first_column),
        "confusion": On(BinaryConfusionMatrix(), first_column),
        "mean": On(MeanMetric(), column),
        "cat": On(CatMetric(), column),
        "pearson": On(PearsonCorrCoef(), floats),
        "iou": On(MeanIoU(num_classes=2, input_format="index", include_background=True), masks),
        "characters": On(CharErrorRate(), words),
        "rouge": On(ROUGEScore(rouge_keys="rouge1"), words),
        "running": On(Running(MeanMetric(), window=3), column),
        "extremes": On(MinMaxMetric(BinaryAccuracy()), first_column),
        "strapped": On(BootStrapper(BinaryAccuracy(), num_bootstraps=3), first_column),
        "sum": On(MeanMetric(), column) + 1,
    }


def two_collections() -> dict[str, Metric | MetricCollection]:
    return {
        "raw": MetricCollection([BinaryAccuracy(threshold=0.2), BinaryAUROC()]),
        "tuned": MetricCollection([BinaryAccuracy(threshold=0.7), BinaryF1Score()]),
    }


def evaluate(rank: int) -> dict[str, float]:
    world = World(Place.from_environment())
    rows = Rows()
    found: dict[str, float] = {}
    for kind, given in (("one", metrics()), ("two", two_collections())):
        passes = ForwardPasses(
            Fetcher(rows, seed=0, name="test"),
            SAMPLES,
            batch=BATCH,
            loader_workers=0,
            world=world,
            context=autocast("fp32", world.device),
        )
        evaluation = Evaluation(
            passes,
            loss=lambda outputs, targets: outputs.mean(),
            step=None,
            metrics=flattened(given),
        )
        model: Any = nn.Identity() if kind == "one" else nn.Sequential(Column())
        evaluation(model)  # twice, because nothing of the first time may be left in the second
        found |= evaluation(model)
    return found


def drawn_of_one_batch(rank: int) -> dict[str, float]:
    made = Metrics({"second": Drawn(), "first": Drawn()}, World(Place.from_environment()), seed=0)
    if rank == 0:
        made.begin_part()
        made.update(0, torch.rand(BATCH, 3), torch.ones(BATCH))
        made.end_part()
    return made.values()


def test_worker_without_samples_draws_in_the_order_of_the_script() -> None:
    [alone] = run_ranks(1, drawn_of_one_batch)
    assert run_ranks(2, drawn_of_one_batch) == [alone, alone]


class Column(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs[:, 0]


@pytest.fixture(scope="module")
def answers() -> dict[int, list[dict[str, float]]]:
    return {workers: run_ranks(workers, evaluate) for workers in (1, 2, 3)}


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """As the evaluation reads them."""
    rows = Rows()
    yield from zip(rows.inputs.split(BATCH), rows.targets.split(BATCH), strict=True)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_metric_is_that_of_torchmetrics_alone(workers: int, answers: dict[int, Any]) -> None:
    for name, metric in metrics().items():
        if name == "strapped":
            continue  # it draws its samples by chance
        assert isinstance(metric, Metric)
        for outputs, targets in batches():
            metric.update(outputs, targets)
        for answer in answers[workers]:
            expected = scalars_of(name, metric.compute())
            assert {key: answer[key] for key in expected} == pytest.approx(expected, rel=1e-6), name


@pytest.mark.parametrize("workers", [2, 3])
def test_bits_do_not_depend_on_the_workers(workers: int, answers: dict[int, Any]) -> None:
    assert all(answer == answers[1][0] for answer in answers[workers])


def test_two_collections_with_equal_members_have_both(answers: dict[int, Any]) -> None:
    rows = Rows()
    for threshold, name in ((0.2, "raw/BinaryAccuracy"), (0.7, "tuned/BinaryAccuracy")):
        expected = BinaryAccuracy(threshold=threshold)(rows.inputs[:, 0], rows.targets)
        assert answers[2][0][name] == pytest.approx(float(expected))
    assert {"BinaryAUROC", "BinaryF1Score"} < answers[2][0].keys(), "where there is no clash, names are as before"


def scalars_of(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, dict):
        return {key: n for inner, part in value.items() for key, n in scalars_of(f"{name}/{inner}", part).items()}
    if isinstance(value, torch.Tensor) and value.dim():
        return {key: n for i, part in enumerate(value) for key, n in scalars_of(f"{name}/{i}", part).items()}
    return {name: float(value)}
