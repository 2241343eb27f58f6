"""Trainings for `held_out.py`: six kinds of models that compute for real; the model of a step was made by none.

python held_out_train.py cnn,gpt none,bf16     # each with each, one after another
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from prediction_train import train_each
from torch import Tensor, nn
from torch.utils.data import Dataset

import manyhosts as mh

SAMPLES = 16_000
WORDS, LENGTH = 2_000, 32
ITEMS, ITEMS_OF_ONE = 40_000, 20
CLASSES = 20_000
PIXELS = 64


class Made(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are made from their number by `make`."""

    def __init__(self, make: Callable[[torch.Generator], tuple[Tensor, Tensor]]) -> None:
        self.make = make

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.make(torch.Generator().manual_seed(index))


def _picture(random: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.rand(3, 32, 32, generator=random), torch.randint(10, (), generator=random)


def _read_slowly(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """A picture that a core works on for some milliseconds: blown up, blurred, and made small again."""
    picture = torch.rand(1, 3, 32, 32, generator=random)
    large = nn.functional.interpolate(picture, size=4 * PIXELS, mode="bicubic")
    blurred = nn.functional.avg_pool2d(large, 5, stride=1, padding=2)
    small = nn.functional.interpolate(blurred, size=32, mode="area")
    return small[0], torch.randint(10, (), generator=random)


def _text(random: torch.Generator) -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (LENGTH + 1,), generator=random)
    return words[:-1], words[1:]


def _choices(random: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(ITEMS, (ITEMS_OF_ONE,), generator=random), torch.rand((), generator=random)


def _features(random: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(64, generator=random), torch.randint(CLASSES, (), generator=random)


def _convolutions(width: int) -> nn.Module:
    def block(channels: int, into: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, into, 3, 2, 1, bias=False), nn.BatchNorm2d(into), nn.ReLU()]

    blocks = [*block(3, width), *block(width, 2 * width), *block(2 * width, 4 * width), *block(4 * width, 8 * width)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


class Recurrent(nn.Module):
    """An LSTM that says the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 128)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.out = nn.Linear(256, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Shape (batch, length) → (batch, words, length)."""
        logits: Tensor = self.out(self.lstm(self.words(words))[0])
        return logits.transpose(1, 2)


class Gpt(nn.Module):
    """A small transformer that says the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 128), nn.Embedding(LENGTH, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(128, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Shape (batch, length) → (batch, words, length)."""
        places = torch.arange(words.shape[1], device=words.device)
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        logits: Tensor = self.out(self.blocks(self.words(words) + self.places(places), mask=mask, is_causal=True))
        return logits.transpose(1, 2)


class Recommender(nn.Module):
    """Nearly all of it is a table of items."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, 32)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))

    def forward(self, items: Tensor) -> Tensor:
        """Shape (batch, items) → (batch,)."""
        rating: Tensor = self.head(self.items(items).mean(1))
        return rating


@dataclass(frozen=True)
class Kind:
    """A model, its data, and the batch of a step."""

    model: Callable[[], nn.Module]
    data: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    batch: int
    loss: nn.Module
    loader_workers: int = 0


CROSS_ENTROPY = nn.CrossEntropyLoss()
KINDS = {
    "cnn": Kind(lambda: _convolutions(32), _picture, 64, CROSS_ENTROPY),
    "lstm": Kind(Recurrent, _text, 32, CROSS_ENTROPY),
    "gpt": Kind(Gpt, _text, 32, CROSS_ENTROPY),
    "recommender": Kind(Recommender, _choices, 256, nn.MSELoss()),
    "slow loader": Kind(lambda: _convolutions(8), _read_slowly, 32, CROSS_ENTROPY, loader_workers=1),
    "huge last layer": Kind(
        lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES)), _features, 64, CROSS_ENTROPY
    ),
}


def make_trainer(name: str, compression: str) -> mh.Trainer:
    kind = KINDS[name]
    return mh.Trainer(
        model=kind.model(),
        loss=kind.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=mh.Data(train=Made(kind.data), batch_size=kind.batch, loader_workers=kind.loader_workers),
        strategy=mh.DDP(compression=compression),
        snapshots=mh.Snapshots(every="1000000 steps"),
    )


if __name__ == "__main__":
    train_each(make_trainer)
