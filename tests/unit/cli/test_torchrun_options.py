"""torchrun's options, read as ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyhosts.cli.run_options import translate
from manyhosts.errors import ConfigError

FLAGS = {"-m", "--module", "--no-python", "--rehearse"}
WITH_VALUE = {"--workers", "--hosts", "--nodes", "--on", "--env", "--workers-per-node"}

CASES = {
    "--nproc-per-node 2 train.py --nnodes 3": "--workers 2 train.py --nnodes 3",
    "--nproc_per_node=2 --nnodes=1 --standalone train.py": "--workers 2 train.py",
    "--nproc-per-node gpu train.py": "train.py",
    "--nproc-per-node cpu train.py": f"--workers {os.cpu_count()} train.py",
    "--rdzv-backend c10d --rdzv_endpoint=localhost:0 --rdzv-id 7 -m pkg.train": "-m pkg.train",
    "--master-addr 127.0.0.1 --master_port 29500 --node-rank 0 --nproc-per-node 4 a.py": "--workers 4 a.py",
    "--max-restarts 3 --local-ranks-filter 0 a.py": "--restarts 3 --show 0 a.py",
    "--hosts a,b --nnodes 2 --nproc_per_node 4 a.py": "--hosts a,b --nodes 2 --workers-per-node 4 a.py",
    "--on slurm --nnodes=1:4 a.py": "--on slurm --nodes 1:4 a.py",
    "--no_python --env X=--nnodes prog": "--no-python --env X=--nnodes prog",
    "--workers 2 train.py": "--workers 2 train.py",
    "-t 3 -r 1 --tee 3 a.py": "a.py",
}


@pytest.mark.parametrize(("typed", "read"), CASES.items())
def test_options_are_read_as_ours(typed: str, read: str) -> None:
    assert " ".join(translate(typed.split(), FLAGS, WITH_VALUE).words) == read


def test_what_need_not_be_said_is_named() -> None:
    found = translate(["--standalone", "--tee", "3", "--nproc-per-node", "2", "a.py"], FLAGS, WITH_VALUE)
    assert (found.left_out, found.is_other) == (["--standalone", "--tee"], True)
    assert not translate(["--workers", "2", "a.py"], FLAGS, WITH_VALUE).is_other


@pytest.mark.parametrize("typed", ["--nnodes 2 --nproc-per-node 4 a.py x", "--node_rank=1 --nproc_per_node=4 a.py x"])
def test_command_for_every_host_is_answered_with_the_one_to_type(typed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(typed.split(), FLAGS, WITH_VALUE)
    assert "manyhosts run --hosts HOST1" in caught.value.fix
    assert "--workers-per-node 4 a.py x" in caught.value.fix


def test_what_else_was_typed_is_in_the_answer() -> None:
    typed = ["--nnodes", "2", "--max-restarts", "3", "--set", "lr=1", "-m", "pkg.train"]
    with pytest.raises(ConfigError) as caught:
        translate(typed, {*FLAGS, "-m"}, {*WITH_VALUE, "--set"})
    assert "--hosts HOST1,HOST2 --restarts 3 --set lr=1 -m pkg.train" in caught.value.fix


def test_glued_options_are_told_apart() -> None:
    with pytest.raises(ConfigError, match="without a space") as caught:
        translate(["--node_rank=0--rdzv_id", "7", "a.py"], FLAGS, WITH_VALUE)
    assert "--node-rank=0 --rdzv_id" in caught.value.fix


def test_command_line_takes_them(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    words = ["run", "--standalone", "--nproc_per_node", "3", "--dry-run", "a.py"]
    done = subprocess.run(
        [sys.executable, "-m", "manyhosts.cli.main", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "rank 2:" in done.stdout
    assert "read as: manyhosts run --dry-run --workers 3 a.py; left out" in done.stderr
