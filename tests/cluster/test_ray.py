"""A real Ray cluster on four hosts, started by `ray start`, places the agents."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engines import FOLDER, environment, furthest_from_one_process, hashes, run, share

from manyhands.lab import Lab

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'manyhands[ray]'"
)
RAY = [sys.executable, "-P", "-m", "ray.scripts.scripts"]
SMALL = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]


@pytest.fixture(autouse=True, scope="module")
def folder(four: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all hosts share."""
    shared = tmp_path_factory.mktemp("shared")
    share(four, shared)
    roles = [["--head", "--port=6379", "--include-dashboard=false"], *[["--address=lab1:6379"]] * 3]
    for host, role in zip(four, roles, strict=True):
        words = [*RAY, "start", *role, f"--node-ip-address={host.address}", *SMALL]
        host.run(words, env=environment(), timeout_s=120, stdin=subprocess.DEVNULL)
    return shared


def test_four_hosts_by_ray_train_to_the_weights_of_one_process(four: Lab, folder: Path, tmp_path: Path) -> None:
    words = ["--on", "ray", "--nodes", "4", "--run-dir", f"{FOLDER}/run", "recipe_script.py"]
    done = run(four[1], words)
    assert done.returncode == 0, done.stderr
    found = hashes(done.stdout)
    assert sorted(host for host, _ in found.values()) == four.names
    assert len({digest for _, digest in found.values()}) == 1
    assert furthest_from_one_process(folder / "run" / "weights-0.npz", tmp_path) < 1e-5


def test_unmodified_torchrun_script_runs_by_ray(four: Lab) -> None:
    words = ["--on", "ray", "--nodes", "4", "-o", "address=lab1:6379", "--run-dir", f"{FOLDER}/plain"]
    done = run(four[0], [*words, "torchrun_script.py"])
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"sum 6 of 4 on (lab\d) sees \[\]", done.stdout)) == four.names
