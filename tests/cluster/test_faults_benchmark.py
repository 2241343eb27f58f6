"""The benchmark of faults, small: a worker, an agent and the newest snapshot on two hosts, and not a bit is changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from manyhosts.records.line_file import read_lines

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kinds", [["agent"], ["worker", "agent", "bit-flip"]])
def test_faults_on_two_hosts_cost_no_sample_and_no_bit(kinds: list[str], tmp_path: Path) -> None:
    record = tmp_path / "faults.jsonl"
    words = ["--workers", "2", "--faults", str(len(kinds)), "--kinds", ",".join(kinds)]
    # How soon the one killed is replaced is not asked here; and what is trained meanwhile is trained a second time.
    words += ["--settled", "1", "--pause", "0.05", "--record", str(record)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=360, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed "), "so that it can be drawn again"
    faults, [run] = ([line for line in read_lines(record) if key in line] for key in ("kind", "faults"))
    assert {line["kind"] for line in faults} == set(kinds)
    assert all(line["steps_redone"] <= 1 for line in faults if line["kind"] != "bit-flip"), "only the one under way"
    assert (run["samples_wrong"], run["lines_wrong"], run["weights_equal"], run["losses_equal"]) == (0, 0, True, True)
    assert all(f"| {kind} | 2 | 1 |" in done.stdout for kind in kinds)
