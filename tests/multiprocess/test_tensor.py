"""Layers cut over workers give what one process does: losses and norms of every step, weights and evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sharded import Case, Outcome, assert_same, trained
from torch import nn

pytestmark = pytest.mark.multiprocess

CASES = {
    "one micro-batch": Case(),
    "clipped, uneven micro-batches": Case(trainer={"clip_gradients": 0.1, "micro_batch_size": 5}, samples=54, batch=25),
    "batches of two": Case(samples=5, batch=2, trainer={"micro_batch_size": 1}),  # and one of one
    "AdamW, dropout": Case(optimizer="AdamW", block={"dropout": 0.3}, trainer={"micro_batch_size": 4}),
    "batch norm": Case(block={"norm": nn.BatchNorm1d, "dropout": 0.1}, trainer={"micro_batch_size": 3}),
    "loss with parameters": Case(centred=True, trainer={"micro_batch_size": 4}),
}
ROUNDED = {
    precision: Case(trainer={"precision": precision, "micro_batch_size": 4}, block={"dropout": 0.1})
    for precision in ("bf16", "fp16")
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    cases = {name: replace(case, strategy="ddp") for name, case in {**CASES, **ROUNDED}.items()}
    return trained(1, cases, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("workers", [2, *(pytest.param(workers, marks=pytest.mark.slow) for workers in (3, 4))])
def test_cut_layers_give_what_one_process_does(workers: int, alone: Any, tmp_path: Path) -> None:
    cases = {name: replace(case, strategy="tensor") for name, case in {**CASES, **ROUNDED}.items()}
    for name, found in trained(workers, cases, tmp_path).items():
        assert len(found.norms) >= 3, name
        assert_same(alone[name], found, relative=1e-5 if name in CASES else 5e-2)
