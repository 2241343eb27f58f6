"""A run again from its record: the same bits from a fresh checkout, and what differs is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import MANYHOSTS, environment

from manyhosts.records import provenance

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("reproduce")]

SCRIPT = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from nets import net

LR = 0.01
inputs = torch.tensor(np.load("data/inputs.npy"))
train = TensorDataset(inputs, inputs.sum(1, keepdim=True))
trainer = mh.Trainer(
    model=net, loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=LR),
    data=mh.Data(train=train, batch_size=16),
)
trainer.fit("2 epochs")
"""
NETS = """
from torch import nn


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
"""


MADE = ("out/time", "last.txt")


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)


def manyhosts(folder: Path, *words: str) -> Any:
    return subprocess.run(
        [*MANYHOSTS, *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=200
    )


def reproduced(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    done = manyhosts(folder, "reproduce", "--json", *words, str(folder / "run"))
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a script that is committed but for a changed line and a new module; git ignores its data."""
    folder = tmp_path_factory.mktemp("project")
    git(folder, "init", "--quiet")
    (folder / "train.py").write_text(SCRIPT.replace("LR = 0.01", "LR = 0.5"))
    (folder / ".gitignore").write_text("data/\nrun*/\n")
    (folder / "data").mkdir()
    make = "import numpy; numpy.save('data/inputs', numpy.random.default_rng(0).random((64, 4), dtype='float32'))"
    subprocess.run([sys.executable, "-c", make], cwd=folder, check=True)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "one")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "nets.py").write_text(NETS)
    done = manyhosts(folder, "run", "--workers", "2", "--run-dir", "run", "--set", "seed=3", "train.py")
    assert done.returncode == 0, done.stderr
    return folder


def test_run_with_uncommitted_changes_is_reproduced_to_the_same_bits(project: Path) -> None:
    (project / "train.py").write_text(SCRIPT.replace("0.01", "0.3"))  # as it continues: the record counts, not this
    (project / "nets.py").unlink()
    try:
        code, found = reproduced(project)
    finally:
        (project / "train.py").write_text(SCRIPT)
        (project / "nets.py").write_text(NETS)
    assert found["differences"] == []
    assert (code, found["now"], found["is_equal"]) == (0, found["then"], True)
    assert found["then"] == json.loads((project / "run" / "summary.json").read_text())["weights_sha256"] != ""


def test_changed_line_changed_data_and_other_torch_are_each_named(project: Path) -> None:
    (project / "train.py").write_text(SCRIPT.replace("LR = 0.01", "LR = 0.02"))
    data = project / "data" / "inputs.npy"
    before = data.read_bytes()
    state = project / "run" / provenance.NAME / "state.json"
    kept = state.read_text()
    torch = json.loads(kept)["packages"]["torch"]
    try:
        data.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        state.write_text(kept.replace(f'"torch": "{torch}"', '"torch": "2.0.1"'))
        code, found = reproduced(project, "--here")
    finally:
        data.write_bytes(before)
        state.write_text(kept)
        (project / "train.py").write_text(SCRIPT)
    assert code == 1
    assert not found["is_equal"]
    said = {each["kind"]: each["what"] for each in found["differences"]}
    assert said.keys() == {"code", "data", "versions"}
    assert said["code"] == "train.py is another: line 10 was `LR = 0.01` and is `LR = 0.02`"
    assert said["data"].startswith("data/inputs.npy holds something else: sha256 ")
    assert said["versions"] == f"torch is {torch}, and was 2.0.1"


def test_dry_run_names_what_differs_and_runs_nothing(project: Path) -> None:
    before = sorted((project / "runs").glob("*")) if (project / "runs").exists() else []
    (project / "nets.py").write_text(NETS.replace("8", "9"))
    try:
        done = manyhosts(project, "reproduce", "--dry-run", "--here", "run")
    finally:
        (project / "nets.py").write_text(NETS)
    assert done.returncode == 0, done.stderr
    assert "code differs: nets.py is another: line 6 was" in done.stdout
    assert "manyhosts run --run-dir" in done.stdout
    assert "--workers 2 --set seed=3" in done.stdout
    assert (sorted((project / "runs").glob("*")) if (project / "runs").exists() else []) == before


def copy_script(project: Path, to: Path) -> None:
    """What a run of `project` needs, without the repository around it."""
    for name in ("train.py", "nets.py"):
        (to / name).write_text((project / name).read_text())
    (to / "data").mkdir()
    (to / "data" / "inputs.npy").write_bytes((project / "data" / "inputs.npy").read_bytes())


def test_run_of_a_script_in_no_repository_is_reproduced_from_the_files_that_are_kept(
    project: Path, tmp_path: Path
) -> None:
    copy_script(project, tmp_path)
    assert manyhosts(tmp_path, "run", "--workers", "1", "--run-dir", "run", "train.py").returncode == 0
    (tmp_path / "nets.py").write_text("raise SystemExit('not the module of then')")
    code, found = reproduced(tmp_path)
    assert (code, found["is_equal"], found["differences"]) == (0, True, [])


def test_run_that_did_not_end_has_nothing_to_compare_with(project: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("run.json", "metrics.jsonl"):
        lines = (project / "run" / name).read_text()
        (tmp_path / "run" / name).write_text(lines if name == "run.json" else lines[: lines.index('{"event": "end"')])
    done = manyhosts(tmp_path, "reproduce", "run")
    assert done.returncode == 2
    assert "this run has no weights to compare with: broke off" in done.stderr


def test_run_that_was_made_longer_is_reproduced_as_long_and_the_new_run_is_one_like_others(
    project: Path, tmp_path: Path
) -> None:
    copy_script(project, tmp_path)
    for duration in ("1 epoch", "2 epochs"):
        words = ("run", "--workers", "1", "--run-dir", "run", "--set", f"duration={duration}", "train.py")
        assert manyhosts(tmp_path, *words).returncode == 0
    code, found = reproduced(tmp_path)
    assert (code, found["is_equal"]) == (0, True)
    record = json.loads((Path(found["again"]) / "run.json").read_text())
    assert record["script"] == str(tmp_path / "train.py")
    done = manyhosts(tmp_path, "reproduce", "--dry-run", found["again"])
    assert done.returncode == 0, done.stderr
    assert "duration=2 epochs" in done.stdout


def test_what_the_first_run_has_made_is_not_written_over(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    own = "import os, time\nfrom pathlib import Path\n"
    script = SCRIPT.replace('np.load("data/inputs.npy")', "np.load('data/inputs.npy')[:32]").replace(
        "LR = 0.01", "LR = 0.1"
    )
    last = (
        "\nPath('out').mkdir(exist_ok=True)\nPath('out/time').write_text(str(time.time()))\nPath('last.txt').touch()\n"
    )
    (tmp_path / "train.py").write_text(own + script + last)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / ".gitignore").write_text("data/\nout/\nruns/\nrun/\n*.txt\n")
    for folder in ("data", "out"):
        (tmp_path / folder).mkdir()
    np.save(tmp_path / "data" / "inputs.npy", np.random.default_rng(0).random((64, 4), dtype="float32"))
    (tmp_path / "out" / "before").touch()
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "All")
    assert manyhosts(tmp_path, "run", "--run-dir", "run", "train.py").returncode == 0
    made = [(tmp_path / name).read_bytes() + str((tmp_path / name).stat().st_mtime_ns).encode() for name in MADE]
    code, found = reproduced(tmp_path)
    assert (code, found["then"] == found["now"]) == (0, True)
    assert [
        (tmp_path / name).read_bytes() + str((tmp_path / name).stat().st_mtime_ns).encode() for name in MADE
    ] == made
