"""What a resume finds of the run before: a script that was moved, lines that are lost, a test that is made again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launching import MANYHOSTS
from ranks import run_ranks
from runs import Recipe, events, make_trainer

from manyhosts.events import Note

pytestmark = pytest.mark.multiprocess

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import manyhosts as mh

inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
trainer = mh.Trainer(
    model=lambda: nn.Linear(4, 1),
    loss=nn.MSELoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    data=mh.Data(data, test=data, batch_size=8),
    snapshots=mh.Snapshots(every="1 epoch", keep=10),
)
result = trainer.fit(sys.argv[1])
mh.print(f"{result.steps} steps, {result.weights_sha256}")
if len(sys.argv) > 2:
    trainer.test()
"""


def run(script: Path, run_dir: Path, *words: str, workers: int, options: list[str] | None = None) -> str:
    command = [*MANYHOSTS, "run", "--workers", str(workers), "--run-dir", str(run_dir), *(options or []), str(script)]
    done = subprocess.run([*command, *words], cwd=script.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_project_that_was_copied_and_renamed_resumes_by_its_content_and_another_script_is_refused(
    workers: int, tmp_path: Path
) -> None:
    first = tmp_path / "first" / "train.py"
    first.parent.mkdir()
    first.write_text(SCRIPT)
    run(first, first.parent / "run", "2 epochs", workers=workers)
    whole = run(first, tmp_path / "undisturbed", "4 epochs", workers=workers)
    second = tmp_path / "second, with a space"
    shutil.copytree(first.parent, second)  # the old one is still there
    (second / "train.py").rename(second / "renamed.py")
    again = run(second / "renamed.py", second / "run", "4 epochs", workers=workers)
    assert "continues after step 12" in again
    assert re.findall(r"24 steps, \w+", again) == re.findall(r"24 steps, \w+", whole)
    (second / "other.py").write_text(SCRIPT + "\nprint('another')\n")
    command = [*MANYHOSTS, "run", "--run-dir", str(second / "run"), "other.py", "4 epochs"]
    refused = subprocess.run(command, cwd=second, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "this is the run directory of" in refused.stderr
    assert "which has other content" in refused.stderr


def gone_on(rank: int, run_dir: Path, duration: str, more: dict[str, Any]) -> list[str]:
    said: list[str] = []
    listeners = [lambda event: said.append(event.text) if isinstance(event, Note) else None]
    make_trainer(Recipe(samples=100, batch=20, accuracy=False, trainer=more), run_dir, listeners=listeners).fit(
        duration
    )
    return said


@pytest.mark.parametrize("workers", [1, 2])
def test_lines_that_are_lost_are_said_where_the_run_goes_on(workers: int, tmp_path: Path) -> None:
    run_ranks(workers, gone_on, tmp_path / "run", "2 epochs", {})
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if json.loads(line).get("step") not in (2, 6, 7)))
    said, *others = run_ranks(workers, gone_on, tmp_path / "run", "3 epochs", {})
    assert [text for text in said if "no line of step 2, steps 6 to 7" in text]
    assert not any(others), "listeners are on the leader"
    again, *_ = run_ranks(workers, gone_on, tmp_path / "run", "4 epochs", {})
    assert [text for text in again if "no line of step 2, steps 6 to 7" in text], "still lost"


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_test_that_is_made_again_stands_once(workers: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for _ in range(2):  # what a run does that was killed after its test and started again
        run(script, tmp_path / "run", "2 epochs", "test", workers=workers)
    assert len(events(tmp_path / "run", "test")) == 1
    run(script, tmp_path / "run", "3 epochs", "test", workers=workers)
    assert [line["step"] for line in events(tmp_path / "run", "test")] == [12, 18]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_epochs_on_the_screen_follow_a_batch_that_has_changed(workers: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run(script, tmp_path / "run", "5 epochs", workers=workers)  # 6 steps each
    for length, last in (("8 epochs", "8/8"), ("51 steps", "12/12")):
        said = run(script, tmp_path / "run", length, workers=workers, options=["--set", "batch_size=16"])
        shown = re.findall(r"epoch +(\d+)/(\d+)", said)
        assert all(int(epoch) <= int(epochs) for epoch, epochs in shown), said
        assert "/".join(shown[-1]) == last, said
    starts = events(tmp_path / "run", "start")
    assert [line["total_steps"] for line in starts] == [30, 39, 51]
    assert events(tmp_path / "run", "step")[-1]["step"] == 51
