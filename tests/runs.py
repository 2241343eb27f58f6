"""Small training runs on real digits, for tests that compare one run with another."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import manyhosts as mh
from manyhosts.records.samples import counted


@dataclass(frozen=True)
class Recipe:
    """One training run, in plain values that travel to other processes."""

    samples: int = 203
    batch: int = 50  # 203 = 4 x 50 + 3: the last batch is smaller than four workers
    duration: str = "2 epochs"
    batch_norm: bool = False
    dropout: float = 0.0
    augment: bool = False
    schedule: bool = False
    trainer: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    momentum: float = 0.9
    accuracy: bool = True
    """Whether validation has a metric, whose library every worker of a `manyhosts run` takes seconds to load."""
    sample_s: float = 0.0
    """How long a sample takes to be read, where it is augmented: so that there is time for something to happen."""
    slow_worker: int | None = None
    """The rank of a worker that takes three times as long for it."""
    validation_sample_s: float = 0.0
    """The same for a sample of the validation set."""
    stream: bool = False
    """Whether the samples come as a stream that is read in shards, augmented."""


CHANCY = Recipe(samples=150, batch=16, batch_norm=True, dropout=0.3, augment=True)
"""All in which chance, or other samples of the batch, have a hand, on few enough of them for many epochs."""


def _digits() -> numpy.ndarray:
    """Read without scikit-learn, whose import takes a worker as long as all of its training here."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    return numpy.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")


_DIGITS = _digits()  # when this file is loaded: ranks are forked from a process that has it


def images_and_labels(samples: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = _DIGITS[first : first + samples]
    images = torch.tensor(chosen[:, :64], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return images, torch.tensor(chosen[:, 64], dtype=torch.int64)


def network(*, batch_norm: bool = False, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        *([nn.BatchNorm2d(8)] if batch_norm else []),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *([nn.Dropout(dropout)] if dropout else []),
        nn.Linear(8 * 16, 10),
    )


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Digits that look different every time they are read."""

    def __init__(self, samples: int, sample_s: float = 0.0) -> None:
        self.sample_s = sample_s
        self.images, self.labels = images_and_labels(samples)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.sample_s)
        return self.images[index] + 0.1 * torch.randn(1, 8, 8), self.labels[index]


class Slow(TensorDataset):
    """Digits that take some time to be read."""

    def __init__(self, sample_s: float, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.sample_s = sample_s

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(self.sample_s)
        return super().__getitem__(index)


class Shards(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same as a stream, whose shards are of unequal length."""

    def __init__(self, samples: int, sample_s: float = 0.0, index: int = 0, count: int = 1) -> None:
        self.whole = Noisy(samples, sample_s)
        self.rows = [row for row in range(samples) if row * row // 5 % count == index]

    def shard(self, index: int, count: int) -> Shards:
        return Shards(len(self.whole), self.whole.sample_s, index, count)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (self.whole[row] for row in self.rows)

    def numbers(self, shards: int) -> list[int]:
        """What a record calls the samples of an epoch that is read in so many shards, sorted."""
        lengths = [len(self.shard(shard, shards).rows) for shard in range(shards)]
        return sorted(place * shards + shard for shard, length in enumerate(lengths) for place in range(length))


def make_trainer(recipe: Recipe, run_dir: Path | None, **more: Any) -> mh.Trainer:
    torch.set_num_threads(recipe.threads)
    train: Dataset[Any] = TensorDataset(*images_and_labels(recipe.samples))
    if recipe.augment or recipe.stream:
        is_slow = recipe.slow_worker is not None and os.environ.get("RANK") == str(recipe.slow_worker)
        train = (Shards if recipe.stream else Noisy)(recipe.samples, recipe.sample_s * (3 if is_slow else 1))
    metrics = {}
    if recipe.accuracy:
        from torchmetrics.classification import MulticlassAccuracy

        metrics["accuracy"] = MulticlassAccuracy(num_classes=10, average="micro")
    schedule = (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30)) if recipe.schedule else None
    optimizer = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=recipe.momentum)}
    settings = {"loss": nn.CrossEntropyLoss(), **optimizer, **recipe.trainer, **more}
    if isinstance(settings.get("snapshots"), dict):  # as it comes out of JSON
        settings["snapshots"] = mh.Snapshots(**settings["snapshots"])
    return mh.Trainer(
        model=lambda: network(batch_norm=recipe.batch_norm, dropout=recipe.dropout),
        schedule=schedule,
        data=mh.Data(
            train=train,
            validation=Slow(recipe.validation_sample_s, *images_and_labels(101, first=1000)),
            batch_size=recipe.batch,
            **recipe.data,
        ),
        metrics=metrics,
        record_samples=True,
        run_dir=run_dir,
        **settings,
    )


def run_recipe(rank: int, recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    trainer = make_trainer(recipe, run_dir)
    result = trainer.fit(recipe.duration)
    return {
        "weights": {name: value.detach().numpy() for name, value in trainer.model.state_dict().items()},
        "result": {**asdict(result), "run_dir": str(result.run_dir)},
    }


def trained(workers: int, recipe: Recipe, run_dir: Path, timeout_s: float = 120) -> list[dict[str, Any]]:
    """What `recipe` gave on `workers` workers, by rank.

    Its bits are those of `manyhosts run`, so that a run to which something happens can be compared with it.
    """
    return run_ranks(workers, run_recipe, recipe, run_dir, timeout_s=timeout_s)


def samples_by_step(run_dir: Path) -> dict[int, list[int]]:
    """Which samples each step took, over all workers, sorted."""
    return counted(run_dir / "logs")


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in `metrics.jsonl`."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def step_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The step lines of `metrics.jsonl`."""
    return events(run_dir, "step")


def restarts(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl` that say how the others continued."""
    return events(run_dir, "restart")


def recipe_in_environment() -> Recipe:
    """For scripts: the recipe that a test has put into `RECIPE`."""
    return Recipe(**json.loads(os.environ["RECIPE"]))
