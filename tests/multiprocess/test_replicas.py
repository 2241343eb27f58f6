"""A lost worker costs a copy of a model that several workers make, not the run: the others go on, and it comes back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import summary
from launching import MANYHOSTS, environment
from sharded import assert_same, outcome, said

pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).with_name("replicas_script.py")
PIPELINE = {"STRATEGY": "pipeline", "OPTIONS": json.dumps({"stages": 2})}


def train(folder: Path, workers: int, *options: str, steps: int = 40, kills: str = "", **further: str) -> Path:
    """The directory of a run that has come to its end."""
    folder.mkdir()
    variables = {"WORKERS": str(workers), "KILLS": kills, "STEPS": f"{steps} steps", "TRAINER": "{}"} | further
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [*MANYHOSTS, "run", "--workers", str(workers), "--run-dir", "run", *options, str(SCRIPT)],
        cwd=folder,
        env=environment() | variables | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(list(folder.glob("killed-*-*"))) == sum(len(each.split(",")) for each in kills.split())
    return folder / "run"


def assert_as_undisturbed(run_dir: Path, alone: Path) -> None:
    """Each step is told once, with the losses and norms of one process; and the weights are its."""
    found, wanted = ({"sha": "", "validation": {}} for _ in range(2))
    assert_same(outcome(alone, wanted), outcome(run_dir, found), relative=1e-5)


def recoveries(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "restart"]


def rejoined(run_dir: Path) -> list[int]:
    """The steps after which a copy was whole again."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [each["step"] for each in lines if each["event"] == "note" and "in 2 copies of the model" in each["text"]]


def test_others_go_on_at_once_and_a_lost_copy_of_a_pipeline_comes_back(tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", 1, **PIPELINE)
    run_dir = train(tmp_path / "copies", 4, kills="6:3", **PIPELINE)
    assert_as_undisturbed(run_dir, alone)
    assert "the model is in 2 copies of 2 workers: if a worker is lost, training continues in the other" in said(
        run_dir
    )
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
@pytest.mark.parametrize("name", LOSSES)
def test_workers_of_a_pipeline_are_lost_again_and_again(name: str, tmp_path: Path) -> None:
    steps = 400 if name == "ten of them" else 60
    alone = train(tmp_path / "alone", 1, steps=steps, **PIPELINE)
    run_dir = train(tmp_path / "copies", 4, steps=steps, kills=LOSSES[name], **PIPELINE)
    assert_as_undisturbed(run_dir, alone)
    assert sum(each["steps_redone"] for each in recoveries(run_dir)) <= len(LOSSES[name].split())
    assert not summary(run_dir)["samples_lost"]


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["made", "given"])
def test_a_worker_dies_that_was_to_take_a_place(dies: str, tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", 1, steps=60, **PIPELINE)
    run_dir = train(tmp_path / "copies", 4, steps=60, kills="6:1", DIES=dies, **PIPELINE)
    assert (tmp_path / "copies" / f"killed-{dies}").exists()
    assert_as_undisturbed(run_dir, alone)
    assert rejoined(run_dir)


@pytest.mark.slow
def test_a_stage_that_no_worker_is_left_of_is_taken_from_the_newest_snapshot(tmp_path: Path) -> None:
    trainer = json.dumps({"snapshots": "4 steps"})
    alone = train(tmp_path / "alone", 1, **PIPELINE)
    run_dir = train(tmp_path / "copies", 4, "--restarts", "1", kills="7:2,3", TRAINER=trainer, **PIPELINE)
    assert_as_undisturbed(run_dir, alone)
    assert "from the snapshot of step 4" in recoveries(run_dir)[0]["how"]


def test_without_copies_it_is_said_that_a_lost_worker_ends_all(tmp_path: Path) -> None:
    run_dir = train(tmp_path / "stages", 2, steps=2, **PIPELINE)
    assert "if a worker is lost, all end (there is one copy of the model); --restarts N" in said(run_dir)
