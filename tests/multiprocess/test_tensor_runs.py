"""Runs with cut layers: taken up by others and from others, killed, failed by a script, refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import summary
from launching import run
from ranks import run_ranks
from sharded import Case, both, make_trainer, samples, script, trained
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError

pytestmark = pytest.mark.multiprocess
CASE = Case(strategy="tensor", optimizer="AdamW", block={"dropout": 0.2}, trainer={"micro_batch_size": 4})
STAGES: list[tuple[int, str]] = [(1, "ddp"), (2, "tensor"), (3, "tensor"), (2, "fsdp"), (2, "tensor"), (2, "ddp")]
"""Workers and strategy of one after the other, each two steps on from where the one before it ended."""


@pytest.mark.slow
def test_one_run_passes_through_strategies_and_numbers_of_workers(tmp_path: Path) -> None:
    case = replace(CASE, block={})  # where samples are shared out, dropout's masks are others than one process's
    whole = trained(1, {"whole": replace(case, strategy="ddp", steps=2 * len(STAGES))}, tmp_path)["whole"]
    before = ""
    for number, (workers, strategy) in enumerate(STAGES, start=1):
        found = run_ranks(workers, both, replace(case, strategy=strategy), 2 * number - 2, tmp_path / "run")
        assert all(each == found[0] for each in found)
        assert found[0][0] == before or not before, "what was taken up is not what was left, bit for bit"
        before = found[0][1]
    weights = mh.load(tmp_path / "run", weights="last")
    for name, weight in whole.weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


def test_a_killed_worker_costs_no_bit(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole", script("pass", "tensor"), "--workers", "2", "--set", "threads=1")
    assert whole.code == 0, whole.err
    once = "if not os.path.exists('killed'): open('killed', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    words = ("--workers", "2", "--restarts", "1", "--set", "threads=1")
    killed = run(tmp_path / "killed", script(once, "tensor"), *words)
    assert killed.code == 0, killed.err
    assert summary(killed.run_dir)["restarts"] == 1
    assert summary(killed.run_dir)["weights_sha256"] == summary(whole.run_dir)["weights_sha256"]


def test_an_error_of_one_worker_is_shown_once_and_ends_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, script("raise ValueError('not this one')", "tensor"), "--workers", "2")
    assert ended.code == 1
    assert ended.err.count("Traceback (most recent call last)") == 1, ended.err
    assert "ValueError: not this one" in ended.err


class Own(nn.Module):
    """Without a layer that could be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, 11))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.table[words]


class Rank(nn.Module):
    """Computes something else on each worker as soon as it sees a part of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        made = torch.relu(self.up(self.words(words)))
        return self.down(made * (1.0 if made.shape[-1] == 8 else 1.1))


def use(rank: int, folder: Path) -> dict[str, Any]:
    """What is refused, in words, and what else a trainer can do."""
    said: dict[str, Any] = {}
    plans: dict[str, Any] = {
        "no layer": {"*.nothing": "column"},
        "no pair": {"blocks.*.up": "column"},
        "no features": {"unused": "vocabulary"},
        "kind": {"words": "column"},
    }
    for name, plan in plans.items():
        try:
            make_trainer(replace(CASE, options={"plan": plan}), folder / name).fit("1 step")
        except ConfigError as error:
            said[name] = str(error)
    for name, kind in (("own", Own), ("rank", Rank)):
        try:
            trainer = mh.Trainer(
                model=kind,
                loss=nn.CrossEntropyLoss(),
                optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
                data=mh.Data(train=samples(12, 1), batch_size=6),
                strategy="tensor",
                run_dir=folder / name,
            )
            trainer.fit("1 step")
        except ConfigError as error:
            said[name] = str(error)
    pairs = {"blocks.*.up": "column", "blocks.*.down": "row"}
    trainer = make_trainer(replace(CASE, options={"plan": pairs}), folder / "pairs")
    said["pairs"] = trainer.fit("3 steps").weights_sha256
    trainer.save(folder / "weights.pt", weights="last")
    said["predicted"] = trainer.predict(samples(7, 3), weights="last").tolist()
    said["notes"] = (folder / "pairs" / "metrics.jsonl").read_text()
    said["parts"] = (folder / "rank" / "metrics.jsonl").read_text()
    return said


def test_plans_are_kept_or_refused_in_a_sentence_and_weights_are_whole(tmp_path: Path) -> None:
    [alone] = run_ranks(1, plain, tmp_path / "alone")
    for said in run_ranks(2, use, tmp_path, timeout_s=120):
        assert "the plan names '*.nothing', and no layer of the model is called so" in said["no layer"]
        assert "cut by this plan the model does not compute what it does uncut" in said["no pair"]
        assert "'unused' is to be cut as 'vocabulary', and is a Linear" in said["no features"]
        assert "'words' is to be cut as 'column', and is a Embedding" in said["kind"]
        assert "has no nn.Linear or nn.Embedding that could be cut" in said["own"]
        assert "1 vocabulary, 2 gathered" in said["parts"], "a pair was used that a trial shows to be wrong"
        assert "3 column, 3 row" in said["notes"]
        torch.testing.assert_close(torch.tensor(said["predicted"]), torch.tensor(alone), rtol=1e-4, atol=1e-5)
    weights = mh.load(tmp_path / "alone", weights="last")
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert saved.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-4, atol=1e-5)


def plain(rank: int, folder: Path) -> list[Any]:
    trainer = make_trainer(replace(CASE, strategy="ddp"), folder)
    trainer.fit("3 steps")
    predicted: list[Any] = trainer.predict(TensorDataset(*samples(7, 3).tensors), weights="last").tolist()
    return predicted
