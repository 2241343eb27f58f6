"""Faults in a loop of one's own that would be silent: state of its own that differs from worker to worker."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError, TrainingError
from manyhosts.snapshot.disk import Disk

pytestmark = pytest.mark.multiprocess
INPUTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def made(folder: Path, **more: Any) -> mh.Run:
    return mh.Run(
        models=lambda: nn.Linear(3, 1),
        optimizers=lambda params: torch.optim.SGD(params, 0.1),
        data=mh.Data(train=TensorDataset(INPUTS), batch_size=4),
        run_dir=folder,
        **more,
    )


def with_own_state(rank: int, folder: Path, kind: str) -> str:
    write = Disk.write_file

    def slowly(disk: Disk, path: Path, chunks: Iterable[Any]) -> None:
        time.sleep(0.2)  # a snapshot is under way when the run fails, and complete before it ends
        write(disk, path, chunks)

    Disk.write_file = slowly  # type: ignore[method-assign]
    run = made(folder, virtual_workers=2, snapshots=mh.Snapshots(every="2 steps"))
    changed: dict[str, Any] = {
        "number": 3 + rank,
        "nested": {"deep": [1, {"queue": torch.full((2,), float(rank))}]},
        "missing": None,
        "equal": 5,
    }

    def step(run: mh.Run) -> None:
        run.backward(lambda batch: run.models["model"](batch[0]).square().mean())
        run.update()
        run.state["fine"] = torch.ones(3)
        if run.steps_done == 2 and (kind != "missing" or rank == 1):
            run.state["own"] = changed[kind]

    try:
        run.fit(step, "6 steps")
    except TrainingError as error:
        return f"{error.what} | {error.where} | {error.fix}"
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("number", "run.state['own'] differs: it is 3 on rank 0, 4 on rank 1"),
        ("nested", "run.state['own'] differs: it is a dict on each rank, and not the same one"),
        ("missing", "run.state['own'] differs: it is nothing on rank 0, None on rank 1"),
        ("equal", ""),
    ],
)
def test_state_that_differs_between_workers_is_named_at_the_next_snapshot(
    kind: str, words: str, tmp_path: Path
) -> None:
    first, second = run_ranks(2, with_own_state, tmp_path, kind)
    assert first == second
    assert first.startswith(words)
    assert bool(first) is (kind != "equal")
    if words:
        assert "step 4" in first, "it came in step 3, and the next snapshot is that of step 4"
        assert sorted(each.name for each in (tmp_path / "snapshots").iterdir()) == ["step-00000002"]


def logging(rank: int, folder: Path, kind: str) -> str:
    run = made(folder)

    def step(run: mh.Run) -> None:
        run.backward(lambda batch: run.models["model"](batch[0]).square().mean())
        run.update()
        names = {
            "alike": ("one", "two"), "main": ("one",) * run.is_main, "missing": ("one",) * rank,
            "others": ("one", f"of_{rank}"),
        }[kind]  # fmt: skip
        for name in reversed(names) if rank else names:
            run.log(**{name: float(rank)})

    try:
        run.fit(step, "2 steps")
    except ConfigError as error:
        return f"{error.what} | {error.where}"
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("alike", ""),
        ("main", ""),
        ("missing", "rank 0 logs nothing, and rank 1 logs one"),
        ("others", "rank 0 logs of_0, one, and rank 1 logs of_1, one"),
    ],
)
def test_names_that_are_logged_on_some_workers_alone_end_the_step(kind: str, words: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, logging, tmp_path, kind)
    assert first == second
    assert words in first
    assert bool(words) is ("run.log, " in first and "test_own_loop_faults.py, line" in first)


def with_a_teacher(rank: int, folder: Path, seed: int | None) -> str:
    torch.manual_seed(rank if seed is None else seed)
    teacher, run = nn.Linear(3, 1), made(folder)

    def step(run: mh.Run) -> None:
        run.backward(lambda batch: nn.functional.mse_loss(run.models["model"](batch[0]), teacher(batch[0])))
        run.update()

    try:
        run.fit(step, "2 steps")
    except ConfigError as error:
        return f"{error.what} | {error.fix}"
    return ""


def test_module_of_the_steps_that_is_another_on_each_worker_is_refused(tmp_path: Path) -> None:
    assert run_ranks(2, with_a_teacher, tmp_path / "alike", 0) == ["", ""]
    first, second = run_ranks(2, with_a_teacher, tmp_path / "other", None)
    assert first == second
    assert "modules that the step uses and the run was not given differ: teacher is a Linear with the checksum" in first
    assert "torch.manual_seed(0)" in first
