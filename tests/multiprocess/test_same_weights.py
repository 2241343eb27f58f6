"""Ranks agree or the run ends: weights that differ are named before anybody relies on them, models before they meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import Dataset, TensorDataset, random_split

import manyhosts as mh
from manyhosts.errors import ManyhostsError
from manyhosts.records.metrics import read
from manyhosts.training.consistency.same_weights import compare_weights

pytestmark = pytest.mark.multiprocess

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Remembers(nn.Module):
    """Keeps the mean of what it has seen, each worker of its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * inputs.mean(0)
        return self.linear(inputs - self.seen)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def make(run_dir: Path, model: Any = plain, **settings: Any) -> mh.Trainer:
    data = {"train": TensorDataset(X, Y), "batch_size": 10, **settings.pop("data", {})}
    given = {"loss": nn.MSELoss(), "optimizer": lambda params: torch.optim.SGD(params, lr=0.1), **settings}
    return mh.Trainer(model=model, data=mh.Data(**data), run_dir=run_dir, **given)


def meddling(rank: int, at: int, amount: float) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer that changes one weight of rank 1 after a step, as code that acts by RANK does, or a flipped bit."""

    def make_optimizer(params: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params, lr=0.1)
        steps = [0]

        def meddle(*_: object) -> None:
            steps[0] += 1
            if steps[0] == at and rank == 1:
                with torch.no_grad():
                    optimizer.param_groups[0]["params"][2][0, 1] += amount

        optimizer.register_step_post_hook(meddle)
        return optimizer

    return make_optimizer


def attempt(act: Callable[[], Any]) -> dict[str, Any]:
    try:
        act()
    except ManyhostsError as error:
        return {"kind": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix}
    return {"kind": "none"}


def runs(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    validated = {"data": {"validation": TensorDataset(X, Y)}}
    snapshots = mh.Snapshots(every="2 steps")
    ways: dict[str, dict[str, Any]] = {
        "snapshot": {"optimizer": meddling(rank, 4, 0.5), "snapshots": snapshots},
        "validation": {"optimizer": meddling(rank, 5, 0.5), **validated},
        "end": {"optimizer": meddling(rank, 7, 1e-6)},
        "buffer": {"model": Remembers},
        "virtual": {"optimizer": meddling(rank, 4, 0.5), "snapshots": snapshots, "virtual_workers": 3},
        "local-sgd": {"optimizer": meddling(rank, 4, 0.5), "strategy": "local-sgd", "snapshots": snapshots},
        "right": {"snapshots": snapshots, **validated},
        "batch norm": {"model": normed, "batch_norm": "local", "snapshots": snapshots, **validated},
    }
    return {way: attempt(lambda: make(folder / way, **given).fit("7 steps")) for way, given in ways.items()}  # noqa: B023


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[dict[str, Any]]]]:
    folders = {workers: tmp_path_factory.mktemp(f"of-{workers}") for workers in (1, 2, 3)}
    return {workers: (folder, run_ranks(workers, runs, folder)) for workers, folder in folders.items()}


@pytest.mark.parametrize("workers", [2, 3])
def test_weight_that_differs_is_named_before_anybody_relies_on_it(workers: int, found: dict[int, Any]) -> None:
    folder, answers = found[workers]
    assert all(answer == answers[0] for answer in answers), "all say the same"
    who = "rank 0 holds one value, rank 1 another" if workers == 2 else "ranks 0 and 2 hold one value, rank 1 another"
    for way, moment in (
        ("snapshot", "before the snapshot of step 4"),
        ("virtual", "before the snapshot of step 4"),
        ("validation", "before the validation of step 6"),
        ("end", "before the snapshot of step 7"),
    ):
        reported = answers[0][way]
        assert reported["kind"] == "TrainingError", way
        assert reported["what"].startswith(f"the workers do not hold the same model: {who} of 2.weight"), reported
        assert reported["where"] == moment
    assert "rounding" in answers[0]["end"]["fix"]
    assert "RANK" in answers[0]["snapshot"]["fix"]
    assert [path.name for path in sorted((folder / "snapshot" / "snapshots").glob("step-*"))] == ["step-00000002"]
    lines = {way: read(folder / way / "metrics.jsonl") for way in ("validation", "snapshot")}
    assert [line["step"] for line in lines["validation"] if line["event"] == "validation"] == [3]
    assert [line["status"] for line in lines["snapshot"] if line["event"] == "end"] == ["failed"]


@pytest.mark.parametrize("workers", [2, 3])
def test_buffer_that_each_worker_changes_by_its_own_samples_is_named(workers: int, found: dict[int, Any]) -> None:
    reported = found[workers][1][0]["buffer"]
    assert "the forward pass changes the buffer 'seen'" in reported["what"], "in the very step in which it happens"


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_run_with_nothing_wrong_hears_nothing(workers: int, found: dict[int, Any]) -> None:
    for answer in found[workers][1]:
        ways = {"right", "batch norm", "local-sgd"} if workers > 1 else answer.keys()
        assert {way: answer[way]["kind"] for way in ways} == dict.fromkeys(ways, "none")


def one_more(model: nn.Module) -> None:
    model.register_buffer("extra", torch.ones(2))


def another_dtype(model: nn.Module) -> None:
    weight = model.get_parameter("0.bias")
    weight.data = weight.data.double()


def integers(model: nn.Module) -> None:
    model.seen = torch.zeros(4, dtype=torch.int64)


def one_more_layer(model: nn.Module) -> None:
    model.append(nn.BatchNorm1d(1))  # type: ignore[operator]


KINDS: dict[str, tuple[Any, Callable[[Any], None], str]] = {
    "name": (plain, one_more, "extra is nothing on rank 0, float32 of shape (2,) on rank 1"),
    "dtype": (plain, another_dtype, "0.bias is float32 of shape (3,) on rank 0, float64 of shape (3,) on rank 1"),
    "integers": (Remembers, integers, "seen is float32 of shape (4,) on rank 0, int64 of shape (4,) on rank 1"),
    "statistics": (normed, one_more_layer, "3.weight is nothing on rank 0, float32 of shape (1,) on rank 1"),
}


def kinds_by_rank(rank: int, folder: Path, odd: int) -> dict[str, dict[str, Any]]:
    found = {}
    for kind, (model, change, _) in KINDS.items():
        made = make(folder / kind, model, batch_norm="local")
        with torch.no_grad():
            made.model.get_parameter(next(iter(dict(made.model.named_parameters()))))[0] += rank  # and weights differ
        if rank == odd:
            change(made.model)
        found[kind] = attempt(lambda made=made: compare_weights(made.components, "at the end"))
    return found


def test_tensors_of_other_kinds_are_named_alike_on_all_workers(tmp_path: Path) -> None:
    first, second = run_ranks(2, kinds_by_rank, tmp_path, 1)
    assert first == second
    for kind, (*_, words) in KINDS.items():
        assert first[kind]["what"] == f"the workers do not hold the same model: {words}", kind
        assert "RANK" in first[kind]["fix"]


class Drawn(Dataset[Any]):
    """Samples that are drawn as they are read, by a seed of the dataset's own; and the name of a file beside each."""

    def __init__(self, *, seed: int, folder: str) -> None:
        self.seed, self.folder = seed, folder

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, str]:
        drawn = torch.randn(5, generator=torch.Generator().manual_seed(100 * self.seed + index))
        return drawn[:4], drawn[4:], f"{self.folder}/{index}.png"


