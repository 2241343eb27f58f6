"""`mh.Order` and `mh.Saver` in a plain loop: each sample once, and a resume to the bits of an undisturbed run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import MANYHOSTS, environment

import manyhosts as mh

pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).with_name("saver_script.py")


OURS = re.compile(r"\b(mh|order|saver)\b")


def train(
    folder: Path,
    name: str,
    workers: int,
    *,
    saved: str | None = None,
    ends_at: int | None = None,
    script: Path = SCRIPT,
) -> Path:
    start = [sys.executable] if workers == 1 else [*MANYHOSTS, "run", "--workers", str(workers), "--restarts", "0"]
    words = [str(script), str(folder / (saved or name)), str(folder / f"{name}.pt")]
    env = {**environment(), "OMP_NUM_THREADS": "1"}
    words = [*start, *words, *([] if ends_at is None else [str(ends_at)])]
    done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode != 0) is (ends_at is not None), done.stdout + done.stderr
    return folder / f"{name}.pt"


def samples(path: Path, workers: int, suffix: str = "") -> list[tuple[int, int]]:
    return sorted(each for rank in range(workers) for each in torch.load(f"{path}-{rank}{suffix}"))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("ends_at", [pytest.param(10, marks=pytest.mark.slow), 14])  # in an epoch; at the end of one
def test_loop_that_ended_in_mid_run_resumes_to_the_same_bits(tmp_path: Path, workers: int, ends_at: int) -> None:
    undisturbed = train(tmp_path, "undisturbed", workers)
    train(tmp_path, "broken", workers, saved="snapshots", ends_at=ends_at)
    resumed = train(tmp_path, "resumed", workers, saved="snapshots")
    expected, found = torch.load(undisturbed), torch.load(resumed)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert samples(undisturbed, workers) == [(epoch, index) for epoch in range(3) for index in range(50)]


@pytest.mark.parametrize("workers", [1, 2])
def test_second_loop_does_not_save_in_the_folder_of_one_that_still_trains(tmp_path: Path, workers: int) -> None:
    first = mh.Saver(tmp_path / "both", model=torch.nn.Linear(1, 1))
    first.after_step()
    start = [sys.executable] if workers == 1 else [*MANYHOSTS, "run", "--workers", str(workers)]
    words = [*start, str(SCRIPT), str(tmp_path / "both"), str(tmp_path / "second.pt")]
    done = subprocess.run(words, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert f"a run in this directory is in progress: process {os.getpid()}" in done.stderr
    first.close()


def test_snapshot_of_two_workers_is_resumed_by_one_without_a_sample_lost_or_twice(tmp_path: Path) -> None:
    broken = train(tmp_path, "broken", 2, saved="snapshots", ends_at=9)
    resumed = train(tmp_path, "resumed", 1, saved="snapshots")
    both = samples(broken, 2, "-before") + samples(resumed, 1)
    assert sorted(both) == [(epoch, index) for epoch in range(3) for index in range(50)]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("library", ["accelerate", "fabric"])
def test_loop_of_another_library_resumes_to_the_same_bits(library: str, workers: int, tmp_path: Path) -> None:
    """And trains to what the plain loop comes to: ten lines of ours are in it."""
    if importlib.util.find_spec("lightning" if library == "fabric" else library) is None:
        pytest.skip(f"{library} is not installed")
    script = SCRIPT.with_name(f"saver_{library}_script.py")
    body = script.read_text().partition("FOLDER, OUTPUT")[2].splitlines()
    own = [line for line in body if OURS.search(line) and "ENDS_AT" not in line and "saver.store" not in line]
    assert len(own) <= 10, own
    plain = train(tmp_path, "plain", workers)
    undisturbed = train(tmp_path, "undisturbed", workers, script=script)
    train(tmp_path, "broken", workers, saved="snapshots", ends_at=10, script=script)
    resumed = train(tmp_path, "resumed", workers, saved="snapshots", script=script)
    expected = torch.load(undisturbed)
    for found in (torch.load(resumed), torch.load(plain)):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert samples(undisturbed, workers) == [(epoch, index) for epoch in range(3) for index in range(50)]
