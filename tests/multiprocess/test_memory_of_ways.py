"""The tensors of a worker hold at most what is predicted of each way to train, on two workers and on four."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from held_memory import HeldMemory
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.communication.world import World
from manyhosts.planner.fit import ways
from manyhosts.training import choose_strategy

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
WORDS, LENGTH, WIDTH, BLOCKS = 96, 12, 144, 4


class Block(nn.Module):
    """Attention to what came before, then two layers for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        count, length, _ = tokens.shape
        query, key, value = self.heads(self.before(tokens)).view(count, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.out(mixed.transpose(1, 2).reshape(count, length, WIDTH))
        out: Tensor = tokens + self.inner(self.between(tokens))
        return out


def language_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
    )


def next_words(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def held_and_predicted(rank: int, folder: Path, micro_batch_size: int | None) -> dict[str, tuple[int, int]]:
    """What a worker holds at most in some steps of each way, with a snapshot after each; and what was predicted."""
    text = torch.randint(0, WORDS, (16, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    data = mh.Data(train=TensorDataset(text[:, :-1].clone(), text[:, 1:].clone()), batch_size=16)
    trainings = []
    agreed = choose_strategy._agreed

    def seen(given: choose_strategy.Given, own: choose_strategy._Sizes) -> choose_strategy.fit.Training:
        trainings.append(agreed(given, own))
        return trainings[-1]

    choose_strategy._agreed = seen
    found: dict[str, tuple[int, int]] = {}
    size = 0

    def trained(strategy: str | mh.FSDP, name: str) -> int:
        nonlocal size
        with HeldMemory() as held:
            made = mh.Trainer(
                model=language_model, step=next_words, weight="samples", data=data, strategy=strategy,
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3), run_dir=folder / name,
                snapshots=mh.Snapshots(every="1 step"), micro_batch_size=micro_batch_size,
            )  # fmt: skip
            held.begin()
            made.fit("2 steps")
            world: World = made.world
            size = world.size
        return held.most

    trained("auto", "auto")
    for way in ways(trainings[0], size):
        if not way.checkpoints:
            found[way.name] = (trained(way.strategy, way.name), way.memory.total)
    return found


@pytest.mark.parametrize(("workers", "micro_batch_size"), [(2, None), (4, None), (2, 4)])
def test_worker_holds_at_most_what_is_predicted(workers: int, micro_batch_size: int | None, tmp_path: Path) -> None:
    told = run_ranks(workers, held_and_predicted, tmp_path, micro_batch_size, timeout_s=600)[0]
    assert list(told) == ["ddp", "fsdp zero=1", "fsdp zero=2", "fsdp zero=3"]
    for name, (held, predicted) in told.items():
        assert predicted == pytest.approx(held, rel=0.05), f"{name}: {predicted / held:.3f}; {told}"
