"""Every example runs, and does what it says; the first of them is what `make train` does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MANYHOSTS = str(Path(sys.executable).with_name("manyhosts"))

pytestmark = pytest.mark.multiprocess


def run(folder: Path, *words: str) -> str:
    """What the command said; it must succeed."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_main_job_reaches_98_percent_and_says_what_a_person_wants_to_know(tmp_path: Path) -> None:
    said = run(tmp_path, MANYHOSTS, "run", "--workers", "2", str(EXAMPLES / "digits.py"))
    [folder] = (tmp_path / "runs").iterdir()
    facts = summary(folder)
    assert facts["test"]["accuracy"] >= 0.98
    assert (facts["workers"], facts["strategy"]) == (2, "ddp")
    assert facts["status"] in ("completed", "stopped early")
    assert facts["best"]["metric"] == "accuracy"
    percent = f"{100 * facts['test']['accuracy']:.2f} %"
    last_screen = said[said.rindex("validation") :]
    assert percent in last_screen
    for words in ("time", "spent on", "samples/s", f"runs/{folder.name}"):
        assert words in last_screen, words
    assert list((folder / "tensorboard").iterdir())
    assert (folder / "best" / "manifest.json").exists()
    assert {path.name.rpartition("-")[2] for path in (folder / "logs").glob("*.log")} == {"0.log", "1.log"}


def test_own_step_learns_and_logs_its_values(tmp_path: Path) -> None:
    run(tmp_path, sys.executable, str(EXAMPLES / "own_step.py"))
    [folder] = (tmp_path / "runs").iterdir()
    assert set(summary(folder)["validation"]) == {"loss", "error", "size"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    errors = [line["values"]["error"] for line in lines if line["event"] == "step"]
    assert len(errors) == 150
    assert errors[-1] < errors[0] / 2


def test_augmentation_learns_with_loader_processes_on_two_workers(tmp_path: Path) -> None:
    run(tmp_path, MANYHOSTS, "run", "--workers", "2", str(EXAMPLES / "augmentation.py"))
    [folder] = (tmp_path / "runs").iterdir()
    assert summary(folder)["validation"]["accuracy"] > 0.9


def test_stream_learns_the_law(tmp_path: Path) -> None:
    said = run(tmp_path, sys.executable, str(EXAMPLES / "stream.py"))
    [folder] = (tmp_path / "runs").iterdir()
    assert summary(folder)["steps"] == 200
    assert summary(folder)["validation"]["loss"] < 0.01
    assert "learned: [1.0" in said


def loss_of_language_model(folder: Path, strategy: str) -> float:
    words = ["--workers", "2", "--set", "duration=60 steps", "--set", f"strategy={strategy}"]
    said = run(folder, MANYHOSTS, "run", *words, "--run-dir", strategy, str(EXAMPLES / "char_lm.py"))
    facts = summary(folder / strategy)
    assert facts["strategy"] == strategy
    loss: float = facts["validation"]["loss"]
    assert loss < float(re.findall(r"characters alone ([\d.]+)", said)[0]) - 0.5
    return loss


def test_language_model_soon_knows_more_than_how_frequent_characters_are(tmp_path: Path) -> None:
    loss_of_language_model(tmp_path, "ddp")


@pytest.mark.slow
def test_language_model_learns_the_same_in_parts(tmp_path: Path) -> None:
    whole, parts = (loss_of_language_model(tmp_path, strategy) for strategy in ("ddp", "fsdp"))
    assert parts == pytest.approx(whole, rel=0.01)


def test_script_that_knows_nothing_of_us_trains_together(tmp_path: Path) -> None:
    said = run(tmp_path, MANYHOSTS, "run", "--workers", "2", "--env", "EPOCHS=2", str(EXAMPLES / "torchrun_script.py"))
    losses = [line.rsplit("loss ", 1)[1] for line in said.splitlines() if "epoch 1, loss" in line]
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert "rank 1 of 2" in said


def test_model_of_transformers_learns_on_a_set_of_datasets(tmp_path: Path) -> None:
    run(tmp_path, MANYHOSTS, "run", "--workers", "2", str(EXAMPLES / "transformers_text.py"))
    [folder] = (tmp_path / "runs").iterdir()
    assert summary(folder)["validation"]["accuracy"] > 0.8
