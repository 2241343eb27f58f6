"""Four hosts that share nothing but wires train the model that one process trains, and resume where they were."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from launching import MANYHOSTS, write_script
from remote import run
from safetensors.torch import load_file

from manyhosts.lab import Lab

SOURCE = """
    import hashlib, os
    import torch
    from torch import nn
    import manyhosts as mh

    images = torch.rand(300, 64, generator=torch.Generator().manual_seed(7))
    labels = images.reshape(300, 4, 16).sum(2).argmax(1)
    trainer = mh.Trainer(
        model=lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),  # made by the seed of the run
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        data=mh.Data(train=torch.utils.data.TensorDataset(images, labels), batch_size=50),
    )
    trainer.fit(os.environ["DURATION"])
    weights = b"".join(value.numpy().tobytes() for _, value in sorted(trainer.model.state_dict().items()))
    print("weights", hashlib.sha256(weights).hexdigest())
"""


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = max((run_dir / "snapshots").glob("step-*"))
    found: dict[str, torch.Tensor] = {}
    for path in newest.glob("tensors-*"):
        found |= load_file(path)
    return found


@pytest.mark.timeout(400)
def test_four_hosts_train_what_one_process_trains_and_go_on(four: Lab, tmp_path: Path) -> None:
    options = ["--hosts", ",".join(four.names), "--run-dir", "many"]
    for epochs in (1, 2):  # the second run continues from the snapshot of the first, which lab1 alone has
        ended = run(four, tmp_path, SOURCE, "--env", f"DURATION={epochs} epochs", *options)
        assert ended.code == 0, ended.err
    assert "continues after step 6" in ended.out
    hashes = [line.split()[-1] for line in ended.out.splitlines() if "weights" in line and line.startswith("[")]
    assert len(hashes) == 4
    assert len(set(hashes)) == 1, "the same bits on all hosts"
    script = write_script(tmp_path, SOURCE, "alone.py")
    words = [*MANYHOSTS, "run", "--env", "DURATION=2 epochs", "--env", "OMP_NUM_THREADS=1", "--run-dir", "one"]
    subprocess.run([*words, script.name], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    many, one = weights_of(tmp_path / "many"), weights_of(tmp_path / "one")
    assert many.keys() == one.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            many[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    summary = json.loads((tmp_path / "many" / "summary.json").read_text())
    assert (summary["workers"], summary["nodes"], summary["status"]) == (4, 4, "completed")
