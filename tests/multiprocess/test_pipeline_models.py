"""Models that a pipeline could get wrong, against one process: equal bits in weights, losses, norms and evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from runs import step_lines
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import manyhosts as mh

pytestmark = pytest.mark.multiprocess
WIDTH, CLASSES = 6, 5


class Skip(nn.Module):
    """Hands on what it was given beside what it has made of it, in a nest of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            given = {"now": given, "before": [given], "count": 0}
        made = torch.tanh(self.layer(given["now"]))
        return {"now": made, "before": [*given["before"], made], "count": given["count"] + 1}


class Join(nn.Module):
    """Uses all of them."""

    def forward(self, given: Any) -> Tensor:
        out: Tensor = torch.stack(given["before"]).sum(0) / given["count"] + given["now"]
        return out


class Inplace(nn.Module):
    """Writes into what it is given, and hands it on transposed."""

    def forward(self, given: Tensor) -> Tensor:
        return nn.functional.relu_(given).t()


class Back(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given.t()


class Noise(nn.Module):
    """Draws from all three generators, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, given: Tensor) -> Tensor:
        drawn = torch.rand(WIDTH) + float(np.random.rand()) + random.random()
        out: Tensor = given + self.gain * drawn
        return out


class Twice(nn.Module):
    """Uses its weight at two places, one after the other."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, given: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(given @ self.weight * 0.7) @ self.weight.t())


class Wide(nn.Module):
    """Its output is one number of each sample, repeated in memory that is not there."""

    def forward(self, given: Tensor) -> Tensor:
        return given[:, :1].expand(-1, WIDTH)


class Pause(nn.Module):
    """Without parameters."""

    def forward(self, given: Tensor) -> Tensor:
        return given * 0.9


def tied_thrice() -> nn.Module:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
    return nn.Sequential(Twice(weight), nn.Tanh(), Twice(weight), nn.Tanh(), Twice(weight), nn.Linear(WIDTH, CLASSES))


def frozen_ends() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    return model


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, 2),
        nn.BatchNorm2d(3, affine=False),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )


def two_dtypes() -> nn.Module:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, given: Tensor) -> Tensor:
            return torch.tanh(self.inner(given.double()))

    class Single(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            return given.float()

    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Double(), Single(), nn.Linear(WIDTH, CLASSES))


class Recurrent(nn.Module):
    """A trunk of cells, what comes before and behind them in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.cells = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(4))
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, given: Tensor) -> Tensor:
        hidden = given + self.start * torch.ones(given.shape[1], device=given.device)
        for cell in self.cells:
            hidden = cell(hidden)
        scores: Tensor = self.out(hidden) + self.start.sum()
        return scores


def shared_block() -> nn.Module:
    block = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(block, nn.Tanh(), block, nn.Tanh(), block, nn.Linear(WIDTH, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "skips": lambda: nn.Sequential(Skip(), Skip(), Skip(), Join(), nn.Linear(WIDTH, CLASSES)),
    "in place, transposed": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        Inplace(),
        Back(),
        nn.Linear(WIDTH, WIDTH),
        Inplace(),
        Back(),
        nn.Linear(WIDTH, CLASSES),
    ),
    "three generators": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Noise(), nn.Dropout(0.3), Noise(), nn.Linear(WIDTH, CLASSES)
    ),
    "a weight at six places": tied_thrice,
    "a block at three places": shared_block,
    "frozen ends": frozen_ends,
    "pictures": pictures,
    "two dtypes": two_dtypes,
    "trunk": Recurrent,
    "repeated": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Wide(), nn.Linear(WIDTH, WIDTH), Wide(), Pause(), nn.Linear(WIDTH, CLASSES)
    ),
}


def samples(count: int, seed: int) -> TensorDataset:
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs[:, 0] * 2).long() % CLASSES)


def fit(rank: int, names: list[str], strategy: str | mh.Pipeline, folder: Path) -> dict[str, list[Any]]:
    """Of each model: hash, validation, test, norms, losses, and the first predictions."""
    found = {}
    for name in names:
        trainer = mh.Trainer(
            model=MODELS[name],
            loss=nn.CrossEntropyLoss(weight=torch.linspace(1, 2, CLASSES)),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            data=mh.Data(train=samples(23, 1), validation=samples(19, 2), test=samples(7, 3), batch_size=8),
            metrics={"accuracy": MulticlassAccuracy(num_classes=CLASSES)},
            strategy=strategy,
            run_dir=folder / name,
            micro_batch_size=3,
            clip_gradients=0.5,
        )
        result = trainer.fit("5 steps")
        test = trainer.test()
        predicted = trainer.predict(samples(5, 4), weights="last").tolist()
        lines = step_lines(folder / name)
        norms, losses = [line["gradient_norm"] for line in lines], [line.get("loss") for line in lines]
        found[name] = [result.weights_sha256, result.validation, test, norms, losses, predicted]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    [found] = run_ranks(1, fit, list(MODELS), "ddp", tmp_path_factory.mktemp("alone"))
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("workers", "schedule"),
    [
        *((2, schedule) for schedule in ("1f1b", "interleaved")),
        pytest.param(2, "zero-bubble", marks=pytest.mark.slow),
        *(pytest.param(workers, "1f1b", marks=pytest.mark.slow) for workers in (3, 4)),
        pytest.param(4, "zero-bubble", marks=pytest.mark.slow),
    ],
)
def test_every_model_has_the_bits_of_one_process(workers: int, schedule: Any, alone: Any, tmp_path: Path) -> None:
    strategy = mh.Pipeline(cuts="layers", schedule=schedule)
    names = [name for name in MODELS if schedule != "interleaved" or name != "trunk"]  # which is refused
    for each in run_ranks(workers, fit, names, strategy, tmp_path):
        for name in names:
            assert each[name] == alone[name], name


class AtLeastTwo(nn.Module):
    """Fails where it is given one sample: on the worker that has it, and on no other."""

    def forward(self, given: Tensor) -> Tensor:
        if len(given) < 2:
            raise ValueError("one sample alone")
        return given


def of_two_or_more(rank: int, strategy: str | mh.Pipeline, folder: Path) -> str:
    torch.manual_seed(0)
    trainer = mh.Trainer(
        model=nn.Sequential(nn.Linear(WIDTH, WIDTH), AtLeastTwo(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)),
        loss=lambda outputs, labels: nn.functional.cross_entropy(outputs, labels),  # which is looked at
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=samples(32, 1), batch_size=8),
        strategy=strategy,
        run_dir=folder,
        micro_batch_size=4,
    )
    return trainer.fit("3 steps").weights_sha256


def test_block_that_one_sample_is_too_few_for_leaves_nobody_waiting(tmp_path: Path) -> None:
    [alone] = run_ranks(1, of_two_or_more, "ddp", tmp_path / "alone")
    assert run_ranks(2, of_two_or_more, mh.Pipeline(cuts="layers"), tmp_path / "cut") == [alone, alone]
