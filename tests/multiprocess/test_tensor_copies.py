"""Copies of a model whose layers are cut: norms, weights and evaluation of one process; their snapshots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import summary
from launching import run
from ranks import run_ranks
from sharded import Case, assert_same, both, script, trained
from torch import nn

pytestmark = pytest.mark.multiprocess

CASES = {
    "one micro-batch": Case(),
    "clipped, an uneven rest": Case(samples=25, trainer={"clip_gradients": 0.1, "micro_batch_size": 2}),
    "AdamW, micro-batches of five": Case(optimizer="AdamW", trainer={"micro_batch_size": 5}),
    "batches of one": Case(samples=5, batch=2, trainer={"micro_batch_size": 1}),  # and one copy has none of the last
    "batch norm": Case(block={"norm": nn.BatchNorm1d}),
    "loss with parameters": Case(centred=True, trainer={"micro_batch_size": 4}),
}
OF_TWO = {
    "batch norm of micro-batches": Case(block={"norm": nn.BatchNorm1d}, trainer={"micro_batch_size": 3}),
    "dropout": Case(block={"dropout": 0.3}, trainer={"micro_batch_size": 4}),
    "bf16": Case(block={"dropout": 0.1}, trainer={"precision": "bf16", "micro_batch_size": 4}),
    "fp16": Case(trainer={"precision": "fp16", "micro_batch_size": 4}),
}
"""As two workers with the whole model: pieces and what is drawn are those of two copies."""


def test_copies_of_cut_layers_train_as_one_process(tmp_path: Path) -> None:
    alone = trained(1, CASES, tmp_path / "alone") | trained(2, _ddp(OF_TWO), tmp_path / "two")
    cases = {name: replace(case, strategy="tensor", options={"size": 2}) for name, case in {**CASES, **OF_TWO}.items()}
    for name, found in trained(4, cases, tmp_path / "copies").items():
        assert len(found.norms) == 5, name
        assert_same(alone[name], found, relative=5e-2 if name in ("bf16", "fp16") else 1e-5)


def _ddp(cases: dict[str, Case]) -> dict[str, Case]:
    return {name: replace(case, strategy="ddp") for name, case in cases.items()}


def test_a_snapshot_passes_between_copies_and_other_layouts(tmp_path: Path) -> None:
    case = Case(strategy="tensor", optimizer="AdamW", trainer={"micro_batch_size": 4})
    copies = replace(case, options={"size": 2})
    layouts = [
        (2, case),
        (4, copies),
        (2, replace(case, strategy="ddp")),
        (4, copies),
        (4, case),
        (4, copies),
        (4, replace(case, strategy="fsdp", options={"shard": 2})),
        (4, copies),
    ]
    before = ""
    for number, (workers, each) in enumerate(layouts):
        found = run_ranks(workers, both, each, 2 * number, tmp_path / "run")
        assert all(one == found[0] for one in found)
        assert found[0][0] == before or not before, "what was taken up is not what was left, bit for bit"
        before = found[0][1]


@pytest.mark.slow
def test_a_killed_worker_costs_no_bit(tmp_path: Path) -> None:
    once = "if not os.path.exists('killed'): open('killed', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    hashes = set()
    for name, trouble in {"whole": "pass", "killed": once}.items():
        (tmp_path / name).mkdir()
        words = ("--set", "strategy=ddp+tensor", "--set", "mesh.tensor=2", "--set", "threads=1")
        ended = run(tmp_path / name, script(trouble, "ddp"), "--workers", "4", "--restarts", "1", *words)
        assert ended.code == 0, ended.err
        assert summary(ended.run_dir)["restarts"] == int(name == "killed")
        hashes.add(summary(ended.run_dir)["weights_sha256"])
    assert len(hashes) == 1
