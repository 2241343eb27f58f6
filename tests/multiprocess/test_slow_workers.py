"""A worker that holds the others up is named while they train, and once more when it does so no more."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.events import Event, Slowdown, WorkerTimes
from manyhosts.training.telemetry import pace

USUAL_S, SLOW_S = 0.01, 0.04
SLOW_UNTIL, STEPS = 45, 140


def train(
    rank: int, workers: int, run_dir: Path, slow: int | None, every_s: float = 0.25, strategy: str = "ddp"
) -> list[dict[str, Any]]:
    """What was said to listeners of slow workers, where worker `slow` takes four times as long for its first steps."""
    pace.EVERY_S = every_s
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
        model=nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))),
        step=step,
        strategy=strategy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=TensorDataset(torch.ones(60, 4)), batch_size=6),
        run_dir=run_dir,
        listeners=[listen],
    )
    trainer.fit(f"{STEPS} steps")
    return found


def lines_of(run_dir: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


@pytest.mark.parametrize(
    ("workers", "strategy"),
    [pytest.param(2, "ddp", marks=pytest.mark.slow), (3, "ddp"), pytest.param(2, "fsdp", marks=pytest.mark.slow)],
)
def test_slow_worker_is_named_with_its_factor_and_so_is_the_end_of_that(
    workers: int, strategy: str, tmp_path: Path
) -> None:
    slow = workers - 1
    said = run_ranks(workers, train, workers, tmp_path, slow, 0.25, strategy)[0]
    assert [one["who"].partition(" on ")[0] for one in said] == [f"rank {slow}"] * 2, said
    first, then = said
    assert first["what"] == "worker"
    measured = [
        pace.factors_of_workers([WorkerTimes(**each) for each in line["workers"]])[first["who"]]
        for line in lines_of(tmp_path, "workers")
        if line["step"] <= first["step"]
    ]
    assert first["factor"] == pytest.approx(statistics.median(measured[-3:]), rel=0.05)
    assert first["step"] < SLOW_UNTIL < then["step"]
    assert then["factor"] == 1.0
    recorded = lines_of(tmp_path, "slow")
    assert [line["cause"] for line in recorded] == ["compute", ""]
    assert [(line["who"], line["factor"]) for line in recorded] == [(one["who"], one["factor"]) for one in said]
    assert "times slower than the others: every step waits for it" in recorded[0]["text"]


@pytest.mark.parametrize(
    "every_s", [0.25, pytest.param(1000.0, marks=pytest.mark.slow)], ids=["often", "at the end alone"]
)
def test_every_step_but_the_first_has_the_times_of_all_workers(every_s: float, tmp_path: Path) -> None:
    run_ranks(3, train, 3, tmp_path, 2, every_s)
    lines = lines_of(tmp_path, "workers")
    assert len(lines) == 1 if every_s > 100 else len(lines) > 3
    assert [line["step"] - line["steps"] for line in lines] == [1, *(line["step"] for line in lines[:-1])]
    assert lines[-1]["step"] == STEPS
    steps = {line["step"]: line for line in lines_of(tmp_path, "step")}
    for line in lines:
        leader, *others = line["workers"]
        assert [each["rank"] for each in line["workers"]] == [0, 1, 2]
        own = [steps[step] for step in range(line["step"] - line["steps"] + 1, line["step"] + 1)]
        assert leader["total"] == pytest.approx(statistics.fmean(step["seconds"] for step in own), abs=1e-5)
        for part in ("communication_exposed", "data_wait"):
            assert leader[part] == pytest.approx(statistics.fmean(step[part] for step in own), abs=1e-5)
        assert sum(each["samples"] for each in line["workers"]) == 6
        seen = own[::-1][:: -(-len(own) // 24)]
        most = statistics.fmean(step["communication_exposed"] for step in seen)
        assert 0 <= line["communication"] <= most + 1e-5, "the least of each of these steps; the leader waits as long"
        for each in (leader, *others):
            parts = ("compute", "communication_exposed", "data_wait", "snapshot_stall")
            assert sum(each[part] for part in parts) == pytest.approx(each["total"], abs=1e-5)
    usual, _, slow = ([(line["steps"], line["workers"][rank]) for line in lines] for rank in range(3))
    spent = {
        part: [sum(steps * each[part] for steps, each in its) for its in (usual, slow)]
        for part in ("compute", "communication_exposed")
    }
    assert spent["compute"][0] < spent["compute"][1]
    assert spent["communication_exposed"][0] > spent["communication_exposed"][1]


def test_workers_that_are_alike_are_not_named(tmp_path: Path) -> None:
    assert run_ranks(3, train, 3, tmp_path, None)[0] == []
