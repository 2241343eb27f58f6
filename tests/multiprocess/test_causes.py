"""A study names first what was put in to slow training down, and accounts for all but 5 points."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "causes.py"
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("cause", "steps", "named"),
    [
        ("worker", 40, "straggler"),
        *(
            pytest.param(cause, 40, named, marks=pytest.mark.slow)
            for cause, named in {
                "loader": "data_wait",
                "processor": "straggler",
                "evaluation": "evaluation",
                "snapshot": "snapshot",
            }.items()
        ),
    ],
)
def test_study_names_what_was_put_in(cause: str, steps: int, named: str) -> None:
    words = [sys.executable, str(BENCHMARK), "--only", cause, "--steps", str(steps)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=850)
    assert f"| `{named}` |" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
