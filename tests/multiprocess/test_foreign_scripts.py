"""Scripts written with Accelerate and Lightning train their workers together, as under their own launchers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import Ended, environment, run_words, write_script

pytestmark = pytest.mark.multiprocess
HERE = Path(__file__).parent

LIBRARIES = pytest.mark.parametrize(
    ("name", "variables"),
    [
        pytest.param("accelerate_script.py", {"ACCELERATE_USE_CPU": "true"}, id="accelerate"),
        pytest.param("lightning_script.py", {"PL_TRAINER_DEVICES": "2"}, id="lightning"),
    ],
)
"""With what must be said under torchrun, so that the workers train together."""


def trained(name: str, folder: Path, *options: str) -> Ended:
    """`manyhosts run` of a copy of a script, which leaves its weights in `ours.pt`."""
    script = shutil.copy(HERE / name, folder)
    words = ["--workers", "2", "--run-dir", "run", "--env", "OMP_NUM_THREADS=1", *options]
    return run_words(folder, *words, script, "ours.pt")


@LIBRARIES
def test_workers_of_a_script_with_a_library_train_together(
    name: str, variables: dict[str, str], tmp_path: Path
) -> None:
    done = trained(name, tmp_path)
    assert done.code == 0, done.err
    hashes = re.findall(r"rank \d of 2 on cpu: (\w{64})", done.out)
    assert len(hashes) == 2, done.out
    assert len(set(hashes)) == 1, "the same bits on all workers"
    assert "manyhosts: " not in done.err, "nothing is wrong"


@pytest.mark.slow
@pytest.mark.timeout(400)
@LIBRARIES
def test_script_with_a_library_ends_with_the_weights_that_torchrun_gives(
    name: str, variables: dict[str, str], tmp_path: Path
) -> None:
    assert trained(name, tmp_path).code == 0
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", name, "theirs.pt"]
    env = {**environment(), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    ours, theirs = (torch.load(tmp_path / f"{who}.pt", weights_only=True) for who in ("ours", "theirs"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_script_that_fabric_takes_for_alone_is_told_so(tmp_path: Path) -> None:
    source = """
        import torch
        from lightning.fabric import Fabric
        fabric = Fabric()
        fabric.launch()
        model = torch.nn.Linear(2, 2)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            optimizer.zero_grad()
            fabric.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
    """
    done = run_words(tmp_path, "--workers", "2", "--run-dir", "run", str(write_script(tmp_path, source)))
    assert done.code == 0, done.err
    assert "manyhosts: each of the 2 workers trains alone" in done.err
    assert "fix: give Fabric, or the Trainer, devices=" in done.err
