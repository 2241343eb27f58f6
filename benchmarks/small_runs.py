"""Short trainings of two small models by real workers on this machine, for studies of what a setting does to accuracy.

Two tasks: a ConvNet on images of clothing (Fashion-MNIST, wherever its arrays lie), and a transformer that reads the
text of Python's own manual, which comes with Python, letter by letter. Each run is kept as one line of JSON, so that a
study of many can be stopped and resumed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

import manyhosts as mh


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, on what, and for how long."""

    name: str
    train: TensorDataset
    test: TensorDataset
    model: Callable[[], nn.Module]
    classes: int
    batch: int
    lr: float
    samples: int
    """That a run sees, each as often as its epochs."""

    @property
    def recipe(self) -> dict[str, Any]:
        """What a recorded run was made with: lines of another recipe are no lines of this study."""
        return {"samples": self.samples, "train": len(self.train), "batch": self.batch, "lr": self.lr}


def images(folder: Path, *, count: int = 20_000, epochs: int = 3) -> Task:
    """Fashion-MNIST: `count` images, seen `epochs` times; all 10,000 test images."""
    with np.load(folder / "fashion-mnist.npz") as arrays:
        sets = [
            TensorDataset(
                torch.from_numpy(arrays[f"{part}_images"][:most]).float().div_(255).unsqueeze_(1),
                torch.from_numpy(arrays[f"{part}_labels"][:most]).long(),
            )
            for part, most in (("train", count), ("test", None))
        ]
    return Task("images", sets[0], sets[1], ConvNet, 10, batch=128, lr=2e-3, samples=count * epochs)


class ConvNet(nn.Sequential):
    """Two convolutions and two linear layers; 106,000 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip


def letters(
    *, count: int = 9_600, context: int = 32, width: int = 64, layers: int = 2, batch: int = 32, lr: float = 4e-3
) -> Task:
    """Python's manual: `count` pieces of its first nine tenths, each seen once; the last tenth is the test.

    A piece has `context` characters, all that the transformer sees; `width` and `layers` are the transformer's.
    """
    text = "\n\n".join(topics[key] for key in sorted(topics))
    symbols = {letter: number for number, letter in enumerate(sorted(set(text)))}
    numbers = torch.tensor([symbols[letter] for letter in text])
    cut = len(numbers) * 9 // 10
    begins = torch.randperm(cut - context - 1, generator=torch.Generator().manual_seed(0))[:count]
    reach = torch.arange(context + 1)
    train = numbers[begins[:, None] + reach]
    test = numbers[torch.arange(cut, len(numbers) - context - 1, context)[:, None] + reach]
    pairs = [TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in (train, test)]
    make = lambda: Transformer(len(symbols), context, width, layers)  # noqa: E731
    return Task("letters", pairs[0], pairs[1], make, len(symbols), batch=batch, lr=lr, samples=count)


class Transformer(nn.Module):
    """Layers of attention that predict each next letter."""

    def __init__(self, symbols: int, context: int, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, text: Tensor) -> Tensor:
        """Shape (batch, letters) → (batch, symbols, letters), as cross entropy takes it."""
        flow = self.letters(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            flow = block(flow)
        scores: Tensor = self.head(self.norm(flow))
        return scores.transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, flow: Tensor) -> Tensor:
        batch, length, width = flow.shape
        parts = self.look(self.before(flow)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        flow = flow + self.join(seen.transpose(1, 2).reshape(batch, length, width))
        thought: Tensor = self.think(self.between(flow))
        return flow + thought


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One run."""

    task: Task
    label: str
    """What the study compares: a method, or a rule for the learning rate."""
    workers: int
    seed: int
    strategy: Any = None
    batch: int | None = None
    """Samples behind a step, in place of the task's."""
    rule: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else the trainer is given: what the learning rate does about a batch that grew."""
    virtual: bool = False
    """Whether one process computes what the workers would, each one's part of each batch on its own."""

    @property
    def key(self) -> dict[str, Any]:
        """What tells it from all others; a line with an equal key is this run."""
        method = "" if self.strategy is None else [self.strategy.name, _set(self.strategy)]
        recipe = [self.task.recipe, method, self.batch, 1.0, 0.0]
        if self.virtual:
            recipe = [self.task.recipe, self.batch, dict(self.rule)]
        made_with = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
        return {
            "task": self.task.name, "label": self.label, "workers": self.workers, "seed": self.seed, "made": made_with
        }  # fmt: skip


