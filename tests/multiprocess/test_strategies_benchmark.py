"""The benchmark of strategies runs, and sees the same training in all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "strategies.py"
# slow: that parts train as whole models do is held by tests/multiprocess/test_fsdp.py and test_fsdp_parts.py
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.mark.timeout(400)
def test_every_strategy_is_measured_and_ends_with_the_loss_of_the_loop_by_hand(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--rounds", "1", "--steps", "2", "--width", "64", "--places", "host"]
    words += ["--ways", "ddp,fsdp"]
    done = subprocess.run(
        [*words, "--output", str(tmp_path / "answer.md")], capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in (tmp_path / "answer.md").read_text().splitlines() if line.startswith("| ")]
    kept = {row[0].removeprefix("| "): float(row[4]) for row in rows if row[0] != "|"}
    assert list(kept) == [
        "DistributedDataParallel",
        "ddp",
        "FSDP2 by hand",
        "fsdp, zero=3",
        "fsdp, zero=2",
        "fsdp, zero=1",
    ]
    assert kept["fsdp, zero=3"] == kept["FSDP2 by hand"] < kept["ddp"]