def without_names(samples: list[Any]) -> list[torch.Tensor]:
    return [torch.stack([sample[place] for sample in samples]) for place in (0, 1)]


def different(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    odd = rank == 1
    shorter = TensorDataset(X[:29], Y[:29])
    ways: dict[str, dict[str, Any]] = {
        "shape": {"model": nn.Linear(4, 1 + odd)},
        "name": {"model": nn.Sequential(nn.Linear(4, 1)) if odd else nn.Linear(4, 1)},
        "dtype": {"model": plain().double() if odd else plain()},
        "depth": {"model": nn.Sequential(*plain(), nn.Linear(1, 1)) if odd else plain()},
        "buffer": {"model": Remembers() if odd else nn.ModuleDict({"linear": nn.Linear(4, 1)})},
        "frozen": {"model": plain()},
        "order": {"model": nn.ModuleDict({name: nn.Linear(4, 1) for name in ("ba" if odd else "ab")})},
        "data": {"data": {"train": shorter if odd else TensorDataset(X, Y)}},
        "split": {
            "data": {"train": random_split(TensorDataset(X, Y), [20, 10], torch.Generator().manual_seed(rank))[0]}
        },
        "samples": {"data": {"train": TensorDataset(X, Y), "validation": TensorDataset(X + odd, Y)}},
        "rounding": {"data": {"train": TensorDataset(X * (1 + 1e-6 * rank), Y)}},
        "drawn": {"data": {"train": Drawn(seed=rank, folder="/data"), "collate": without_names}},
        "files": {"data": {"train": Drawn(seed=0, folder=f"/data{rank}"), "collate": without_names}},
        "seed": {"seed": rank},
        "optimizer": {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1 + 0.1 * odd)},
    }
    ways["frozen"]["model"][0].requires_grad_(not odd)
    return {way: attempt(lambda: make(folder / way, **given).fit("2 steps")) for way, given in ways.items()}  # noqa: B023


@pytest.mark.parametrize("workers", [2, 3])
def test_what_differs_from_worker_to_worker_is_named_before_anything_is_exchanged(workers: int, tmp_path: Path) -> None:
    answers = run_ranks(workers, different, tmp_path)
    assert all(answer == answers[0] for answer in answers)
    kinds = {way: reported["kind"] for way, reported in answers[0].items()}
    assert kinds.pop("rounding") == "none", "two kinds of processors round otherwise"
    assert kinds.pop("files") == "none", "hosts may keep them in other places"
    assert set(kinds.values()) == {"ConfigError"}
    for way, words in {
        "shape": "models differ: weight is float32 (1, 4) on rank 0 and float32 (2, 4) on rank 1",
        "name": "models differ: weight is float32 (1, 4) on rank 0 and not there on rank 1",
        "dtype": "models differ: 0.weight is float32 (3, 4) on rank 0 and float64 (3, 4) on rank 1",
        "depth": "models differ: 3.weight is not there on rank 0 and float32 (1, 1) on rank 1",
        "buffer": "models differ: seen is not there on rank 0 and a buffer of float32 (4) on rank 1",
        "frozen": "models differ: 0.weight is float32 (3, 4) on rank 0 and float32 (3, 4), frozen on rank 1",
        "order": "models differ: they come in another order on rank 1",
        "data": "data differ: train is TensorDataset of 30 samples on rank 0 and TensorDataset of 29 samples on rank 1",
        "split": "the train set holds other samples on rank 1 than on rank 0",
        "samples": "the validation set holds other samples on rank 1 than on rank 0",
        "drawn": "of the training set is another one on rank 1 than on rank 0",
        "seed": "settings differ: seed is 0 on rank 0 and 1 on rank 1",
        "optimizer": "optimizers differ: group 0 is 4 parameters with",
    }.items():
        assert words in answers[0][way]["what"], answers[0][way]
