"""What cannot be right at the start is said before or at the third step, on all workers alike, and nothing else is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import manyhosts as mh
from manyhosts.errors import ManyhostsError
from manyhosts.events import Event, Note

pytestmark = pytest.mark.multiprocess
X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Splits(IterableDataset[Any]):
    """Divides itself by rank, as the tutorials of DataLoader show it."""

    def __iter__(self) -> Iterator[Any]:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return ((X[row], Y[row]) for row in range(rank, 30, size))


class Own(IterableDataset[Any]):
    """Draws from a generator of its own, which nobody has given a seed."""

    def __iter__(self) -> Iterator[Any]:
        numbers = np.random.default_rng()
        return ((torch.from_numpy(numbers.normal(size=4)).float(), torch.zeros(1)) for _ in range(30))


class Decoded(IterableDataset[Any]):
    """The same on every worker, but for last digits, as of pictures that another library has decoded."""

    def __iter__(self) -> Iterator[Any]:
        blur = 1 + 1e-6 * int(os.environ["RANK"])
        for row in range(30):
            yield {"picture": X[row] * blur, "label": row, "path": f"{row}.jpg", "target": Y[row]}


class Noisy(IterableDataset[Any]):
    """Draws random numbers that have an address."""

    def __iter__(self) -> Iterator[Any]:
        return ((X[row] + torch.randn(4), Y[row]) for row in range(30))


def pictures(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["picture"]), batch["target"])


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def sgd(rate: float = 0.1, **more: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.SGD(params, lr=rate, **more)


def column(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.long))


class Idle(torch.optim.SGD):
    """Forgets what it is there for."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


WAYS: dict[str, dict[str, Any]] = {
    "split": {"train": Splits()},
    "own": {"train": Own()},
    "decoded": {"train": Decoded(), "loss": None, "step": pictures},
    "noisy": {"train": Noisy()},
    "plateau": {"schedule": plateau},
    "plateau with validation": {"schedule": plateau, "data": {"validation": TensorDataset(X, Y)}},
    "zero": {"loss": column, "optimizer": sgd(weight_decay=0.1)},
    "still": {"optimizer": lambda params: Idle(params, lr=0.1)},
    "no rate": {"optimizer": sgd(0.0)},
    "warm-up": {"warmup": "20 steps"},
    "zero at first": {
        "schedule": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, step - 2) / 10)
    },
    "momentum": {"optimizer": sgd(momentum=0.9), "clip_gradients": 1.0},
    "local": {"strategy": "local-sgd"},
    "virtual": {"virtual_workers": 3},
}


def runs(rank: int, folder: Path) -> dict[str, tuple[str, str, list[tuple[int, str]]]]:
    found = {}
    for way, given in WAYS.items():
        given = dict(given)
        reported: list[Event] = []
        data = mh.Data(given.pop("train", TensorDataset(X, Y)), batch_size=6, **given.pop("data", {}))
        settings = {"loss": nn.MSELoss(), "optimizer": sgd(), **given}
        try:
            mh.Trainer(
                model=lambda: nn.Linear(4, 1), data=data, run_dir=folder / way, listeners=[reported.append], **settings
            ).fit("5 steps")
            end = ("none", "")
        except ManyhostsError as error:
            end = (type(error).__name__, str(error))
        notes = [(each.step, each.text) for each in reported if isinstance(each, Note)]
        found[way] = (*end, [note for note in notes if "gradient" in note[1] or "weight" in note[1]])
    return found


@pytest.mark.parametrize("workers", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_the_first_steps_show_is_said_once_and_nothing_else(workers: int, tmp_path: Path) -> None:
    answers = run_ranks(workers, runs, tmp_path)
    for answer in answers[1:]:
        assert {way: reported[:2] for way, reported in answer.items()} == {
            way: reported[:2] for way, reported in answers[0].items()
        }
    wrong = {way: reported[:2] for way, reported in answers[0].items() if reported[0] != "none"}
    assert wrong.keys() == {"plateau"} | ({"split", "own"} if workers > 1 else set())
    kind, words = wrong["plateau"]
    assert kind == "ConfigError"
    assert "ReduceLROnPlateau" in words
    for way in wrong.keys() - {"plateau"}:
        kind, words = wrong[way]
        assert kind == "DataError"
        assert words.startswith("the train stream gives rank 1 other samples than rank 0"), way
    notes = {way: reported[2] for way, reported in answers[0].items() if reported[2]}
    assert notes.keys() == {"zero", "still"}
    assert [(step, "the gradient was zero in each of 3 steps" in text) for step, text in notes["zero"]] == [(3, True)]
    assert [(step, "no weight has changed in 3 steps" in text) for step, text in notes["still"]] == [(3, True)]
