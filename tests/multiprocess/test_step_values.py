"""What a user's `step` returns: means by name over the samples that had the name, on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.records.metrics import read

pytestmark = pytest.mark.multiprocess

SAMPLES, BATCH = 31, 8
X = torch.linspace(-1, 1, SAMPLES)[:, None]
Y = X * X


def by_content(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
    """Other names, in another order, for each batch: by the samples that are in it, as a masked loss has them."""
    x, y = batch
    loss = nn.functional.mse_loss(model(x), y)
    values: dict[str, Any] = {"largest": x.max(), "loss": loss, "half": loss.detach() / 2}
    if x.max() > 0.5:
        values = {"high": x.mean(), **values}
    return values if x.min() > -0.5 else dict(reversed(list(values.items())))


def by_phase(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
    """A name that comes later, on all workers alike; a plain loss before."""
    x, y = batch
    loss = nn.functional.mse_loss(model(x), y)
    model.calls = getattr(model, "calls", 0) + model.training  # what looks before the first step does not count
    return {"loss": loss} if model.calls < 3 else {"twice": 2 * loss.detach(), "loss": loss}


def train(rank: int, step: Any, run_dir: Path, settings: dict[str, Any], validation: bool) -> list[dict[str, Any]]:
    settings = dict(settings)
    trainer = mh.Trainer(
        model=lambda: nn.Linear(1, 1),
        step=step,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(
            TensorDataset(X, Y), validation=TensorDataset(X, Y) if validation else None, batch_size=BATCH, shuffle=False
        ),
        run_dir=run_dir,
        **settings,
    )
    result = trainer.fit("2 epochs")
    lines = [line for line in read(run_dir / "metrics.jsonl") if line["event"] == "step"] if rank == 0 else []
    reported = [{"loss": line["loss"], **line.get("values", {})} for line in lines]
    return [*reported, {"weights": result.weights_sha256, **result.validation}]


def expected(pieces: int, micro: int) -> list[dict[str, float]]:
    """The same by hand: each batch cut into as many pieces, each piece into micro-batches, the means by samples."""
    torch.manual_seed(0)
    found = []
    for first in [*range(0, SAMPLES, BATCH)] * 2:
        x = X[first : first + BATCH]
        parts = [half for part in x.tensor_split(pieces) for half in part.split(micro)]
        high = [part for part in parts if part.max() > 0.5]
        values = {"largest": sum(float(part.max()) * len(part) for part in parts) / len(x)}
        if high:
            values["high"] = sum(float(part.mean()) * len(part) for part in high) / sum(map(len, high))
        found.append(values)
    return found


WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "virtual": {"virtual_workers": 4},
    "local": {"strategy": "local-sgd"},
    "fp16": {"strategy": mh.DDP(compression="fp16")},
}


def train_in_all_ways(rank: int, run_dir: Path) -> dict[str, Any]:
    ways = {way: train(rank, by_content, run_dir / way, {**WAYS[way], "micro_batch_size": 3}, True) for way in WAYS}
    return {"content": ways, "later": train(rank, by_phase, run_dir / "later", {}, False)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What the leader of so many workers has written down."""
    folder = tmp_path_factory.mktemp("runs")
    return {workers: run_ranks(workers, train_in_all_ways, folder / str(workers))[0] for workers in (1, 2, 3)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_names_that_depend_on_the_batch_are_means_over_the_samples_that_had_them(
    workers: int, way: str, runs: dict[int, Any]
) -> None:
    *steps, last = runs[workers]["content"][way]
    for line, wanted in zip(steps, expected(WAYS[way].get("virtual_workers", workers), 3), strict=True):
        assert line.keys() == {"loss", "half", *wanted}
        assert line["half"] == pytest.approx(line["loss"] / 2, rel=1e-6)
        assert {name: line[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    # The validation set is cut alike whoever evaluates.
    high = [part for part in X.split(3) if part.max() > 0.5]
    assert last["half"] == pytest.approx(last["loss"] / 2, rel=1e-6)
    assert last["high"] == pytest.approx(sum(float(part.sum()) for part in high) / sum(map(len, high)), rel=1e-6)


def test_no_bit_of_a_value_depends_on_the_workers_where_parts_are_virtual(runs: dict[int, Any]) -> None:
    assert runs[1]["content"]["virtual"] == runs[2]["content"]["virtual"] == runs[3]["content"]["virtual"]


def test_name_that_comes_later_does_not_change_what_is_trained(runs: dict[int, Any]) -> None:
    for run in runs.values():
        lines, alone = run["later"][:-1], runs[1]["later"][:-1]
        assert "twice" not in lines[0]
        assert [line["twice"] for line in lines[4:]] == pytest.approx([2 * line["loss"] for line in lines[4:]])
        assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in alone])
