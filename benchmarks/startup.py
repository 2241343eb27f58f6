"""How long does it take from the command to the first training step, against torchrun?

    python benchmarks/startup.py [--workers 2] [--rounds 9]

One plain DDP script on Gloo, written for torchrun, started by both in turn. The clock runs from the start of the
command until rank 0 has made its first optimizer step. One warm-up of each, which fills the file cache, is not counted.
The answer is written to startup.md beside this file.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe

REPORT = Path(__file__).with_suffix(".md")
BIN = Path(sys.executable).parent
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters())
nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,))).backward()
optimizer.step()
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        file.write(str(time.time()))
dist.barrier()
os._exit(0)
"""


def command(name: str, workers: int, folder: Path) -> list[str]:
    if name == "torchrun":
        return [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={workers}"]
    return [str(BIN / "manyhosts"), "run", "--workers", str(workers), "--run-dir", str(folder / "run")]


def seconds_to_first_step(name: str, workers: int, folder: Path) -> float:
    script, stamp = folder / "first_step.py", folder / "stamp"
    script.write_text(SCRIPT)
    words = [*command(name, workers, folder), str(script), str(stamp)]
    began = time.time()
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=120)
    return float(stamp.read_text()) - began


def measure(workers: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each start, by what started it."""
    seconds: dict[str, list[float]] = {"torchrun": [], "manyhosts run": []}
    names = list(seconds)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            seconds_to_first_step(name, workers, Path(folder))
        for turn in range(rounds):
            for name in names[turn % 2 :] + names[: turn % 2]:  # nobody always goes first
                seconds[name].append(seconds_to_first_step(name, workers, Path(folder)))
    return seconds


def ratio(seconds: dict[str, list[float]]) -> float:
    return statistics.median(seconds["manyhosts run"]) / statistics.median(seconds["torchrun"])


def report(seconds: dict[str, list[float]], workers: int) -> str:
    pairs = [ours / theirs for ours, theirs in zip(seconds["manyhosts run"], seconds["torchrun"], strict=True)]
    rows = [
        f"| `{name}` | {statistics.median(taken):.2f} s | {min(taken):.2f} s | {max(taken):.2f} s |"
        for name, taken in seconds.items()
    ]
    return f"""# From the command to the first training step

A plain DDP script on Gloo with {workers} workers, started by each in turn. From the start of the command until rank 0
has made its first optimizer step; n = {len(pairs)} each, after one warm-up.

| started by | median | least | most |
|---|---|---|---|
{rows[0]}
{rows[1]}

`manyhosts run` takes **{ratio(seconds):.2f}** of the time of torchrun; by round {min(pairs):.2f} to {max(pairs):.2f}.
torchrun loads torch once for itself and then once in every worker, and each worker loads `torch._dynamo` when it makes
its optimizer; here one fork server per host loads both, and the workers are forked from it.

{describe(Path(sys.executable), ["torch", "manyhosts"])}
Again: `python benchmarks/startup.py`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    REPORT.write_text(report(measure(asked.workers, asked.rounds), asked.workers))
    print(REPORT.read_text())


if __name__ == "__main__":
    main()
