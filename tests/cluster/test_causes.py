"""A study names first what was put in to slow training down between two hosts, and accounts for all but 5 points."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "causes.py"


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_study_names_a_link_of_100_mbit() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--only", "link"], capture_output=True, text=True, timeout=650
    )
    assert "| `communication_exposed` |" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
