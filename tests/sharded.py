"""Trainings of small models with everything that parts of a model meet: several of them in one start of workers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import step_lines
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh

WORDS, WIDTH = 11, 7  # odd: no number of workers divides them


class Gain(nn.Module):
    """A single number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


class Block(nn.Module):
    """What a deep model repeats."""

    def __init__(self, *, norm: type[nn.Module] = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gain, self.dropout = Gain(), nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = hidden + self.dropout(self.down(torch.tanh(self.gain(self.up(self.norm(hidden))))))
        return added


class Scaled(nn.Module):
    """A block without parameters."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * 0.9


class Model(nn.Module):
    """Blocks, one of them without parameters; the last layer is the first; a frozen parameter, ones never used, and
    a learned temperature."""

    def __init__(self, **block: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(**block), Scaled(), Block(**block), Block(**block)])
        self.last = nn.Linear(WIDTH, WORDS, bias=False)
        self.last.weight = self.words.weight
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.unused = nn.Linear(3, 3)
        self.temperature, self.idle = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.tensor(2.0))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words) * self.frozen
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.last(hidden) * self.temperature.exp()
        return out


class Centred(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centre, self.share = nn.Parameter(torch.linspace(-1, 1, WORDS)), nn.Parameter(torch.tensor(0.7))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets) + self.share * (outputs - self.centre).square().mean()


@dataclass(frozen=True)
class Case:
    """One training, in plain values that travel to other processes."""

    strategy: str = "fsdp"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the strategy."""
    block: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "SGD"
    samples: int = 29
    batch: int = 12
    steps: int = 5
    centred: bool = False
    trainer: Mapping[str, Any] = field(default_factory=dict)


def samples(count: int, seed: int) -> TensorDataset:
    words = torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(words, (words * 3 + 1) % WORDS)


def make_trainer(case: Case, folder: Path) -> mh.Trainer:
    strategies = {"fsdp": mh.FSDP, "ddp": mh.DDP, "pipeline": mh.Pipeline, "tensor": mh.Tensor, "fsdp+tensor": mh.Mesh}
    strategies |= {"diloco": mh.DiLoCo, "local-sgd": mh.LocalSGD}
    kind = getattr(torch.optim, case.optimizer)
    further = {"momentum": 0.9} if case.optimizer == "SGD" else {}
    return mh.Trainer(
        model=lambda: Model(**case.block),
        loss=Centred() if case.centred else nn.CrossEntropyLoss(),
        optimizer=lambda params: kind(params, lr=0.05, **further),
        data=mh.Data(train=samples(case.samples, 1), validation=samples(23, 2), batch_size=case.batch),
        strategy=strategies[case.strategy](**case.options),
        run_dir=folder,
        **{"clip_gradients": 1e9, **case.trainer},  # so that each step tells its norm
    )


def fit(rank: int, cases: Mapping[str, Case], folder: Path) -> dict[str, dict[str, Any]]:
    """What came out on one worker, by the names of `cases`."""
    found = {}
    for name, case in cases.items():
        trainer = make_trainer(case, folder / name)
        result = trainer.fit(f"{case.steps} steps")
        found[name] = {"sha": result.weights_sha256, "validation": result.validation, "steps": result.steps}
    return found


@dataclass(frozen=True)
class Outcome:
    """What came out of a training."""

    norms: list[float]
    losses: list[float]
    weights: dict[str, Tensor]
    validation: dict[str, float]
    sha: str
    bytes_sent: list[int]


def trained(workers: int, cases: Mapping[str, Case], folder: Path) -> dict[str, Outcome]:
    """Train `cases`, all of them in one start of workers; all workers tell the same."""
    answers = run_ranks(workers, fit, cases, folder)
    assert all(answer == answers[0] for answer in answers), answers
    return {name: outcome(folder / name, answer) for name, answer in answers[0].items()}


def outcome(run_dir: Path, answer: Mapping[str, Any]) -> Outcome:
    lines = step_lines(run_dir)
    weights = mh.load(run_dir, weights="last")
    return Outcome(
        norms=[line["gradient_norm"] for line in lines],
        losses=[line["train_loss"] if "train_loss" in line else line["loss"] for line in lines],
        weights=weights,
        validation=dict(answer["validation"]),
        sha=answer["sha"],
        bytes_sent=[line["bytes_sent"] for line in lines],
    )


def assert_same(one: Outcome, other: Outcome, *, relative: float = 1e-5) -> None:
    """Norms and losses of all steps, and the weights after them: a tensor by its largest number."""
    assert other.norms == pytest.approx(one.norms, rel=relative)
    assert other.losses == pytest.approx(one.losses, rel=relative)
    assert other.validation == pytest.approx(one.validation, rel=relative)
    assert other.weights.keys() == one.weights.keys()
    for name, weight in one.weights.items():
        away = (weight - other.weights[name]).abs().max().item()
        assert away <= relative * weight.abs().max().item() + 1e-8, f"{name} is away by {away}"


def said(run_dir: Path) -> str:
    """All notes of a run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return "\n".join(line["text"] for line in lines if line["event"] == "note")


def both(rank: int, case: Case, stood: int, folder: Path) -> list[str]:
    """The hash of the weights where a run is taken up, and after it has continued."""
    first = make_trainer(case, folder).fit(f"{stood} steps").weights_sha256 if stood else ""
    return [first, make_trainer(case, folder).fit(f"{stood + 2} steps").weights_sha256]


def assert_passed_on(layouts: Sequence[tuple[int, Case]], folder: Path) -> None:
    """Train two steps in each of `layouts`, with so many workers: each begins with the bits left by the one before."""
    before = ""
    for number, (workers, each) in enumerate(layouts):
        found = run_ranks(workers, both, each, 2 * number, folder)
        assert all(one == found[0] for one in found)
        assert found[0][0] == before or not before, "what was taken up is not what was left, bit for bit"
        before = found[0][1]


SCRIPT = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import manyhosts as mh
    import torch
    from sharded import Case, make_trainer

    class Trouble(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = 0

        def forward(self, given):
            self.seen += self.training
            if os.environ.get("RANK") == "1" and self.seen == 9:
                {trouble}
            return given

    case = Case(strategy={strategy!r}, optimizer="AdamW", block={{"dropout": 0.1}}, trainer={{
        "snapshots": mh.Snapshots(every="2 steps"), "micro_batch_size": 6}})
    trainer = make_trainer(case, None)
    trainer.model.blocks[3].dropout = torch.nn.Sequential(torch.nn.Dropout(0.1), Trouble())
    trainer.fit("9 steps")
"""


def script(trouble: str, strategy: str = "pipeline") -> str:
    return SCRIPT.format(tests=str(Path(__file__).parent), trouble=trouble, strategy=strategy)
