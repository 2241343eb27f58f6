"""Copies of a model whose layers are cut: norms, weights and evaluation of one process; their snapshots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import Case, assert_passed_on, assert_same, make_trainer, samples, trained
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError

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
    assert_passed_on(layouts, tmp_path / "run")


class Uneven(nn.Module):
    """Two workers hold three and two fifths of its layers; the table between them is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last, self.norm = nn.Embedding(5, 64), nn.Linear(64, 5), nn.LayerNorm(64)
        self.table = nn.Parameter(torch.zeros(5, 64))  # what is added to zero loses no bit

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.words(words) + self.table.sum(0)))
        return out


def fit_uneven(rank: int, folder: Path) -> str:
    words = torch.arange(24) % 5
    trainer = mh.Trainer(
        model=Uneven,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=TensorDataset(words, (words * 3) % 5), batch_size=12),
        strategy=mh.Mesh(tensor=2),
        run_dir=folder,
    )
    return trainer.fit("3 steps").weights_sha256


@pytest.mark.slow
def test_three_copies_hold_alike_what_they_do_not_cut(tmp_path: Path) -> None:
    """The bits of a sum of three depend on where a number stands in its message; at the end workers compare theirs."""
    assert len({*run_ranks(6, fit_uneven, tmp_path)}) == 1


def use(rank: int, case: Case, folder: Path) -> tuple[dict[str, str], list[Any]]:
    """What is refused, in words, and what else a trainer can do."""
    refused = {}
    for name, further in {
        "speed": {"trainer": {"balance": "speed"}},
        "three": {"options": {"size": 3}},
    }.items():
        with pytest.raises(ConfigError) as error:
            make_trainer(replace(case, **further), folder / name)
        refused[name] = error.value.what
    trainer = make_trainer(case, folder / "used")
    trainer.fit("3 steps")
    trainer.save(folder / "weights.pt", weights="last")
    return refused, trainer.predict(samples(7, 3), weights="last").tolist()


def test_copies_predict_and_save_the_whole_and_refuse_what_they_cannot(tmp_path: Path) -> None:
    case = Case(strategy="tensor", options={"size": 2}, trainer={"micro_batch_size": 4})
    [alone] = run_ranks(1, plain, replace(case, strategy="ddp", options={}), tmp_path / "alone")
    for refused, predicted in run_ranks(4, use, case, tmp_path, timeout_s=200):
        assert "none of them can take fewer" in refused["speed"]
        assert "there are 4 workers, which a mesh with tensor=3 does not multiply to" in refused["three"]
        torch.testing.assert_close(torch.tensor(predicted), torch.tensor(alone), rtol=1e-4, atol=1e-5)
    saved, weights = torch.load(tmp_path / "weights.pt", weights_only=True), mh.load(tmp_path / "alone", weights="last")
    assert saved.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-4, atol=1e-5)


def plain(rank: int, case: Case, folder: Path) -> list[Any]:
    trainer = make_trainer(case, folder)
    trainer.fit("3 steps")
    predicted: list[Any] = trainer.predict(samples(7, 3), weights="last").tolist()
    return predicted
