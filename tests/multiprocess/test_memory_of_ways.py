"""The tensors of a worker hold at most what is predicted of each way to train, on two workers and on four."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from held_memory import HeldMemory
from ranks import run_ranks
from small_language_model import language_model, next_words
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.planner.fit import Training, ways

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
WORDS, LENGTH = 96, 12


def held_and_predicted(
    rank: int, workers: int, folder: Path, micro_batch_size: int | None
) -> dict[str, tuple[int, int]]:
    """What a worker holds at most in some steps of each way, with a snapshot after each; and what was predicted."""
    text = torch.randint(0, WORDS, (16, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    data = mh.Data(train=TensorDataset(text[:, :-1].clone(), text[:, 1:].clone()), batch_size=16)
    found: dict[str, tuple[int, int]] = {}

    def trained(strategy: str | mh.FSDP, name: str) -> tuple[Training | None, int]:
        with HeldMemory() as held:
            made = mh.Trainer(
                model=lambda: language_model(WORDS, width=144, blocks=4), step=next_words, weight="samples",
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3), run_dir=folder / name, data=data,
                snapshots=mh.Snapshots(every="1 step"), strategy=strategy, micro_batch_size=micro_batch_size,
            )  # fmt: skip
            held.begin()
            made.fit("2 steps")
        return made.components.chosen_for, held.most

    training, _ = trained("auto", "auto")
    assert training is not None
    for way in ways(training, workers):
        if not way.checkpoints:
            found[way.name] = (trained(way.strategy, way.name)[1], way.memory.total)
    return found


@pytest.mark.parametrize(("workers", "micro_batch_size"), [(2, None), (4, None), (2, 4)])
def test_worker_holds_at_most_what_is_predicted(workers: int, micro_batch_size: int | None, tmp_path: Path) -> None:
    reported = run_ranks(workers, held_and_predicted, workers, tmp_path, micro_batch_size, timeout_s=600)[0]
    assert list(reported) == ["ddp", "fsdp zero=1", "fsdp zero=2", "fsdp zero=3"]
    for name, (held, predicted) in reported.items():
        assert predicted == pytest.approx(held, rel=0.05), f"{name}: {predicted / held:.3f}; {reported}"
