"""A training that gives the same bits on any hosts, and the run of it here to which nothing happens."""

from __future__ import annotations

import subprocess
from pathlib import Path

from commands import summary
from launching import MANYHOSTS, write_script

SOURCE = """
    import os, time
    import torch
    from torch import nn
    import manyhosts as mh

    class Slow(torch.utils.data.TensorDataset):
        def __getitem__(self, index):
            time.sleep(0 if os.path.exists("continue") else float(os.environ.get("SLOW", "0")))
            return super().__getitem__(index)

    images = torch.rand(300, 64, generator=torch.Generator().manual_seed(7))
    labels = images.reshape(300, 4, 16).sum(2).argmax(1)
    trainer = mh.Trainer(
        model=lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        data=mh.Data(train=Slow(images, labels), batch_size=30),
        snapshots=mh.Snapshots(every="5 steps"),
        virtual_workers=3,
    )
    trainer.fit(os.environ["DURATION"])
"""

WAITS_AT_THE_END = """
    print("the end of", os.environ["RANK"], flush=True)
    while not os.path.exists("continue"):
        time.sleep(0.05)
"""
"""What workers do then: they do not end before there is a file `continue`, and then are not SLOW either."""


def undisturbed(folder: Path, steps: int) -> dict[str, object]:
    script = write_script(folder, SOURCE, "alone.py")
    words = [*MANYHOSTS, "run", "--env", f"DURATION={steps} steps", "--run-dir", str(folder / "whole"), str(script)]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    return summary(folder / "whole")
