"""Audits accuse nobody who computes right, leave no trace, and refuse what they cannot judge."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import Noisy, images_and_labels, network
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError, ManyhostsError
from manyhosts.strategies import audit

pytestmark = pytest.mark.multiprocess
STEPS = 7  # an epoch has 5, and the last of them has fewer samples than there are parts


class Sequences(nn.Module):
    """Reads an image line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, 2, batch_first=True, dropout=0.2)
        self.out = nn.Linear(12, 10)

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.lstm(images[:, 0])
        scores: Tensor = self.out(states[:, -1])
        return scores


class Attention(nn.Module):
    """The same, all lines at once; one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.out, self.unused = nn.Linear(64, 10), nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.out(self.layer(images[:, 0]).flatten(1))
        return scores


class Forgetful(nn.Module):
    """Draws random numbers of the system's, which have no address and are kept nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.out(images.flatten(1))
        drawn = torch.tensor([random.SystemRandom().random() for _ in range(10)])  # one alone rounds to one of four
        return scores * (1 + 3e-7 * drawn)  # other last bits, and no other loss


class Counting(nn.Module):
    """Remembers how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.calls = nn.Linear(64, 10), 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        scores: Tensor = self.out(images.flatten(1))
        return scores / self.calls


class Flow(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that every worker reads whole."""

    def __iter__(self) -> Any:
        return iter(zip(*images_and_labels(203), strict=True))


class Sharded(Flow):
    """One that is read in shards."""

    def shard(self, index: int, count: int) -> Sharded:
        return self


MODELS = {
    "conv": lambda: network(batch_norm=True, dropout=0.3),
    "lstm": Sequences,
    "attention": Attention,
    "forgetful": Forgetful,
    "counting": Counting,
}
DATASETS = {
    "augmented": lambda: Noisy(203),
    "plain": lambda: TensorDataset(*images_and_labels(203)),
    "stream": Flow,
    "sharded": Sharded,
}


@dataclass(frozen=True)
class Job:
    """One short run, in plain values."""

    model: str = "conv"
    dataset: str = "augmented"
    trainer: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


