"""Searches and functions of a notebook on hosts that ssh reaches: trials at once on disjoint hosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import MANYHOSTS, write_script

from manyhosts.lab import Lab

TUNED = (Path(__file__).parents[1] / "multiprocess" / "tune_script.py").read_text()
CALLED = """
import json, os, socket
import torch
import manyhosts as mh

factor = 3


def where(start):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, socket.gethostname())
    return {"hosts": found, "sum": torch.arange(start, start + 3) * factor}


if __name__ == "__main__":
    found = mh.launch.run(
        where, [1], hosts=["lab2", "lab4"], workers=2, run_dir="runs/where", environment={"OMP_NUM_THREADS": "1"}
    )
    print(json.dumps({"hosts": found["hosts"], "sum": found["sum"].tolist()}))
"""


def test_function_runs_on_the_hosts_that_are_named_and_its_result_comes_back(four: Lab, tmp_path: Path) -> None:
    write_script(tmp_path, CALLED)
    process = four.desk.start([sys.executable, "script.py"], folder=str(tmp_path), stdout=-1, stderr=-1)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found == {"hosts": ["lab2", "lab2", "lab4", "lab4"], "sum": [3, 6, 9]}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("where-")] == []


@pytest.mark.slow
def test_trials_run_at_once_on_disjoint_hosts(four: Lab, tmp_path: Path) -> None:
    write_script(tmp_path, TUNED)
    words = ["--hosts", "lab1,lab2,lab3,lab4", "--nodes", "2", "--search", "lr=0.5,0.1", "--sampler", "grid"]
    words += ["--env", "OMP_NUM_THREADS=1", "--run-dir", "T", "script.py"]
    process = four.desk.start([*MANYHOSTS, "tune", *words], folder=str(tmp_path), stdout=-1, stderr=-1)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    found = json.loads((tmp_path / "T" / "tune.json").read_text())
    assert [each["status"] for each in found["trials"]] == ["completed"] * 2
    lines = [
        [json.loads(line) for line in (tmp_path / "T" / "trials" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("0", "1")
    ]
    begun, ended = ([trial[at]["time"] for trial in lines] for at in (0, -1))
    assert max(begun) < min(ended), "they ran at once"
    records = [(tmp_path / "T" / "trials" / name / "run.json").read_text() for name in ("0", "1")]
    hosts = [{name for name in four.names if f'"{name}"' in record} for record in records]
    assert hosts in ([{"lab1", "lab2"}, {"lab3", "lab4"}], [{"lab3", "lab4"}, {"lab1", "lab2"}])
