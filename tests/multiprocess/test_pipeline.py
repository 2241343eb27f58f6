"""A pipeline gives the bits of one process with the same micro-batches: weights, losses and norms of every step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sharded import Case, Outcome, trained
from torch import nn

pytestmark = pytest.mark.multiprocess

CASES = {
    "one micro-batch": Case(),
    "two micro-batches": Case(trainer={"micro_batch_size": 6}),
    "five micro-batches": Case(trainer={"micro_batch_size": 5}, samples=54, batch=25),  # the last batch has one of four
    "clipped": Case(trainer={"clip_gradients": 0.1, "micro_batch_size": 4}),
    "batches of two": Case(samples=5, batch=2, trainer={"micro_batch_size": 1}),  # and one of one
    "AdamW, dropout": Case(optimizer="AdamW", block={"dropout": 0.3}, trainer={"micro_batch_size": 4}),
    "bf16": Case(trainer={"precision": "bf16", "micro_batch_size": 4}, block={"dropout": 0.1}),
    "batch norm": Case(block={"norm": nn.BatchNorm1d, "dropout": 0.1}, trainer={"micro_batch_size": 3}),
    "loss with parameters": Case(centred=True, trainer={"micro_batch_size": 4}),
}


def assert_equal(one: Outcome, other: Outcome, name: str) -> None:
    """Bit for bit, the evaluation too."""
    assert other.norms == one.norms, name
    assert other.losses == one.losses, name
    assert other.sha == one.sha, name
    assert other.validation == one.validation, name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return trained(1, CASES, tmp_path_factory.mktemp("alone"))


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b on two": (2, {}),
    "gpipe on three": (3, {"schedule": "gpipe"}),
    "1f1b on four": (4, {"cuts": "layers"}),
    "zero-bubble on three": (3, {"schedule": "zero-bubble"}),
}
"""Workers, and options."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "1f1b on four" else ()) for name in RUNS]
)
def test_stages_have_the_bits_of_one_process(name: str, alone: Any, tmp_path: Path) -> None:
    workers, options = RUNS[name]
    cases = {name: replace(case, strategy="pipeline", options=options) for name, case in CASES.items()}
    for name, found in trained(workers, cases, tmp_path).items():
        assert len(found.norms) == 5, name
        assert_equal(alone[name], found, name)
