"""Training sets that change, grow, chain streams or keep what they have drawn: as in one process, or said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import ChainDataset, Dataset, IterableDataset
from unusual import BATCH, rows, state_of

import manyhosts as mh
from manyhosts.errors import ManyhostsError

pytestmark = pytest.mark.multiprocess


class Growing(Dataset[Any]):
    """Rows, scaled; as many as `length`."""

    def __init__(self) -> None:
        self.length, self.scale = BATCH, 1.0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        inputs, targets = rows(40)[index]
        return inputs * self.scale, targets


class Caching(Growing):
    """Keeps each sample as it was augmented first."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.kept:
            inputs, targets = super().__getitem__(index)
            self.kept[index] = inputs + 0.1 * torch.randn(6), targets
        return self.kept[index]


class CachingWhatIsRead(Caching):
    """Keeps what it reads, and draws after that."""

    def __getitem__(self, index: int) -> Any:
        if index not in self.kept:
            self.kept[index] = Growing.__getitem__(self, index)
        inputs, targets = self.kept[index]
        return inputs + 0.1 * torch.randn(6), targets


class Part(IterableDataset[Any]):
    """A stream that does not know its length."""

    def __init__(self, first: int, end: int) -> None:
        self.rows = range(first, end)

    def __iter__(self) -> Any:
        return (rows()[row] for row in self.rows)


def trainer(data: Any, run_dir: Path, **more: Any) -> mh.Trainer:
    torch.manual_seed(0)
    return mh.Trainer(
        model=nn.Linear(6, 2),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=data, batch_size=5),
        run_dir=run_dir,
        **more,
    )


def said_of(made: mh.Trainer, duration: str) -> Any:
    try:
        made.fit(duration)
    except ManyhostsError as error:
        return str(error)
    return state_of(made.model)


def trained(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "chained": said_of(trainer(ChainDataset([Part(0, 10), Part(10, 23)]), folder / "c"), "2 epochs")
    }
    data = Growing()
    made = trainer(data, folder / "grown")
    made.fit("1 epoch")
    data.length = 30
    found["grown"] = said_of(made, "2 epochs")
    found["caching"] = said_of(trainer(Caching(), folder / "caching"), "1 epoch")
    found["reading"] = said_of(trainer(CachingWhatIsRead(), folder / "reading"), "3 epochs")
    changed = Growing()

    def louder(event: Any) -> None:
        changed.scale += 0.1 * (type(event).__name__ == "StepDone")

    found["changed"] = said_of(trainer(changed, folder / "changed", listeners=[louder]), "3 epochs")
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[dict[str, Any]]]]:
    found = {}
    for workers in (1, 2):
        folder = tmp_path_factory.mktemp(f"runs-{workers}")
        found[workers] = folder, run_ranks(workers, trained, folder, timeout_s=100)
    return found


@pytest.mark.parametrize("name", ["chained", "reading"])
def test_it_is_that_of_one_process(name: str, answers: Any) -> None:
    [one] = answers[1][1]
    for each in answers[2][1]:
        for tensor, value in one[name].items():
            torch.testing.assert_close(each[name][tensor], value, rtol=1e-5, atol=1e-6)


def test_training_set_that_has_grown_is_refused_on_all_workers(answers: Any) -> None:
    for _, ranks in answers.values():
        for each in ranks:
            assert "the training set has 30 samples, and had 10 when the trainer was made" in each["grown"]


def test_samples_that_are_kept_augmented_are_refused_where_another_worker_would_draw_others(answers: Any) -> None:
    assert not isinstance(answers[1][1][0]["caching"], str), "one process has no other"
    for each in answers[2][1]:
        assert "a sample keeps the random numbers that it draws when it is read first" in each["caching"]


def test_training_set_that_a_listener_changes_on_the_leader_alone_is_told(answers: Any) -> None:
    said = json.loads((answers[2][0] / "changed" / "run.json").read_text())["same_answer"]
    assert said["outcome"] == "not tried"
    assert "the training set's scale was changed while it was trained on" in said["text"]
