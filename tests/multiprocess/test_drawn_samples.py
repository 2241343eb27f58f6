"""Samples that are drawn by weights or by an order of the script's: the same on any workers and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.data.drawing import balanced, drawn
from manyhosts.errors import ConfigError, DataError

LABELS = torch.tensor([0] * 50 + [1] * 8 + [2] * 2)
INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
SET = TensorDataset(INPUTS, LABELS)


def cost(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def step(run: mh.Run) -> None:
    run.backward(lambda batch: cost(run.models["model"], batch))
    run.update()


def easy_first(epoch: int) -> Any:
    """A curriculum: 30 samples twice, then all; shuffled by the generator that the script uses."""
    return np.random.permutation(np.resize(np.arange(30 * (1 + epoch)), 60))


def trained(
    rank: int, folder: Path, face: str, stops: list[str], other: bool = False, drawn_by: dict[str, Any] | None = None
) -> dict[str, Any]:
    found = {}
    for number, duration in enumerate(stops):
        weights = balanced(LABELS) if not (other and number) else balanced(LABELS) ** 2
        given: dict[str, Any] = {
            "data": mh.Data(SET, batch_size=8, **(drawn_by or {"weights": weights})),
            "virtual_workers": 4,
            "record_samples": True,
            "run_dir": folder,
        }
        optimizer = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
        if face == "Run":
            run = mh.Run(models=lambda: nn.Linear(4, 3), optimizers=optimizer, **given)
            run.fit(step, duration)
            found = {name.removeprefix("model."): each for name, each in run.model.state_dict().items()}
        else:
            trainer = mh.Trainer(model=lambda: nn.Linear(4, 3), step=cost, optimizer=optimizer, **given)
            trainer.fit(duration)
            found = dict(trainer.model.state_dict())
    return {name: each.clone() for name, each in found.items()}


def taken(folder: Path) -> dict[int, list[int]]:
    """Step → the samples of all workers."""
    found: dict[int, list[int]] = {}
    for path in sorted((folder / "logs").glob("samples-*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found.setdefault(row["step"], []).extend(row["indices"])
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("face", ["Trainer", "Run"])
def test_bits_and_samples_are_those_of_one_worker_also_after_a_resume(face: str, tmp_path: Path) -> None:
    [alone] = run_ranks(1, trained, tmp_path / "1", face, ["2 epochs"])
    among = run_ranks(2, trained, tmp_path / "2", face, ["2 epochs"])
    resumed = run_ranks(2, trained, tmp_path / "resumed", face, ["11 steps", "2 epochs"])
    for found in (*among, *resumed):
        assert all(torch.equal(found[name], value) for name, value in alone.items())
    order = [index for epoch in range(2) for index in drawn(balanced(LABELS), seed=0, epoch=epoch).tolist()]
    steps = taken(tmp_path / "1")
    assert [len(steps[number]) for number in sorted(steps)] == 2 * [*7 * [8], 4]
    assert [index for number in sorted(steps) for index in steps[number]] == order
    assert {key: sorted(each) for key, each in taken(tmp_path / "2").items()} == {
        key: sorted(each) for key, each in steps.items()
    }


@pytest.mark.multiprocess
def test_run_is_not_resumed_by_other_weights(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="samples are drawn by other weights than when the run began"):
        trained(0, tmp_path, "Trainer", ["3 steps", "6 steps"], other=True)


@pytest.mark.multiprocess
@pytest.mark.parametrize("face", ["Trainer", pytest.param("Run", marks=pytest.mark.slow)])
def test_order_of_ones_own_has_the_bits_of_one_worker_also_after_a_resume(face: str, tmp_path: Path) -> None:
    asked = (False, {"order": easy_first})
    [alone] = run_ranks(1, trained, tmp_path / "1", face, ["2 epochs"], *asked)
    for found in run_ranks(2, trained, tmp_path / "2", face, ["3 steps", "11 steps", "2 epochs"], *asked):
        assert all(torch.equal(found[name], value) for name, value in alone.items())
    steps = taken(tmp_path / "1")
    taken_in = [sorted(index for number in epoch for index in steps[number]) for epoch in (range(1, 9), range(9, 17))]
    assert taken_in == [sorted([*range(30), *range(30)]), list(range(60))]
    assert steps[1] != sorted(steps[1]), "shuffled"


def of_rank(rank: int) -> str:
    data = mh.Data(SET, batch_size=8, order=lambda epoch: np.roll(np.arange(60), rank))
    try:
        mh.Trainer(
            model=lambda: nn.Linear(4, 3),
            step=cost,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            data=data,
        )
    except ConfigError as error:
        return error.what
    return ""


@pytest.mark.multiprocess
def test_order_that_differs_between_workers_or_from_that_of_the_run_is_refused(tmp_path: Path) -> None:
    for words in run_ranks(2, of_rank):
        assert "drawn in the order" in words
    trained(0, tmp_path, "Trainer", ["3 steps"], False, {"order": easy_first})
    with pytest.raises(DataError, match="in another order"):
        trained(0, tmp_path, "Trainer", ["6 steps"], False, {"order": lambda epoch: range(60)})


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (lambda epoch: range(59), "of shape (59,), and an epoch has the numbers of 60 samples"),
        (lambda epoch: [0.5] * 60, "float64 of shape (60,)"),
        (lambda epoch: None, "a NoneType, and an epoch"),
        (lambda epoch: range(1, 61), "has sample 60"),
        (lambda epoch: range(-1, 59), "has sample -1"),
    ],
)
def test_what_is_no_order_is_refused_before_the_first_step(order: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        trained(0, tmp_path, "Trainer", ["3 steps"], False, {"order": order})
    assert words in raised.value.what


def test_every_class_is_drawn_equally_often_and_what_has_no_weight_never() -> None:
    weights = balanced(LABELS)
    total = sum((LABELS[drawn(weights, seed=3, epoch=epoch)].bincount(minlength=3) for epoch in range(200)), 0)
    assert (total / total.sum()).tolist() == pytest.approx([1 / 3] * 3, abs=0.02)
    alone = drawn(np.array([0.0, 1.0, 0.0, 3.0, 0.0]), seed=0, epoch=0)
    assert set(alone.tolist()) <= {1, 3}
    assert not np.array_equal(drawn(weights, seed=3, epoch=0), drawn(weights, seed=3, epoch=1))
    assert not np.array_equal(drawn(weights, seed=3, epoch=0), drawn(weights, seed=4, epoch=0))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"weights": [1.0, 2.0]}, "2 weights for 60 samples"),
        ({"weights": [-1.0] * 60}, "negative"),
        ({"weights": [0.0] * 60}, "all are 0"),
        ({"weights": [float("nan")] * 60}, "not finite"),
        ({"weights": "even"}, "weights is a str"),
        ({"weights": [1.0] * 60, "shuffle": False}, "shuffle=False keeps the order"),
    ],
)
def test_what_are_no_weights_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        mh.Data(SET, batch_size=8, **changed)
