"""What does it cost a start that workers meet through the channel of their agents, and not in a TCPStore?

    python benchmarks/meeting.py [--workers 2] [--rounds 15]

One script with a Trainer on Gloo, started by `manyhosts run` by turns as it is, and with the line that chooses the
channel taken out, so that its workers meet in the TCPStore that foreign scripts use. The clock runs from the start of
the command until rank 0 has made its first step. One warm-up of each is not counted. The answer is written to
meeting.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe

REPORT = Path(__file__).with_suffix(".md")
SCRIPT = """
import os, sys, time
import torch
from torch import nn
import manyhosts as mh
from manyhosts.communication.world import World

if sys.argv[1] == "TCPStore":
    World._channel_store = lambda self, group: None


def stamp(event):
    if type(event).__name__ == "StepDone":
        with open("stamp", "w") as file:
            file.write(str(time.time()))


torch.manual_seed(0)
mh.Trainer(
    model=lambda: nn.Linear(64, 10),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    data=mh.Data(train=torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(10, (64,))), batch_size=32),
    listeners=[stamp],
).fit("1 steps")
"""
WAYS = ("TCPStore", "channel")


def seconds_to_first_step(way: str, workers: int, folder: Path) -> float:
    (folder / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-P", "-m", "manyhosts.cli.main", "run", "--workers", str(workers)]
    began = time.time()
    subprocess.run([*words, "train.py", way], cwd=folder, check=True, capture_output=True, timeout=120)
    return float((folder / "stamp").read_text()) - began


def measure(workers: int, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            seconds_to_first_step(way, workers, Path(folder))
        for turn in range(rounds):
            for way in WAYS if turn % 2 else reversed(WAYS):  # neither always goes first
                seconds[way].append(seconds_to_first_step(way, workers, Path(folder)))
    return seconds


def report(seconds: dict[str, list[float]], workers: int) -> str:
    pairs = [ours / theirs for theirs, ours in zip(seconds["TCPStore"], seconds["channel"], strict=True)]
    rows = "\n".join(
        f"| {way} | {statistics.median(taken):.2f} s | {min(taken):.2f} s | {max(taken):.2f} s |"
        for way, taken in seconds.items()
    )
    return f"""# What it costs that workers meet through the channel of their agents

Written by `python benchmarks/meeting.py --workers {workers} --rounds {len(pairs)}`, whose first lines say what is done.

{describe(Path(sys.executable), ["torch", "manyhosts"])} Load at the end: {os.getloadavg()[0]:.1f}.

From the command to the first step of {workers} workers, n = {len(pairs)} each, by turns:

| workers meet in | median | least | most |
|---|---:|---:|---:|
{rows}

By rounds a start through the channel takes **{statistics.median(pairs):.3f}** of one by the TCPStore ({min(pairs):.3f}
to {max(pairs):.3f}).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    REPORT.write_text(report(measure(asked.workers, asked.rounds), asked.workers))
    print(REPORT.read_text())


if __name__ == "__main__":
    main()