def _set(strategy: Any) -> dict[str, Any]:
    """What is not as it is by itself: a setting that comes new later makes no other recipe."""
    return {
        field.name: getattr(strategy, field.name)
        for field in dataclasses.fields(strategy)
        if getattr(strategy, field.name) != field.default
    }


def steps_of(task: Task, batch: int) -> int:
    """Optimizer steps of a run; the last batch of an epoch may be smaller."""
    return task.samples // len(task.train) * -(-len(task.train) // batch)


def train_here(wanted: Wanted, run_dir: str) -> dict[str, Any]:
    """The whole run, in each of its workers. Returns the test values."""
    task, batch = wanted.task, wanted.batch or wanted.task.batch
    steps = steps_of(task, batch)
    accuracy: dict[str, Metric] = {"accuracy": MulticlassAccuracy(num_classes=task.classes, average="micro")}
    trainer = mh.Trainer(
        model=task.model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=task.lr),
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
        ),
        data=mh.Data(train=task.train, test=task.test, evaluation_batch_size=500, **_size(wanted, batch)),
        metrics=accuracy,
        strategy=wanted.strategy,
        virtual_workers=wanted.workers if wanted.virtual else None,
        **wanted.rule,
        seed=wanted.seed,
        snapshots=mh.Snapshots(every="1000 epochs"),
        run_dir=run_dir,
    )
    result = trainer.fit(f"{steps} steps")
    values = trainer.test(weights="last")
    return {"accuracy": values["accuracy"], "loss": values["loss"], "steps": result.steps}


def _size(wanted: Wanted, batch: int) -> dict[str, int]:
    return {"batch_size_per_worker": batch // wanted.workers} if wanted.rule else {"batch_size": batch}


def run(wanted: Wanted) -> dict[str, Any]:
    """Have one run made by processes of its own.

    Raises:
        RuntimeError: a worker failed.
    """
    count = 1 if wanted.virtual else wanted.workers
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    begin = time.time()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        children = [_child(wanted, rank, count, port, folder, answer) for rank in range(count)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            raise RuntimeError(f"{wanted.key}: workers ended with {codes}")
        found = json.loads(answer.read_text())
    return {**wanted.key, **found, "processes": count, "seconds": round(time.time() - begin, 1)}


def _child(wanted: Wanted, rank: int, count: int, port: int, folder: str, answer: Path) -> int:
    """Fork a worker: torch and the data are there already."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        torch.set_num_threads(1)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        found = train_here(wanted, str(Path(folder, "run")))
        if rank == 0:
            answer.write_text(json.dumps(found))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        if rank == 0 and code == 0:
            time.sleep(0.2)  # the store lives here: let the others finish with it
        os._exit(code)


def recorded(path: Path) -> list[dict[str, Any]]:
    """The runs that are in the file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def make_all(wanted: Sequence[Wanted], path: Path, *, minutes: float) -> None:
    """Make those runs that the file lacks, in order, until the time is up."""
    end = time.monotonic() + 60 * minutes
    for one in wanted:
        if any(all(line[name] == value for name, value in one.key.items()) for line in recorded(path)):
            continue
        if time.monotonic() > end:
            return
        line = run(one)
        with path.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def study(
    script: str,
    text: str,
    runs: Callable[[Path], Sequence[Wanted]],
    page: Callable[[Sequence[Mapping[str, Any]]], str],
    plot: Callable[[Sequence[Mapping[str, Any]], Path], None],
) -> None:
    """The command line of a study: make the runs that are missing, and write beside `script` what was found.

    `text` is the script's own; `runs` says what is wanted, given the folder of the images' arrays.
    """
    beside = Path(script)
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with fashion-mnist.npz")
    parser.add_argument("--lines", type=Path, default=beside.with_suffix(".jsonl"), help="where runs are recorded")
    parser.add_argument("--minutes", type=float, default=600, help="begin no run after this time")
    parser.add_argument("--page", action="store_true", help="make no runs, only the page and the plot")
    asked = parser.parse_args()
    if not asked.page:
        if asked.data is None:
            parser.error("give --data DIR, or --page")
        make_all(runs(asked.data), asked.lines, minutes=asked.minutes)
    lines = recorded(asked.lines)
    beside.with_suffix(".md").write_text(page(lines))
    plot(lines, beside.with_suffix(".png"))