def step(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """A step that logs something."""
    scores = model(batch[0])
    return {
        "loss": nn.functional.cross_entropy(scores, batch[1]),
        "right": (scores.argmax(1) == batch[1]).float().mean(),
    }


def train(job: Job, run_dir: Path, share: float | None, *, is_wrong: bool = False) -> dict[str, Any]:
    dataset: Dataset[Any] = DATASETS[job.dataset]()
    trainer = mh.Trainer(
        model=MODELS[job.model],
        step=step,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
        data=mh.Data(train=dataset, batch_size=50, **job.data),
        audit=share,
        run_dir=run_dir,
        **{"virtual_workers": 8, "clip_gradients": 0.5, **job.trainer},
    )
    if is_wrong:
        next(trainer.model.parameters()).register_hook(lambda gradient: gradient * (1 + 1e-6))
    result = trainer.fit(f"{STEPS} steps")
    compared = 0 if trainer.components.auditor is None else trainer.components.auditor.compared
    return {"weights": result.weights_sha256, "compared": compared}


HONEST = {
    "conv": Job(),
    "lstm": Job("lstm"),
    "attention": Job("attention"),
    "micro-batches": Job(trainer={"micro_batch_size": 3}),
    "bf16 in small buckets": Job(trainer={"precision": "bf16", "strategy": mh.DDP(bucket_mb=0.002)}),
    "fp16": Job("attention", trainer={"precision": "fp16"}),
    "five parts": Job(trainer={"virtual_workers": 5}),
    "stream": Job("lstm", "stream"),
    "bad steps are skipped": Job("lstm", "plain", {"on_bad_step": "skip"}),
}


QUICK = ["conv", "attention", "bf16 in small buckets", "five parts", "stream"]


def train_honest(rank: int, folder: Path, names: list[str]) -> dict[str, Any]:
    """With every part audited, and with none."""
    return {name: [train(HONEST[name], folder / f"{name} {share}", share) for share in (1.0, None)] for name in names}


@pytest.mark.parametrize(
    ("workers", "names"),
    [(3, QUICK), *(pytest.param(workers, list(HONEST), marks=pytest.mark.slow) for workers in (2, 3))],
    ids=["3, some", "2, all", "3, all"],
)
def test_honest_workers_are_never_accused_and_audits_leave_no_trace(
    workers: int, names: list[str], tmp_path: Path
) -> None:
    for found in run_ranks(workers, train_honest, tmp_path, names):
        for name, (with_audits, without) in found.items():
            assert with_audits["weights"] == without["weights"], name
            parts = 5 if name == "five parts" else 8
            assert (STEPS - 1) * parts < with_audits["compared"] <= STEPS * parts, "every part that has a sample"


def train_until_error(
    rank: int, jobs: Mapping[str, Job], folder: Path, wrong: int = -1, makes: int = 1
) -> dict[str, str]:
    """The error of each job. Rank `wrong` computes wrongly; the processors are of so many makes."""
    if makes > 1:
        audit.processor = lambda: (f"Model {rank % makes}", f"make {rank % makes}")  # type: ignore[assignment]
    found = {}
    for name, job in jobs.items():
        try:
            train(job, folder / name, 1.0, is_wrong=rank == wrong)
        except ManyhostsError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_model_that_is_not_reproducible_is_blamed_and_no_worker(workers: int, tmp_path: Path) -> None:
    jobs = {name: Job(name, "plain") for name in ("forgetful", "counting")}
    for found in run_ranks(workers, train_until_error, jobs, tmp_path):
        assert found["forgetful"].startswith("WrongBits: part ")
        assert "has other bits every time" in found["forgetful"]
        assert "no machine" in found["forgetful"]
        assert "'calls' is kept from one batch to the next" in found["counting"], "seen before any step"


def test_all_say_who_is_wrong_where_no_launcher_leaves_him_out(tmp_path: Path) -> None:
    """And two, of whom each stays with what it said, are both named."""
    jobs = {"conv": Job()}
    for found in run_ranks(3, train_until_error, jobs, tmp_path / "three", 1):
        assert found["conv"].startswith("WrongBits: rank 1 on host ")
        assert "wrongly: its bits, which are the same each time, are not those of rank" in found["conv"]
    for found in run_ranks(2, train_until_error, jobs, tmp_path / "two", 1):
        assert "rank 0 on host" in found["conv"]
        assert "rank 1 on host" in found["conv"]
        assert "it is not known which of them is wrong" in found["conv"]


def test_what_cannot_be_audited_is_refused_before_the_first_step(tmp_path: Path) -> None:
    [alone] = run_ranks(1, train_until_error, {"conv": Job()}, tmp_path / "alone")
    assert "there is one worker only" in alone["conv"]
    for found in run_ranks(2, train_until_error, {"conv": Job("conv", "sharded")}, tmp_path / "sharded"):
        assert "a stream that is read in shards" in found["conv"]
    for found in run_ranks(3, train_until_error, {"conv": Job()}, tmp_path / "makes", -1, 2):
        assert "processors of several makes" in found["conv"]
        assert "Model 1" in found["conv"]
    assert not list(tmp_path.glob("*/*/metrics.jsonl"))


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"audit is .*share of the parts"):
        train(Job(), Path("nowhere"), share)


def test_audit_is_refused_without_virtual_workers_and_with_a_second_place() -> None:
    with pytest.raises(ConfigError, match="only virtual workers have such parts"):
        train(Job(trainer={"virtual_workers": None}), Path("nowhere"), 0.01)
    with pytest.raises(ConfigError, match="remote copy"):
        train(Job(trainer={"snapshots": mh.Snapshots(to="elsewhere")}), Path("nowhere"), 0.01)
