"""What does it cost a run that weights are compared across workers before each snapshot?

    python benchmarks/same_weights.py [--rounds 5]

Two workers here train a model of 81 numbers, and one of 25 million, with a snapshot every few steps; in every second
one the comparison is left out, from outside, so that both kinds happen in one run and meet the same machine. The cost
is the time that training spends in the comparison, on the worker that spends more, next to the default interval between
two snapshots. Beside it stands the time of a snapshot's call, with the comparison and without.
The answer is written to same_weights.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe

REPORT = Path(__file__).with_suffix(".md")
SIZES = {"tiny": (8, 1, 60), "25 million": (2900, 3, 8)}
"""Width, hidden layers and snapshots."""
INTERVAL_S = 600
"""The default: `every="10 min"`."""
WORKER = "SAME_WEIGHTS_BENCHMARK"


def train(width: int, layers: int, snapshots: int) -> None:
    """One worker: what each comparison and each save has taken, to a file of its own."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import manyhosts as mh
    from manyhosts.training.consistency import same_weights
    from manyhosts.training.state import snapshot_schedule

    times: dict[str, list[float]] = {"compared": [], "with": [], "without": []}
    compare, saved = same_weights.compare_weights, [0]

    def every_second_time(components: Any, moment: str) -> None:
        begin = time.perf_counter()
        if saved[0] % 2:
            compare(components, moment)
            times["compared"].append(time.perf_counter() - begin)

    save = snapshot_schedule.SnapshotSchedule.save

    def timed(self: Any, *arguments: Any, **named: Any) -> None:
        saved[0] += 1
        self.components.world.barrier()
        begin = time.perf_counter()
        save(self, *arguments, **named)
        times["with" if saved[0] % 2 else "without"].append(time.perf_counter() - begin)
        self.store.wait()  # so that nothing is written while the next one is measured

    snapshot_schedule.compare_weights = every_second_time  # type: ignore[attr-defined]
    snapshot_schedule.SnapshotSchedule.save = timed  # type: ignore[method-assign]
    middle = [each for _ in range(layers) for each in (nn.Linear(width, width), nn.ReLU())]
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(64, width), torch.randn(64, 1))
    trainer = mh.Trainer(
        model=lambda: nn.Sequential(*middle, nn.Linear(width, 1)),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        data=mh.Data(samples, batch_size=8),
        snapshots=mh.Snapshots(every="2 steps", keep=1),
    )
    trainer.fit(f"{2 * snapshots} steps")
    numbers = sum(each.numel() for each in trainer.model.parameters())
    Path(os.environ[WORKER], f"{os.environ['RANK']}.json").write_text(json.dumps({"numbers": numbers, **times}))


def measure(size: str) -> list[dict[str, Any]]:
    """One run of two workers: what each has written."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "manyhosts.cli.main", "run", "--workers", "2", "--run-dir", f"{folder}/run"]
        environment = os.environ | {WORKER: folder, "PYTHONUNBUFFERED": "1"}
        subprocess.run(
            [*command, __file__, "--size", size], env=environment, check=True, stdout=subprocess.DEVNULL, cwd=folder
        )
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1)]


def words(seconds: list[float]) -> str:
    """Median and spread in milliseconds."""
    return f"{statistics.median(seconds) * 1e3:.2f} ({min(seconds) * 1e3:.2f} - {max(seconds) * 1e3:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=SIZES)
    asked = parser.parse_args()
    if WORKER in os.environ:
        train(*SIZES[asked.size])
        return
    rows = []
    for size in SIZES:
        runs = [worker for _ in range(asked.rounds) for worker in measure(size)]
        compared = [seconds for worker in runs for seconds in worker["compared"][1:]]
        worst = max(statistics.median(worker["compared"][1:]) for worker in runs)
        saves = [[s for worker in runs for s in worker[kind][1:]] for kind in ("with", "without")]
        share = 100 * worst / INTERVAL_S
        rows.append(
            f"| {runs[0]['numbers']:,} | {len(compared)} | {words(compared)} | {share:.4f} | {words(saves[0])} | "
            f"{words(saves[1])} |"
        )
    machine = describe(Path(sys.executable), ["torch", "manyhosts"])
    REPORT.write_text(
        "# What comparing the workers' weights costs\n\n"
        "Written by `python benchmarks/same_weights.py`; its first lines say what is compared, and how.\n\n"
        f"{machine}\n{asked.rounds} rounds of two workers. Median (lowest - highest), without the first of each.\n\n"
        "| parameters | comparisons | one comparison, ms | % of a run with a snapshot every 10 min | "
        "a snapshot's call with it, ms | without it, ms |\n|---:|---:|---:|---:|---:|---:|\n"
        + "\n".join(rows)
        + "\n\n* The share is that of the slowest worker's median; the aim is below 0.5 %.\n"
    )


if __name__ == "__main__":
    main()
