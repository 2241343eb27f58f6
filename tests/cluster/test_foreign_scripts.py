"""Scripts with Accelerate and with Lightning on hosts that ssh reaches: all workers end with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import equal_hashes
from remote import run

from manyhosts.lab import Lab

SCRIPTS = Path(__file__).parents[1] / "multiprocess"


@pytest.mark.parametrize("name", ["accelerate_script.py", "lightning_script.py"])
def test_script_of_a_library_trains_on_hosts_that_share_nothing(name: str, four: Lab, tmp_path: Path) -> None:
    source = (SCRIPTS / name).read_text()
    ended = run(four, tmp_path, source, "--hosts", "lab1,lab2", "--run-dir", "run", timeout_s=200, arguments=["w.pt"])
    assert ended.code == 0, ended.err
    assert equal_hashes(ended.out, workers=2), ended.out
    assert "trains alone" not in ended.err
