"""Layers cut over workers whose parts others keep in parts: norms, weights and evaluation of one process; snapshots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import summary
from launching import run
from sharded import Case, assert_passed_on, assert_same, script, trained
from torch import nn

pytestmark = pytest.mark.multiprocess

PARTS = {"shard": 2, "tensor": 2}
CASES = {
    "one micro-batch": Case(),
    "clipped, an uneven rest": Case(samples=25, trainer={"clip_gradients": 0.1, "micro_batch_size": 2}),
    "AdamW, micro-batches of five": Case(optimizer="AdamW", trainer={"micro_batch_size": 5}),
    "batches of one": Case(samples=5, batch=2, trainer={"micro_batch_size": 1}),
    "batch norm": Case(block={"norm": nn.BatchNorm1d}),
    "loss with parameters": Case(centred=True, trainer={"micro_batch_size": 4}),
}
OF_TWO = {
    "dropout": Case(block={"dropout": 0.3}, trainer={"micro_batch_size": 4}),
    "bf16": Case(block={"dropout": 0.1}, trainer={"precision": "bf16", "micro_batch_size": 4}),
    "fp16": Case(trainer={"precision": "fp16", "micro_batch_size": 4}),
}
"""As two workers with the uncut model: pieces and what is drawn are those of two that read different samples."""


def test_parts_of_cut_layers_train_as_one_process(tmp_path: Path) -> None:
    of_two = {name: replace(case, strategy="ddp") for name, case in OF_TWO.items()}
    alone = trained(1, CASES, tmp_path / "alone") | trained(2, of_two, tmp_path / "two")
    cases = {name: replace(case, strategy="fsdp+tensor", options=PARTS) for name, case in {**CASES, **OF_TWO}.items()}
    for name, found in trained(4, cases, tmp_path / "parts").items():
        assert len(found.norms) == 5, name
        assert_same(alone[name], found, relative=5e-2 if name in ("bf16", "fp16") else 1e-5)


def test_a_snapshot_passes_between_this_and_other_layouts(tmp_path: Path) -> None:
    case = Case(strategy="fsdp+tensor", options=PARTS, optimizer="AdamW", trainer={"micro_batch_size": 4})
    layouts = [
        (2, replace(case, strategy="fsdp", options={})),
        (4, case),
        (2, replace(case, strategy="tensor", options={})),
        (4, case),
        (2, replace(case, strategy="ddp", options={})),
    ]
    assert_passed_on(layouts, tmp_path / "run")


@pytest.mark.slow
def test_a_killed_worker_costs_no_bit(tmp_path: Path) -> None:
    once = "if not os.path.exists('killed'): open('killed', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    hashes = set()
    for name, trouble in {"undisturbed": "pass", "killed": once}.items():
        (tmp_path / name).mkdir()
        words = ("strategy=fsdp+tensor", "mesh.tensor=2", "mesh.shard=2", "threads=1")
        options = [word for each in words for word in ("--set", each)]
        ended = run(tmp_path / name, script(trouble, "ddp"), "--workers", "4", "--restarts", "1", *options)
        assert ended.code == 0, ended.err
        assert summary(ended.run_dir)["restarts"] == int(name == "killed")
        assert summary(ended.run_dir)["strategy"] == "fsdp+tensor"
        hashes.add(summary(ended.run_dir)["weights_sha256"])
    assert len(hashes) == 1
