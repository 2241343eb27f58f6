"""Fast workers take more of each batch where that is asked for, and the answer stays that of one process."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from commands import alive_workers, finish, kill_all, start, summary, wait_for_step
from ranks import run_ranks
from runs import CHANCY, Noisy, events, network, samples_by_step, step_lines, trained
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError
from manyhosts.training.loop import balance

pytestmark = pytest.mark.multiprocess
STEPS, BATCH = 40, 24
SAMPLE_S = 0.004


def train(rank: int, run_dir: Path, asked: dict[str, Any], slow: int | None) -> dict[str, Any]:
    """A short run in which each sample takes a while to compute, and the worker `slow` three times as long."""
    balance.EVERY_S = 0.25
    took: list[tuple[int, int]] = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        if slow is not None:
            time.sleep(len(labels) * SAMPLE_S * (3 if rank == slow else 1))
        took.append((trainer._run.state.step if trainer._run else 0, len(labels)))
        return nn.functional.cross_entropy(model(images), labels)

    trainer = mh.Trainer(
        model=lambda: network(batch_norm=asked.get("batch_norm", False)),
        step=step,
        weight="samples",
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        data=mh.Data(train=Noisy(150), batch_size=BATCH),
        record_samples=True,
        run_dir=run_dir,
        seed=3,
        **asked.get("trainer", {}),
    )
    result = trainer.fit(f"{STEPS} steps")
    return {
        "sha": result.weights_sha256,
        "weights": {name: value.detach().numpy() for name, value in trainer.model.state_dict().items()},
        "share": sum(size for at, size in took if at >= STEPS // 2) / (STEPS / 2 * BATCH),
    }


def alone(folder: Path, **asked: Any) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(1, train, folder, asked, None)[0]
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run directory and the hash of the weights of one process that computes all the parts."""
    folder = tmp_path_factory.mktemp("one")
    return folder, alone(folder, trainer={"virtual_workers": 12}, batch_norm=True)["sha"]


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_parts_move_to_fast_workers_and_no_bit_changes(workers: int, one: tuple[Path, str], tmp_path: Path) -> None:
    asked = {"trainer": {"virtual_workers": 12, "balance": "speed"}, "batch_norm": True}
    many = run_ranks(workers, train, tmp_path / "many", asked, 0)
    assert {each["sha"] for each in many} == {one[1]}
    assert many[0]["share"] < 0.8 / workers, [each["share"] for each in many]
    assert samples_by_step(tmp_path / "many") == samples_by_step(one[0])
    assert any("parts is cut by the workers' speeds" in note["text"] for note in events(tmp_path / "many", "note"))


@pytest.mark.parametrize(("workers", "asked"), [(2, {"batch_norm": True}), (3, {"trainer": {"micro_batch_size": 4}})])
def test_samples_move_to_fast_workers_and_the_gradient_stays(workers: int, asked: Any, tmp_path: Path) -> None:
    one = alone(tmp_path / "one", **{**asked, "trainer": {}})
    uneven = {**asked, "trainer": {**asked.get("trainer", {}), "balance": "speed"}}
    many = run_ranks(workers, train, tmp_path / "many", uneven, 0)
    assert many[0]["share"] < 0.8 / workers, [each["share"] for each in many]
    for name, value in one["weights"].items():
        numpy.testing.assert_allclose(many[1]["weights"][name], value, rtol=1e-4, atol=1e-5)
    assert samples_by_step(tmp_path / "many") == samples_by_step(tmp_path / "one")


def test_audited_parts_are_those_that_their_owners_have_now(one: tuple[Path, str], tmp_path: Path) -> None:
    asked = {"trainer": {"virtual_workers": 12, "balance": "speed", "audit": 0.3}, "batch_norm": True}
    many = run_ranks(3, train, tmp_path / "many", asked, 0)
    assert {each["sha"] for each in many} == {one[1]}
    notes = [note["text"] for note in events(tmp_path / "many", "note")]
    assert any("parts is cut by the workers' speeds" in note for note in notes)
    assert any("every bit was equal" in note for note in notes)


UNEVEN = replace(
    CHANCY,
    duration="160 steps",
    sample_s=0.002,
    slow_worker=1,
    accuracy=False,
    data={"loader_workers": 1},
    trainer={"virtual_workers": 8, "balance": "speed", "seed": 5},
)


@pytest.mark.slow
def test_killed_worker_and_a_resume_change_no_bit_of_a_run_cut_by_speed(tmp_path: Path) -> None:
    calm = replace(UNEVEN, sample_s=0.0, slow_worker=None, data={}, trainer={"virtual_workers": 8, "seed": 5})
    trained(1, calm, tmp_path / "whole")
    process = start(3, tmp_path / "run", UNEVEN, pids=tmp_path / "pids")
    try:
        wait_for_step(process, tmp_path / "run", 80)
        os.kill(alive_workers(tmp_path / "pids")[1], signal.SIGKILL)
        wait_for_step(process, tmp_path / "run", 120)
        process.send_signal(signal.SIGTERM)
        finish(process)
    except BaseException:
        kill_all(process)
        raise
    again = start(2, tmp_path / "run", UNEVEN, pids=tmp_path / "pids-2")
    output = finish(again)
    assert again.returncode == 0, output
    assert summary(tmp_path / "run")["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]
    assert [line["loss"] for line in step_lines(tmp_path / "run")] == [
        line["loss"] for line in step_lines(tmp_path / "whole")
    ]
    assert any("cut by the workers' speeds" in note["text"] for note in events(tmp_path / "run", "note"))


class Words(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.ones(40, 4))


class Shards(Words):
    def shard(self, index: int, count: int) -> Words:
        return Words()


def refused(rank: int, asked: dict[str, Any], stream: str, loaders: int) -> str:
    train: Any = {"words": Words(), "shards": Shards(), "": TensorDataset(torch.ones(40, 4))}[stream]
    try:
        mh.Trainer(
            model=nn.Linear(4, 1),
            step=lambda model, batch: model(batch).mean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            data=mh.Data(train=train, batch_size=8, loader_workers=loaders),
            balance="speed",
            **asked,
        )
    except ConfigError as error:
        return f"{error.where}: {error.what}"
    return ""


@pytest.mark.parametrize(
    ("asked", "stream", "loaders", "why"),
    [
        ({"strategy": "local-sgd"}, "", 0, "step alone"),
        ({"strategy": "diloco"}, "", 0, "step alone"),
        ({"batch_norm": "local"}, "", 0, "would change the model"),
        ({}, "shards", 0, "stays with its worker"),
        ({}, "words", 1, "does not hear of a new cut"),
        ({}, "words", 0, ""),
    ],
)
def test_what_cannot_be_cut_by_speed_is_refused(asked: dict[str, Any], stream: str, loaders: int, why: str) -> None:
    for said in run_ranks(2, refused, asked, stream, loaders):
        assert why in said
        assert said.startswith("balance: ") == bool(why)
