"""How long does it take from the command to the first training step, against torchrun?

    python benchmarks/startup.py [--workers 2] [--rounds 9]

One plain DDP script on Gloo, written for torchrun, started by both in turn, and by `manyhosts run --warm`, whose fork
server stays from one run to the next. The clock runs from the start of the command until rank 0 has made its first
optimizer step. One warm-up of each, which fills the file cache and leaves that fork server, is not counted.
The answer is written to startup.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from machine import describe

REPORT = Path(__file__).with_suffix(".md")
BIN = Path(sys.executable).parent
OURS, WARM = "manyhosts run", "manyhosts run --warm"
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
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    warm = ["--warm"] if name == WARM else []
    return [str(BIN / "manyhosts"), "run", *warm, "--workers", str(workers), "--run-dir", str(folder / "run")]


def seconds_to_first_step(name: str, workers: int, folder: Path) -> float:
    script, stamp = folder / "first_step.py", folder / "stamp"
    script.write_text(SCRIPT)
    words = [*command(name, workers, folder), str(script), str(stamp)]
    began = time.time()
    environment = {**os.environ, "MANYHOSTS_WARM_S": "120"}
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=120, env=environment)
    return float(stamp.read_text()) - began


def measure(workers: int, rounds: int, names: Sequence[str] = ("torchrun", OURS, WARM)) -> dict[str, list[float]]:
    """Seconds of each start, by what started it."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            seconds_to_first_step(name, workers, Path(folder))
        for turn in range(rounds):
            for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:  # nobody always goes first
                seconds[name].append(seconds_to_first_step(name, workers, Path(folder)))
    return seconds


def ratio(seconds: dict[str, list[float]], name: str = OURS) -> float:
    return statistics.median(seconds[name]) / statistics.median(seconds["torchrun"])


def reported(seconds: dict[str, list[float]], name: str) -> str:
    """The ratio of the medians, and of the rounds."""
    pairs = [ours / theirs for ours, theirs in zip(seconds[name], seconds["torchrun"], strict=True)]
    return f"**{ratio(seconds, name):.2f}** of the time of torchrun; by round {min(pairs):.2f} to {max(pairs):.2f}"


def report(seconds: dict[str, list[float]], workers: int) -> str:
    rows = [
        f"| `{name}` | {statistics.median(taken):.2f} s | {min(taken):.2f} s | {max(taken):.2f} s |"
        for name, taken in seconds.items()
    ]
    return f"""# From the command to the first training step

A plain DDP script on Gloo with {workers} workers, started by each in turn. From the start of the command until rank 0
has made its first optimizer step; n = {len(seconds[OURS])} each, after one warm-up, by turns.

| started by | median | least | most |
|---|---|---|---|
{rows[0]}
{rows[1]}
{rows[2]}

`manyhosts run` takes {reported(seconds, OURS)}.
With `--warm`, from the second run on, it takes {reported(seconds, WARM)}.
torchrun loads torch once for itself and then once in every worker, and each worker loads `torch._dynamo` when it makes
its optimizer; here one fork server per host loads both, and the workers are forked from it.

{describe(Path(sys.executable), ["torch", "manyhosts"])} {os.getloadavg()[0]:.0f} processes wanted to run at the end.
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
