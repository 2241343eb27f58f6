"""How long do the others stand still when a worker is killed, under ddp and where several workers make one copy?

    python benchmarks/replicas.py --turns 3 --kills 10

Four workers on this machine train a small model (4 blocks of 64 x 64, batches of 32, 10 ms of pause in each step), by
turns under `ddp` with `virtual_workers=4`, as a pipeline of two stages in two copies, in parts of halves in two copies,
and with each layer cut in halves in two copies. One worker after another, drawn by chance, gets SIGKILL, each when all
four train again. Measured from there to the end of the others' next step, and to when all four train; the weights are
compared with those of one process to which nothing happened, trained for as many steps.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import describe

import manyhosts as mh
from manyhosts.records.line_file import read_lines

REPORT = Path(__file__).with_suffix(".md")
WAYS = {
    "`ddp`, virtual_workers=4": "strategy=mh.DDP(), virtual_workers=4",
    "`pipeline`, 2 stages x 2 copies": "strategy=mh.Pipeline(stages=2), micro_batch_size=8",
    "`fsdp`, 2 parts x 2 copies": "strategy=mh.FSDP(shard=2)",
    "`tensor`, 2 parts of each layer x 2 copies": "strategy=mh.Tensor(size=2)",
}
WAIT_S = 300.0
SCRIPT = """
import os, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh

Path(os.environ["PIDS"], str(os.getpid())).touch()


class Pause(mh.Callback):
    name = "pause"

    def after_step(self, moment):
        time.sleep(float(os.environ["PAUSE"]))


def block():
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh())


draw = torch.Generator().manual_seed(1)
given = torch.randn(640, 64, generator=draw)
trainer = mh.Trainer(
    model=lambda: nn.Sequential(block(), block(), block(), block()),
    loss=nn.MSELoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    data=mh.Data(train=TensorDataset(given, given.roll(1, 1).tanh()), batch_size=32),
    callbacks=[Pause()],
    OPTIONS,
)
trainer.fit(os.environ["STEPS"])
"""


class Run:
    """One training, whose workers are killed."""

    def __init__(self, folder: Path, options: str, workers: int, steps: int, pause_s: float) -> None:
        folder.mkdir()
        self.run_dir, self.pids = folder / "run", folder / "pids"
        self.pids.mkdir()
        (folder / "train.py").write_text(SCRIPT.replace("OPTIONS", options))
        words = ["run", "--workers", str(workers), "--run-dir", str(self.run_dir), str(folder / "train.py")]
        variables = {"PIDS": str(self.pids), "STEPS": f"{steps} steps", "PAUSE": str(pause_s), "OMP_NUM_THREADS": "1"}
        with (folder / "output.log").open("w") as log:
            self.command = subprocess.Popen(
                [sys.executable, "-P", "-m", "manyhosts.cli.main", *words],
                env=os.environ | variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def lines(self) -> list[dict[str, Any]]:
        """The record, as far as it is written."""
        return list(read_lines(self.run_dir / "metrics.jsonl"))

    def wait_for(self, kind: str, *, after: int = 0, text: str = "") -> tuple[int, dict[str, Any]]:
        """The number of the first such line from line `after` on, and the line."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            has_ended = self.command.poll() is not None
            for number, line in enumerate(self.lines()[after:], start=after):
                if line["event"] == kind and text in line.get("text", ""):
                    return number, line
            if has_ended:
                break
            time.sleep(0.02)
        raise SystemExit(f"no line {kind!r} after line {after} of {self.run_dir}")

    def kill(self, draw: random.Random) -> tuple[float, float]:
        """SIGKILL to a worker: seconds to the others' next step, and until all train."""
        before = len(self.lines())
        alive = [pid for pid in (int(path.name) for path in self.pids.iterdir()) if _lives(pid)]
        killed = time.time()
        os.kill(draw.choice(alive), signal.SIGKILL)
        found, restart = self.wait_for("restart", after=before)
        _, step = self.wait_for("step", after=found + 1)
        if "with 4 workers" in restart["how"]:  # the new one came before the others had gone on
            return step["time"] - killed, step["time"] - killed
        back, _ = self.wait_for("note", after=found + 1, text="continues with 4 workers")
        _, joined = self.wait_for("step", after=back + 1)
        return step["time"] - killed, joined["time"] - killed

    def end(self, *, early: bool = False) -> tuple[int, dict[str, torch.Tensor]]:
        """How many steps it has made, and its weights, once it has come to its end. `early`: it is asked to stop."""
        if early:
            self.command.send_signal(signal.SIGTERM)
        self.command.wait(timeout=WAIT_S)
        _, line = self.wait_for("end")
        if line["status"] != ("interrupted" if early else "completed"):
            raise SystemExit(f"the run in {self.run_dir} has failed: see output.log next to it")
        weights: dict[str, torch.Tensor] = mh.load(self.run_dir, weights="last")
        return line["step"], weights


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def killed(folder: Path, options: str, kills: int, draw: random.Random) -> Iterator[tuple[float, float]]:
    """The times of each kill. The run ends with the weights of one process, or this benchmark does."""
    run = Run(folder / "killed", options, 4, 1_000_000, 0.01)
    run.wait_for("step")
    for _ in range(kills):
        time.sleep(draw.uniform(0.2, 0.5))
        yield run.kill(draw)
    steps, found = run.end(early=True)
    _, alone = Run(folder / "alone", "strategy=mh.DDP()", 1, steps, 0.0).end()
    for name, weight in alone.items():
        away = ((weight - found[name]).abs().max() / weight.abs().max()).item()
        if away > 1e-5:
            raise SystemExit(f"{name} is away by {away:.2g} of its largest number: {folder}")


def spread(values: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kills", type=int, default=10)
    asked = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(asked.turns):
            for number, (name, options) in enumerate(WAYS.items()):
                place = Path(folder) / f"{turn}-{number}"
                place.mkdir()
                found[name] += killed(place, options, asked.kills, random.Random(turn))
                print(turn, name, [f"{step:.2f} {back:.2f}" for step, back in found[name]], flush=True)
    rows = [
        f"| {name} | {spread([step for step, _ in times])} | {spread([back for _, back in times])} | {len(times)} |"
        for name, times in found.items()
    ]
    REPORT.write_text(
        "# A worker is killed where several make one copy of a model\n\n"
        "Made by `python benchmarks/replicas.py`, whose head says what is measured. Each run ended with the\n"
        "weights of one process, within 1e-5 of each tensor's largest number. Seconds: median (least to most).\n\n"
        f"{describe(Path(sys.executable), ['torch'])}\n\n"
        "| four workers | to the others' next step | until all four train | n |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    main()
