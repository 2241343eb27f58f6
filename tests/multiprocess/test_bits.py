"""With virtual workers the number of real ones changes no bit: of weights, losses, norms or validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import finish, start, summary
from ranks import run_ranks
from runs import Noisy, Recipe, images_and_labels, step_lines, trained
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import manyhosts as mh
from manyhosts.communication import tree_sum
from manyhosts.communication.tree import Node, Subtrees
from manyhosts.config import overrides
from manyhosts.errors import ConfigError

pytestmark = pytest.mark.multiprocess
PARTS = 8


@dataclass(frozen=True)
class Job:
    """One run, in plain values that travel to other processes."""

    model: str = "digits"
    steps: int = 7  # an epoch has 5, and the last of them has fewer samples than there are parts
    virtual_workers: int = PARTS
    threads: int = 1
    """What the process has before the trainer is made."""
    tree: str = "tree"
    trainer: Mapping[str, Any] = field(default_factory=dict)


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16, momentum=None), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(256, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)),
        )


class Tokens(Dataset[Tensor]):
    """Sequences in which every token is the sum of the two before it, modulo 11."""

    def __len__(self) -> int:
        return 83

    def __getitem__(self, index: int) -> Tensor:
        tokens = [index % 11, index // 11 % 11]
        while len(tokens) < 9:
            tokens.append((tokens[-1] + tokens[-2]) % 11)
        return torch.tensor(tokens)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(11, 16), nn.Embedding(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.out = nn.Linear(16, 11)
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.out(self.layer(hidden, src_mask=mask, is_causal=True))


def next_token(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    scores, targets = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
    return {
        "loss": nn.functional.cross_entropy(scores, targets),
        "right": (scores.argmax(1) == targets).float().mean(),
        "outputs": scores,
        "targets": targets,
    }


def digits(job: Job, **more: Any) -> mh.Trainer:
    return mh.Trainer(
        model=ConvNet,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        data=mh.Data(
            train=Noisy(203),
            validation=TensorDataset(*images_and_labels(101, first=1000)),
            batch_size=50,
        ),
        metrics={"accuracy": MulticlassAccuracy(num_classes=10)},
        clip_gradients=0.5,
        virtual_workers=job.virtual_workers,
        **{**job.trainer, **more},
    )


def transformer(job: Job, **more: Any) -> mh.Trainer:
    return mh.Trainer(
        model=Transformer,
        step=next_token,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=mh.Data(train=Tokens(), validation=Tokens(), batch_size=20),
        clip_gradients=0.5,
        virtual_workers=job.virtual_workers,
        **{**job.trainer, **more},
    )


class LeftFold(Subtrees[Any]):
    """The fault: adds whatever comes to what there is."""

    def put(self, node: Node, value: Any) -> None:
        if self.stack:
            value = self.add(self.stack.pop()[1], value)
        self.stack.append((Node(0, 0), value))

    def left_of(self, part: int) -> None:
        return None


def train(rank: int, job: Job, run_dir: Path) -> dict[str, Any]:
    torch.set_num_threads(job.threads)
    if job.tree == "left fold":
        tree_sum.Subtrees = LeftFold  # type: ignore[misc]
    trainer = {"digits": digits, "transformer": transformer}[job.model](job, run_dir=run_dir)
    result = trainer.fit(f"{job.steps} steps")
    return {**asdict(result), "run_dir": str(run_dir)}


def bits(workers: int, job: Job, run_dir: Path) -> dict[str, Any]:
    """What must not depend on the number of workers: the weights, and all numbers that decide or are shown."""
    answers = run_ranks(workers, train, job, run_dir)
    assert len({answer["weights_sha256"] for answer in answers}) == 1, "the workers differ among themselves"
    lines = [(line["step"], line["loss"], line["gradient_norm"], line["lr"]) for line in step_lines(run_dir)]
    return {"weights": answers[0]["weights_sha256"], "validation": answers[0]["validation"], "steps": lines}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return {
        model: bits(1, Job(model=model, threads=2), tmp_path_factory.mktemp(model))
        for model in ("digits", "transformer")
    }


@pytest.mark.parametrize(
    "workers", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow), 8]
)
def test_convolutions_on_any_number_of_workers_have_the_same_bits(workers: int, alone: Any, tmp_path: Path) -> None:
    together = bits(workers, Job(), tmp_path)
    assert together == alone["digits"]
    assert len(together["steps"]) == 7


@pytest.mark.parametrize("workers", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_transformer_on_any_number_of_workers_has_the_same_bits(workers: int, alone: Any, tmp_path: Path) -> None:
    assert bits(workers, Job(model="transformer"), tmp_path) == alone["transformer"]


@pytest.mark.parametrize("model", ["digits", pytest.param("transformer", marks=pytest.mark.slow)])
def test_number_of_workers_may_change_within_an_epoch(model: str, alone: Any, tmp_path: Path) -> None:
    for workers, steps in ((4, 1), (2, 3), (3, 4), (1, 6)):
        bits(workers, Job(model=model, steps=steps), tmp_path)
    assert bits(4, Job(model=model), tmp_path) == alone[model]


@pytest.mark.parametrize(
    "job",
    [
        Job(virtual_workers=5, steps=3),  # no power of two
        Job(steps=3, trainer={"micro_batch_size": 3}),
        Job(steps=3, trainer={"precision": "fp16"}),
        Job(steps=3, trainer={"precision": "bf16", "strategy": mh.DDP(bucket_mb=0.002)}),  # one bucket for each layer
    ],
    ids=["five parts", "micro-batches", "fp16", "bf16 in many buckets"],
)
def test_settings_keep_the_bits(job: Job, tmp_path: Path) -> None:
    one = bits(1, job, tmp_path / "one")
    assert bits(3, job, tmp_path / "three") == one


def test_left_fold_in_place_of_the_tree_would_be_seen(alone: Any, tmp_path: Path) -> None:
    assert bits(2, Job(tree="left fold"), tmp_path)["weights"] != alone["digits"]["weights"]


def test_virtual_workers_train_the_same_model_as_one_batch(tmp_path: Path) -> None:
    """Without BatchNorm and dropout the parts change nothing but the last digits."""
    job = Job(model="transformer", steps=5)
    [parts] = run_ranks(1, train, job, tmp_path / "parts")
    [whole] = run_ranks(1, train, replace(job, virtual_workers=1), tmp_path / "whole")
    assert parts["weights_sha256"] != whole["weights_sha256"]
    assert parts["validation"]["loss"] == pytest.approx(whole["validation"]["loss"], rel=0.05)


def test_loader_processes_under_the_launcher_keep_the_bits(tmp_path: Path) -> None:
    recipe = Recipe(
        duration="7 steps",
        batch_norm=True,
        dropout=0.3,
        augment=True,
        schedule=True,
        trainer={"virtual_workers": PARTS, "clip_gradients": 0.5},
        accuracy=False,
    )
    trained(1, recipe, tmp_path / "1")
    output = finish(start(3, tmp_path / "3", replace(recipe, data={"loader_workers": 2})))
    assert "completed" in output, output
    assert summary(tmp_path / "1")["weights_sha256"] == summary(tmp_path / "3")["weights_sha256"]
    assert "cut into 8 parts" in (tmp_path / "3" / "metrics.jsonl").read_text()


def too_many(rank: int, run_dir: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        digits(Job(virtual_workers=2), run_dir=run_dir)
    torch.distributed.barrier()  # rank 0 holds the store, and the others may still be meeting there
    return str(caught.value)


def test_more_workers_than_parts_are_refused(tmp_path: Path) -> None:
    assert "virtual_workers is 2, but there are 3 workers" in run_ranks(3, too_many, tmp_path)[0]


def test_layer_that_changes_a_buffer_in_the_forward_pass_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = {"threads": str(torch.get_num_threads())}  # as this process had them
    for key, value in overrides.to_environment(threads).items():
        monkeypatch.setenv(key, value)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 1))
    trainer = mh.Trainer(
        model=layer,
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=TensorDataset(torch.ones(8, 3), torch.ones(8, 1)), batch_size=4),
        virtual_workers=2,
        run_dir=tmp_path,
    )
    with pytest.raises(ConfigError, match=r"changes the buffer .*_v'"):
        trainer.fit("2 steps")  # the first leaves the vectors as they are
