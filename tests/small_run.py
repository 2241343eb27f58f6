"""A run of a small script, made once for the tests that work on what a run leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import manyhosts as mh

generator = torch.Generator().manual_seed(0)
images = torch.randn(90, 1, 8, 8, generator=generator)
labels = torch.randint(0, 3, (90,), generator=generator)
train, validation = (TensorDataset(images[part], labels[part]) for part in (slice(0, 60), slice(60, 90)))
names = ["one", "two", "three"]


def standardise(inputs):
    return (inputs - inputs.mean()) / 2


def net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(144, 3)
    )


if __name__ == "__main__":
    trainer = mh.Trainer(
        model=net,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=mh.Data(train=train, validation=validation, batch_size=16),
        snapshots=mh.Snapshots(every="2 steps"),
        early_stopping=mh.EarlyStopping("loss", mode="min", patience=9),
    )
    trainer.fit(sys.argv[1] if len(sys.argv) > 1 else "2 epochs")
    print("VALIDATED", trainer.validate())
"""


def make_run(folder: Path, *words: str, script: str = SCRIPT, name: str = "train.py") -> Path:
    """Train in `folder`, in one process or as `words` for `manyhosts run` say. Returns the run directory."""
    (folder / name).write_text(script)
    command = [sys.executable, "-m", "manyhosts.cli.main", "run", "--run-dir", "run", *(words or ("--workers", "1"))]
    done = subprocess.run([*command, name], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"
