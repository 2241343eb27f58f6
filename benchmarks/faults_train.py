"""The training scripts of the fault benchmarks: eleven small models, each as a user would write it.

    MODEL=resnet DURATION="150 steps" python faults_train.py

`PIDS` is a folder in which each worker leaves its host's name and process id; `PAUSE` seconds pass after each step.
With `TEST` set, the run ends with a test, as most scripts do.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import manyhosts as mh

SAMPLES, HELD_OUT = 1000, 200
SYMBOLS, LENGTH = 17, 16  # a digit's image read as text: 17 shades, 64 of them, in four lines of 16
MASK = SYMBOLS


def images(first: int = 0, count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Digits of shape (count, 1, 8, 8) in 0 … 1, and their labels."""
    digits = load_digits()
    rows = slice(first, first + count)
    return torch.tensor(digits.images[rows], dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target[rows])


def texts(first: int = 0, count: int = SAMPLES) -> Tensor:
    """The same as text of shape (count, LENGTH), int64, values below SYMBOLS."""
    return (images(first, count)[0] * 16).long().flatten(1)[:, 16 : 16 + LENGTH]


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Digits with noise that is new in each epoch."""

    def __init__(self, first: int = 0, count: int = SAMPLES) -> None:
        self.images, self.labels = images(first, count)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index] + 0.1 * torch.randn(1, 8, 8), self.labels[index]


class Streamed(IterableDataset[tuple[Tensor, Tensor]]):
    """Digits that come one after another."""

    def __init__(self, first: int = 0, count: int = SAMPLES) -> None:
        self.images, self.labels = images(first, count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.images, self.labels, strict=True))


class Residual(nn.Module):
    """Two convolutions around which the input goes unchanged."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.inner(x))


class Reader(nn.Module):
    """An LSTM over texts of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.lstm, self.head = (
            nn.Embedding(SYMBOLS, 16),
            nn.LSTM(16, 24, batch_first=True),
            nn.Linear(24, 10),
        )

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        text, lengths = batch
        packed = pack_padded_sequence(self.symbols(text), lengths.cpu(), batch_first=True, enforce_sorted=False)
        scores: Tensor = self.head(self.lstm(packed)[1][0][-1])
        return scores


class Language(nn.Module):
    """A transformer of two layers whose output layer shares the weights of its embedding."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS + 1, 32), nn.Parameter(0.02 * torch.randn(LENGTH, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, SYMBOLS + 1, bias=False)
        self.head.weight = self.symbols.weight
        self.causal = causal

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        flow = self.symbols(text) + self.places[:length]
        scores: Tensor = self.head(self.layers(flow, mask=mask, is_causal=self.causal))
        return scores


class AveragedAdamW(torch.optim.AdamW):
    """AdamW that keeps a running mean of the weights beside them, in its state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "mean" not in state:
                    state["mean"] = parameter.detach().clone()
                state["mean"].lerp_(parameter, 0.01)
        return loss


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(256, 10),
    )  # fmt: skip


def residual() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), Residual(8), nn.Conv2d(8, 16, 3, stride=2, padding=1), Residual(16),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def frozen() -> nn.Sequential:
    model = convolutional()
    model[0].requires_grad_(False)
    return model


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Texts cut to a length that their label gives, padded again."""
    cut = [text[: 4 + int(label)] for text, label in samples]
    lengths = torch.tensor([len(text) for text in cut])
    return (pad_sequence(cut, batch_first=True), lengths), torch.stack([label for _, label in samples])


def masked(samples: list[tuple[Tensor]]) -> tuple[Tensor, Tensor]:
    """Texts of which some symbols are hidden, drawn again for each batch; the rest is no target."""
    text = torch.stack([sample for (sample,) in samples])
    hidden = torch.rand(text.shape) < 0.15
    hidden[:, np.random.randint(LENGTH)] = True  # as collators do
    return text.masked_fill(hidden, MASK), text.masked_fill(~hidden, -100)


def mixed(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mixup: each image is blended with another of its batch."""
    x, y = torch.stack([image for image, _ in samples]), functional.one_hot(torch.stack([y for _, y in samples]), 10)
    share, order = random.betavariate(0.4, 0.4), torch.randperm(len(x))  # no secret
    return share * x + (1 - share) * x[order], share * y + (1 - share) * y[order].float()


def next_symbol(model: nn.Module, batch: tuple[Tensor]) -> dict[str, Tensor]:
    (text,) = batch
    loss = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    return {"loss": loss, "perplexity": loss.detach().exp()}


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=100_000)


def masked_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)


def hidden_symbols(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != -100).sum()


def labelled_texts(first: int, count: int) -> TensorDataset:
    return TensorDataset(texts(first, count), images(first, count)[1])


def plain_texts(first: int, count: int) -> TensorDataset:
    return TensorDataset(texts(first, count))


DIGITS: dict[str, Any] = {"model": convolutional, "loss": nn.CrossEntropyLoss(), "dataset": Noisy}
MODELS: dict[str, dict[str, Any]] = {
    "digits": DIGITS,
    "resnet": {**DIGITS, "model": residual, "optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)},
    "lstm": {**DIGITS, "model": Reader, "dataset": labelled_texts, "collate": padded},
    "gpt": {"model": lambda: Language(causal=True), "step": next_symbol, "dataset": plain_texts, "clip_gradients": 1.0},
    "masked-lm": {
        "model": lambda: Language(causal=False), "loss": masked_loss, "dataset": plain_texts, "collate": masked,
        "weight": hidden_symbols,
    },
    "mixup": {**DIGITS, "collate": mixed},
    "averaged": {**DIGITS, "optimizer": lambda p: AveragedAdamW(p, lr=1e-3)},
    "fp64": {**DIGITS, "model": lambda: convolutional().double(), "collate": lambda s: (
        torch.stack([x for x, _ in s]).double(), torch.stack([y for _, y in s]))},
    "frozen": {**DIGITS, "model": frozen},
    "one-cycle": {**DIGITS, "schedule": one_cycle},
    "stream": {**DIGITS, "dataset": Streamed},
}  # fmt: skip
"""By name: what the trainer is given, and `dataset(first sample, samples)`."""


def trainer_of(name: str) -> mh.Trainer:
    """The trainer of that model, as its script would make it."""
    given = dict(MODELS[name])
    dataset, collate = given.pop("dataset"), given.pop("collate", None)
    held_out = Noisy if dataset is Streamed else dataset
    pause_s = float(os.environ.get("PAUSE", "0"))
    given.setdefault("optimizer", lambda params: torch.optim.AdamW(params, lr=1e-3))
    return mh.Trainer(
        **given,
        data=mh.Data(
            train=dataset(0, SAMPLES),
            validation=held_out(SAMPLES, HELD_OUT),
            test=held_out(SAMPLES + HELD_OUT, HELD_OUT),
            batch_size=64,
            collate=collate,
        ),
        snapshots=mh.Snapshots(every=os.environ.get("SNAPSHOTS", "50 steps")),
        validate_every=os.environ.get("VALIDATE", "1000 epochs"),
        virtual_workers=8,
        record_samples=True,
        listeners=[lambda _: time.sleep(pause_s)] if pause_s else [],
    )


if __name__ == "__main__":
    if "PIDS" in os.environ:
        Path(os.environ["PIDS"], f"{socket.gethostname()}-{os.getpid()}").touch()
    trainer = trainer_of(os.environ.get("MODEL", "digits"))
    trainer.fit(os.environ["DURATION"])
    if "TEST" in os.environ:
        trainer.test()
