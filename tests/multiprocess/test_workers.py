"""What only several workers can show: uneven graphs, shards, growing batches, models that are not alike at first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import images_and_labels, network
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import manyhosts as mh
from manyhosts.snapshot.fingerprint import weights_sha256

pytestmark = pytest.mark.multiprocess


def trainer(run_dir: Path, **more: Any) -> mh.Trainer:
    arguments: dict[str, Any] = {
        "model": network,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
        "data": mh.Data(train=TensorDataset(*images_and_labels(40)), batch_size=10),
        "run_dir": run_dir,
    }
    return mh.Trainer(**{**arguments, **more})


class Branching(nn.Module):
    """Uses one of two layers, by what it is given, and a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.dark, self.bright, self.never = nn.Linear(64, 10), nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        flat = images.flatten(1)
        return self.dark(flat) if flat.mean() < 0.305 else self.bright(flat)


def branching(rank: int, run_dir: Path) -> dict[str, Any]:
    made = trainer(run_dir, model=Branching, weight="samples")  # what is in a piece chooses the layer
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    made.fit("12 steps")
    after = made.model.state_dict()
    return {"sha": weights_sha256(made.model), "moved": {n: not torch.equal(before[n], after[n]) for n in after}}


def test_parameters_that_some_workers_do_not_use_stay_equal_on_all(tmp_path: Path) -> None:
    """And one that nobody uses is not touched, not even by weight decay, as in one process."""
    answers = run_ranks(3, branching, tmp_path)
    assert len({answer["sha"] for answer in answers}) == 1
    assert answers[0]["moved"]["dark.weight"]
    assert answers[0]["moved"]["bright.weight"]
    assert not answers[0]["moved"]["never.weight"]


def unlike(rank: int, run_dir: Path) -> str:
    torch.manual_seed(rank)
    made = trainer(run_dir, model=network())
    return weights_sha256(made.model)


def test_models_that_differ_at_first_are_made_equal(tmp_path: Path) -> None:
    assert len(set(run_ranks(3, unlike, tmp_path))) == 1


class Shards(IterableDataset[Any]):
    """A stream that can be read in parts, which here are of very different length."""

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index, self.count = index, count

    def shard(self, index: int, count: int) -> Shards:
        return Shards(index, count)

    def __iter__(self) -> Iterator[Any]:
        images, labels = images_and_labels(30)
        mine = list(zip(images, labels, strict=True))[: 30 if self.count == 1 else 5 + 10 * self.index]
        return iter(mine)


def sharded(rank: int, run_dir: Path, batch_norm: bool, duration: str) -> dict[str, Any]:
    made = trainer(run_dir, data=mh.Data(train=Shards(), batch_size=8), model=lambda: network(batch_norm=batch_norm))
    result = made.fit(duration)
    return {"sha": result.weights_sha256, "steps": result.steps, "epochs": result.epochs}


@pytest.mark.parametrize("batch_norm", [False, True])
def test_shards_of_different_length_are_all_read_to_their_end(batch_norm: bool, tmp_path: Path) -> None:
    answers = run_ranks(3, sharded, tmp_path / "whole", batch_norm, "2 epochs")
    assert len({answer["sha"] for answer in answers}) == 1
    assert answers[0]["epochs"] == 2
    # Shards of 5, 15 and 25 samples, read 3, 3 and 2 at a time: the longest takes 13 steps.
    assert answers[0]["steps"] == 26
    run_ranks(3, sharded, tmp_path / "parts", batch_norm, "7 steps")
    again = run_ranks(3, sharded, tmp_path / "parts", batch_norm, "2 epochs")
    assert again[0]["sha"] == answers[0]["sha"]


def growing(rank: int, run_dir: Path, rule: str | None) -> tuple[int, float]:
    data = mh.Data(train=TensorDataset(*images_and_labels(40)), batch_size_per_worker=5)
    made = trainer(run_dir, data=data, lr_scaling=rule)
    return made.components.batches.size, made.components.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(("rule", "rate"), [(None, 0.01), ("linear", 0.04), ("sqrt", 0.02)])
def test_batch_and_learning_rate_grow_with_the_workers(rule: str | None, rate: float, tmp_path: Path) -> None:
    assert run_ranks(4, growing, tmp_path, rule) == [(20, pytest.approx(rate))] * 4


def valued(rank: int, run_dir: Path) -> list[dict[str, float]]:
    """The last batch has one sample, so two of the three workers have none and still learn the values."""

    def step(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = batch
        return {"loss": nn.functional.cross_entropy(model(images), labels), "brightness": images.mean()}

    heard: list[Any] = []
    made = trainer(
        run_dir,
        loss=None,
        step=step,
        listeners=[lambda event: heard.append(event)],
        data=mh.Data(train=TensorDataset(*images_and_labels(21)), batch_size=10, shuffle=False),
    )
    made.fit("1 epoch")
    return [dict(event.values) for event in heard if type(event).__name__ == "StepDone"]


def test_values_of_a_users_step_are_means_over_the_global_batch(tmp_path: Path) -> None:
    [values, *others] = run_ranks(3, valued, tmp_path)
    assert others == [[], []], "listeners are on the leader"
    images, _ = images_and_labels(21)
    expected = [images[0:10].mean(), images[10:20].mean(), images[20:21].mean()]
    assert [value["brightness"] for value in values] == pytest.approx([float(mean) for mean in expected], rel=1e-6)
