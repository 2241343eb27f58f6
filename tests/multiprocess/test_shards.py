"""A stream in shards on real workers: killed, or another number of them, and each sample comes once all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import alive_workers, finish, kill_all, start, steps_done, summary, wait_for_step
from launching import agents, family, wait_until
from ranks import run_ranks
from runs import Recipe, Shards, samples_by_step, step_lines, trained
from torch import Tensor
from torch.utils.data import IterableDataset

import manyhosts as mh
from manyhosts.events import Note
from manyhosts.records.metrics import read

pytestmark = pytest.mark.multiprocess
STEPS = 48
RECIPE = Recipe(samples=150, batch=16, duration=f"{STEPS} steps", batch_norm=True, dropout=0.3, stream=True)


def times_restarted(run_dir: Path) -> int:
    """While the run writes on: a half line at the end does not count."""
    return sum(line["event"] == "restart" for line in read(run_dir / "metrics.jsonl"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three workers that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    output = finish(start(3, folder, RECIPE))
    assert summary(folder)["status"] == "completed", output
    return folder


@pytest.mark.parametrize(
    ("places", "loader_workers"),
    [([1], 0), ([1], 1), pytest.param([0, 2, 1], 0, marks=pytest.mark.slow)],
    ids=["in the worker", "in a loader process", "again and again"],
)
def test_killed_reader_of_a_shard_costs_a_step_and_no_bit(
    whole: Path, places: list[int], loader_workers: int, tmp_path: Path
) -> None:
    """The others change places, and one reads over what the lost one had read of its shard."""
    run_dir, pids = tmp_path / "run", tmp_path / "pids"
    ahead = ["--set", f"loader_workers={loader_workers}"]
    process = start(3, run_dir, RECIPE, ahead, pids=pids)
    try:
        for number, place in enumerate(places):
            wait_for_step(process, run_dir, 8 + 12 * number)  # an epoch has about 13
            os.kill(alive_workers(pids)[place], signal.SIGKILL)
            if number + 1 < len(places):  # two that die at once are one failure
                wait_until(lambda number=number: times_restarted(run_dir) > number, "the others have continued")
        output = finish(process)
    except BaseException:
        kill_all(process)
        raise
    reported = summary(run_dir)
    assert (process.returncode, reported["status"], reported["restarts"]) == (0, "completed", len(places)), output
    assert reported["steps_redone"] in range(len(places) + 1)
    assert reported["weights_sha256"] == summary(whole)["weights_sha256"], output
    assert [line["loss"] for line in step_lines(run_dir)] == [line["loss"] for line in step_lines(whole)]
    assert samples_by_step(run_dir) == samples_by_step(whole)
    assert all(line["compute"] > 0 for line in step_lines(run_dir)), "what finding samples takes is counted once"


def numbers_by_epoch(run_dir: Path) -> list[list[int]]:
    """The samples that each epoch took, by their numbers, sorted."""
    taken = samples_by_step(run_dir)
    found: dict[int, list[int]] = {}
    for line in step_lines(run_dir):
        found.setdefault(line["epoch"], []).extend(taken[line["step"]])
    return [sorted(numbers) for _, numbers in sorted(found.items())]


def test_another_number_of_workers_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def recipe(duration: str) -> Recipe:
        return Recipe(batch=24, duration=duration, batch_norm=True, stream=True)

    trained(4, recipe("1 epoch"), tmp_path / "whole")
    parts = tmp_path / "parts"
    trained(4, recipe("3 steps"), parts)
    trained(2, recipe("6 steps"), parts)
    trained(3, recipe("2 epochs"), parts)
    expected = [line["loss"] for line in step_lines(tmp_path / "whole")]
    found = [line["loss"] for line in step_lines(parts) if line["epoch"] == 0]
    assert found == pytest.approx(expected, abs=1e-5)
    data = Shards(recipe("").samples)
    assert numbers_by_epoch(parts) == [data.numbers(4), data.numbers(3)]


def test_virtual_workers_read_shards_of_their_own_with_the_same_bits_on_any_number(tmp_path: Path) -> None:
    def recipe(duration: str) -> Recipe:
        settings = {"virtual_workers": 4}
        return Recipe(batch=24, duration=duration, batch_norm=True, dropout=0.3, stream=True, trainer=settings)

    [alone] = trained(1, recipe("2 epochs"), tmp_path / "alone")
    trained(3, recipe("4 steps"), tmp_path / "parts")
    changed = trained(2, recipe("2 epochs"), tmp_path / "parts")
    assert {each["result"]["weights_sha256"] for each in changed} == {alone["result"]["weights_sha256"]}
    assert samples_by_step(tmp_path / "parts") == samples_by_step(tmp_path / "alone")
    assert numbers_by_epoch(tmp_path / "parts") == [Shards(recipe("").samples).numbers(4)] * 2


class Strays(IterableDataset[tuple[Tensor, Tensor]]):
    """Whose last shard begins elsewhere where it `strays`."""

    def __init__(self, strays: bool, first: int = 0, stride: int = 1) -> None:
        self.strays, self.first, self.stride = strays, first, stride

    def shard(self, index: int, count: int) -> Strays:
        return Strays(self.strays, index + count * (self.strays and index == count - 1), count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.full((3,), float(each)), torch.zeros(1)) for each in range(self.first, 64, self.stride))


def notes_of_resuming(rank: int, folder: Path) -> list[list[str]]:
    """Of two runs: what is noted where a stream strays after the snapshot, and where it does not."""
    found = []
    for strays in (True, False):
        for steps in (2, 4):
            heard: list[Any] = []
            mh.Trainer(
                model=torch.nn.Linear(3, 1),
                loss=torch.nn.MSELoss(),
                optimizer=lambda params: torch.optim.SGD(params, lr=1e-4),
                data=mh.Data(train=Strays(strays and steps > 2), batch_size=8),
                run_dir=folder / str(strays),
                listeners=[heard.append],
            ).fit(f"{steps} steps")
        found.append([each.text for each in heard if isinstance(each, Note) and "continue where it was" in each.text])
    return found


def test_shard_of_another_worker_that_goes_on_elsewhere_is_noted_by_rank_0(tmp_path: Path) -> None:
    [[said], nothing], _ = run_ranks(2, notes_of_resuming, tmp_path)
    assert said.startswith("shard 1 of 2 of the train stream does not continue where it was: after 8 samples of it")
    assert nothing == []


@pytest.mark.slow
def test_node_that_goes_within_an_epoch_and_comes_back_takes_no_sample_along(tmp_path: Path) -> None:
    long = Recipe(samples=300, batch=10, duration="1000000 steps", batch_norm=True, stream=True, sample_s=0.002)
    run_dir = tmp_path / "run"
    rare = ["--set", "snapshots.every=100000 steps", "--set", "validate_every=100000 steps"]
    process = start(1, run_dir, long, [*rare, "--nodes", "1:2"])
    try:
        wait_for_step(process, run_dir, 40)  # an epoch has about 31
        agents(family(process))[0].kill()
        wait_until(lambda: "with 1 worker" in reported(run_dir), "the other continues")
        wait_until(lambda: "continues with 2 workers, 1 of them new" in reported(run_dir), "it is back")
        back = steps_done(run_dir)
        wait_for_step(process, run_dir, back + 50)
        process.send_signal(signal.SIGTERM)
        output = finish(process)
    except BaseException:
        kill_all(process)
        raise
    assert summary(run_dir)["status"] == "interrupted", output
    assert [line["step"] for line in step_lines(run_dir)] == list(range(1, summary(run_dir)["steps"] + 1))
    *epochs, _ = numbers_by_epoch(run_dir)
    data = Shards(long.samples)
    assert epochs[:2] == [data.numbers(2)] * 2, "it goes in the second, which is read to its end as it was begun"
    assert all(numbers in (data.numbers(1), data.numbers(2)) for numbers in epochs)


def reported(run_dir: Path) -> list[str]:
    """What the record tells beside steps."""
    return [line.get("text") or line.get("how") or "" for line in read(run_dir / "metrics.jsonl")]
