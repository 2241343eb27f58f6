"""A worker that holds the others up is named while they train, and once more when it does so no more."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.events import Event, Slowdown
from manyhosts.training import pace

USUAL_S, SLOW_S = 0.01, 0.04
SLOW_UNTIL, STEPS = 45, 140


def train(rank: int, workers: int, run_dir: Path, slow: int | None) -> list[dict[str, Any]]:
    """What was said to listeners of slow workers, where worker `slow` takes four times as long for its first steps."""
    pace.EVERY_S = 0.25
    found: list[dict[str, Any]] = []
    steps = 0

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        time.sleep(SLOW_S if rank == slow and steps <= SLOW_UNTIL else USUAL_S)
        return model(batch[0]).square().mean()

    def listen(event: Event) -> None:
        if isinstance(event, Slowdown):
            found.append({"step": event.step, "who": event.who, "what": event.what, "factor": event.factor})

    trainer = mh.Trainer(
        model=nn.Linear(4, 1),
        step=step,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=TensorDataset(torch.ones(60, 4)), batch_size=6),
        run_dir=run_dir,
        listeners=[listen],
    )
    trainer.fit(f"{STEPS} steps")
    return found


@pytest.mark.parametrize("workers", [2, 3])
def test_slow_worker_is_named_with_its_factor_and_so_is_the_end_of_that(workers: int, tmp_path: Path) -> None:
    slow = workers - 1
    said = run_ranks(workers, train, workers, tmp_path, slow)[0]
    assert [one["who"].partition(" on ")[0] for one in said] == [f"rank {slow}"] * 2, said
    first, then = said
    assert first["what"] == "worker"
    assert 2 < first["factor"] < 4.5
    assert first["step"] < SLOW_UNTIL < then["step"]
    assert then["factor"] == 1.0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    recorded = [line for line in lines if line["event"] == "slow"]
    assert [(line["who"], line["factor"]) for line in recorded] == [(one["who"], one["factor"]) for one in said]
    assert "times slower than the others: every step waits for it" in recorded[0]["text"]


def test_workers_that_are_alike_are_not_named(tmp_path: Path) -> None:
    assert run_ranks(3, train, 3, tmp_path, None)[0] == []
