"""Copies of a pipeline's stages: weights, norms and evaluations of one process; their snapshots; what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ranks import run_ranks
from sharded import Case, assert_passed_on, assert_same, make_trainer, trained
from torch import nn

from manyhosts.errors import ConfigError

pytestmark = pytest.mark.multiprocess

CASES = {
    "one micro-batch": Case(),
    "micro-batches": Case(trainer={"micro_batch_size": 2}),
    "clipped": Case(trainer={"clip_gradients": 0.1, "micro_batch_size": 2}),
    "an uneven rest": Case(samples=25, batch=12, trainer={"micro_batch_size": 2}),  # the last batch has one sample
    "AdamW": Case(optimizer="AdamW", trainer={"micro_batch_size": 2}),
    "bf16": Case(trainer={"precision": "bf16", "micro_batch_size": 2}),
    "loss with parameters": Case(centred=True, trainer={"micro_batch_size": 2}),
}


def test_copies_of_stages_train_as_one_process(tmp_path: Path) -> None:
    alone = trained(1, CASES, tmp_path / "alone")
    cases = {name: replace(case, strategy="pipeline", options={"stages": 2}) for name, case in CASES.items()}
    for name, found in trained(4, cases, tmp_path / "copies").items():
        assert len(found.norms) == 5, name
        assert_same(alone[name], found, relative=5e-2 if name == "bf16" else 1e-5)


def test_a_snapshot_passes_between_copies_and_other_layouts(tmp_path: Path) -> None:
    case = Case(strategy="pipeline", optimizer="AdamW", trainer={"micro_batch_size": 4})
    copies = replace(case, options={"stages": 2})
    layouts = [(2, case), (4, copies), (2, replace(case, strategy="ddp")), (4, copies)]
    assert_passed_on(layouts, tmp_path / "run")


REFUSED = {
    "no whole number of copies": (Case(options={"stages": 3}), "which a mesh with pipeline=3 does not multiply to"),
    "BatchNorm": (Case(options={"stages": 1}, block={"norm": nn.BatchNorm1d}), "is a BatchNorm layer"),
}


def answer(rank: int, name: str, folder: Path) -> str:
    try:
        make_trainer(replace(REFUSED[name][0], strategy="pipeline"), folder)
    except ConfigError as error:
        return error.what
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_copies_cannot_is_refused_before_the_first_step(name: str, tmp_path: Path) -> None:
    for each in run_ranks(2, answer, name, tmp_path):
        assert REFUSED[name][1] in each
