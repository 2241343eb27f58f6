"""A lost worker costs a copy of a model that several workers make, not the run: the others go on, and it comes back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launching import MANYHOSTS, environment
from sharded import outcome, said

pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).with_name("replicas_script.py")
PIPELINE = {"STRATEGY": "pipeline", "OPTIONS": json.dumps({"stages": 2})}
TENSOR = {"STRATEGY": "tensor", "OPTIONS": json.dumps({"size": 2})}
HYBRID = {"STRATEGY": "fsdp", "OPTIONS": json.dumps({"shard": 2})}


def train(folder: Path, workers: int, *options: str, steps: int = 40, kills: str = "", **further: str) -> Path:
    """The directory of a run that has come to its end."""
    folder.mkdir()
    variables = {"WORKERS": str(workers), "KILLS": kills, "STEPS": f"{steps} steps"} | further
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [*MANYHOSTS, "run", "--workers", str(workers), "--run-dir", "run", *options, str(SCRIPT)],
        cwd=folder,
        env=environment() | variables | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(list(folder.glob("killed-*-*"))) == sum(len(each.split(",")) for each in kills.split())
    return folder / "run"


def assert_as_undisturbed(run_dir: Path, alone: Path) -> None:
    """Each step is told once, with losses and norms as of one process, and the weights are its within 1e-5."""
    one, other = (outcome(each, {"sha": "", "validation": {}}) for each in (alone, run_dir))
    assert other.norms == pytest.approx(one.norms, rel=1e-4, abs=1e-5)
    assert other.losses == pytest.approx(one.losses, rel=1e-4, abs=1e-5)
    for name, weight in one.weights.items():
        away = (weight - other.weights[name]).abs().max().item()
        assert away <= 1e-5 * weight.abs().max().item() + 1e-6, f"{name} is away by {away}"


def recoveries(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "restart"]


def rejoined(run_dir: Path) -> list[int]:
    """The steps after which a copy was whole again."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [each["step"] for each in lines if each["event"] == "note" and "in 2 copies of the model" in each["text"]]


@pytest.mark.parametrize(
    ("ways", "rank"), [(PIPELINE, 3), (TENSOR, 1), pytest.param(HYBRID, 1, marks=pytest.mark.slow)]
)
def test_others_go_on_at_once_and_a_lost_copy_comes_back(ways: dict[str, str], rank: int, tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", 1, **ways)
    run_dir = train(tmp_path / "copies", 4, kills=f"6:{rank}", **ways)
    assert_as_undisturbed(run_dir, alone)
    begun = "the model is in 2 copies of 2 workers: if a worker is lost, training continues in the other copies"
    assert begun in said(run_dir)
    [lost] = recoveries(run_dir)
    assert "with 2 workers in 1 copy of the model" in lost["how"]
    assert lost["steps_redone"] <= 1
    [back] = rejoined(run_dir)
    assert back > lost["step"]  # so the other copy made steps alone
    assert not list((run_dir / "snapshots").glob("step-0000000[0-9]"))  # so none was read


LOSSES = {
    "ten of them": "5:3 9:2 13:1 17:0 21:3 25:0 29:1 33:2 37:3 41:0",
    "a copy": "6:1,3",
    "what makes a copy together": "6:0,3",  # of each copy another stage: those that are left make one
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LOSSES)
def test_workers_of_a_pipeline_are_lost_again_and_again(name: str, tmp_path: Path) -> None:
    lost_and_back(LOSSES[name], 120 if name == "ten of them" else 60, tmp_path, PIPELINE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ways", [HYBRID, TENSOR], ids=["hybrid", "tensor"])
def test_ten_workers_of_copies_in_parts_are_lost(ways: dict[str, str], tmp_path: Path) -> None:
    lost_and_back(LOSSES["ten of them"], 120, tmp_path, ways)


def lost_and_back(kills: str, steps: int, folder: Path, ways: dict[str, str]) -> None:
    alone = train(folder / "alone", 1, steps=steps, **ways)
    run_dir = train(folder / "copies", 4, steps=steps, kills=kills, **ways)
    assert_as_undisturbed(run_dir, alone)
    found = recoveries(run_dir)
    assert sum(each["steps_redone"] for each in found) <= len(found)
    assert not any("snapshot" in each["how"] for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["made", "given"])
@pytest.mark.parametrize("ways", [PIPELINE, HYBRID, TENSOR], ids=["pipeline", "hybrid", "tensor"])
def test_a_worker_dies_that_was_to_take_a_place(ways: dict[str, str], dies: str, tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", 1, steps=60, **ways)
    run_dir = train(tmp_path / "copies", 4, steps=60, kills="6:1", DIES=dies, **ways)
    assert (tmp_path / "copies" / f"killed-{dies}").exists()
    assert_as_undisturbed(run_dir, alone)
    assert rejoined(run_dir)


@pytest.mark.slow
def test_a_stage_that_no_worker_is_left_of_is_taken_from_the_newest_snapshot(tmp_path: Path) -> None:
    alone, every = train(tmp_path / "alone", 1, **PIPELINE), ("--set", "snapshots.every=4 steps")
    run_dir = train(tmp_path / "copies", 4, "--restarts", "1", *every, kills="7:2,3", **PIPELINE)
    assert_as_undisturbed(run_dir, alone)
    assert "from the snapshot of step 4" in recoveries(run_dir)[0]["how"]


def test_without_copies_it_is_said_that_a_lost_worker_ends_all(tmp_path: Path) -> None:
    run_dir = train(tmp_path / "stages", 2, steps=2, **PIPELINE)
    assert "if a worker is lost, all end (there is one copy of the model); --restarts N" in said(run_dir)
