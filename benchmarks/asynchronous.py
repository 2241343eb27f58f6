"""Four workers, one always at a quarter of the speed, or all with pauses at random: what do bounds and none give?

    python benchmarks/asynchronous.py [--rounds 3]

What a micro-batch takes is slept, so that this machine's other work falls on none of the workers. One slow: 50 ms on
three of them, 200 ms on the fourth. Pauses: 50 ms, and in one of ten, drawn for each worker apart, 400 ms more. In
step, a batch is one micro-batch for each worker; else 128 micro-batches are handed out between two meetings. Counted
are micro-batches per second after the first step, and the last validation loss within 20 s. All validate every 2 s,
whatever a step is, so that no way has more validations than another.

What is expected is computed, not fitted. In step, each step takes as long as the longest of four: with pauses
50 + 400 (1 - 0.9^4) = 188 ms. Under a bound and without one, the rule that the workers go by is run on drawn times.

The answer is written to asynchronous.md beside this file.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from machine import describe

REPORT = Path(__file__).with_suffix(".md")
WORKERS, SECONDS = 4, 20
WAYS: dict[str, tuple[int | None, int]] = {
    "in step (`staleness=0`)": (0, WORKERS),
    "bounded (`staleness=2`)": (2, 128),
    "no bound (`staleness=None`)": (None, 128),
}
"""The bound, and the micro-batches of a batch."""
KINDS = {"slow": "One worker always at a quarter of the speed", "pauses": "Pauses at random times"}
SCRIPT = """
import json, os, random, sys, time
import torch
from torch import nn
import manyhosts as mh

kind, seed, ways, seconds = json.loads(sys.argv[1])
rank = int(os.environ["RANK"])
torch.set_num_threads(1)
draw = torch.Generator().manual_seed(0)
inputs = torch.randn(4296, 64, generator=draw)
labels = (inputs @ torch.randn(64, 10, generator=draw)).argmax(dim=1)
parts = slice(4096), slice(4096, None)
train, validation = (torch.utils.data.TensorDataset(inputs[part], labels[part]) for part in parts)

def step(model, batch):
    if model.training:
        slept = 0.2 if kind == "slow" and rank == 3 else 0.05
        time.sleep(slept + 0.4 * (kind == "pauses" and chance.random() < 0.1))
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

for number, (bound, pieces) in [(-1, ways[0]), *enumerate(ways)]:  # the first start takes long, and is not counted
    chance = random.Random(f"{seed} {rank}")
    mh.Trainer(
        model=lambda: nn.Linear(64, 10),
        step=step,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02),
        data=mh.Data(train=train, validation=validation, batch_size=8 * pieces),
        micro_batch_size=8,
        validate_every="2 s",
        strategy=mh.ParameterServer(staleness=bound),
        run_dir=f"way-{number}",
    ).fit("2 steps" if number < 0 else f"{seconds + 4} s")
"""


def runs(kind: str, seed: int) -> list[tuple[float, float]]:
    """Of each way the micro-batches per second, and the loss."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        command = [str(Path(sys.executable).with_name("manyhosts")), "run", "--workers", str(WORKERS), "--no-prefix"]
        command += [str(script), json.dumps([kind, seed, list(WAYS.values()), SECONDS])]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return [read(Path(folder) / f"way-{number}", pieces) for number, (_, pieces) in enumerate(WAYS.values())]


def read(run_dir: Path, pieces: int) -> tuple[float, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ends = [line["time"] for line in lines if line["event"] == "step"]
    begin = next(line["time"] - line["seconds"] for line in lines if line["event"] == "step")
    validated = [line for line in lines if line["event"] == "validation" and line["time"] - begin <= SECONDS]
    return pieces * (len(ends) - 1) / (ends[-1] - ends[0]), validated[-1]["values"]["loss"]


def expected(kind: str, bound: int | None, pieces: int, steps: int = 400) -> float:
    """Micro-batches per second, where nothing but the slept times takes any."""
    chance = random.Random(0)

    def takes(worker: int) -> float:
        if kind == "slow":
            return 0.2 if worker == WORKERS - 1 else 0.05
        return 0.05 + 0.4 * (chance.random() < 0.1)

    return pieces * steps / sum(step_s(takes, bound, pieces) for _ in range(steps))


def step_s(takes: Callable[[int], float], bound: int | None, pieces: int) -> float:
    """How long a step takes: who is free and at most `bound` ahead of the slowest takes the next."""
    clocks, idle = [0] * WORKERS, list(range(WORKERS))
    computing: list[tuple[float, int]] = []
    now, taken = 0.0, 0
    while True:
        least = min(clocks)  # who waits is never the slowest; all compute until the last is taken
        for worker in [each for each in idle if bound is None or clocks[each] - least <= bound]:
            if taken < pieces:
                heapq.heappush(computing, (now + takes(worker), worker))
                idle.remove(worker)
                taken += 1
        if not computing:
            return now
        now, worker = heapq.heappop(computing)
        clocks[worker] += 1
        idle.append(worker)


def report(found: dict[str, list[list[tuple[float, float]]]], load: float) -> str:
    rows = ["# Four workers, one slow or all with pauses", ""]
    for kind, rounds in found.items():
        rows += [
            f"## {KINDS[kind]}",
            "",
            "| way | micro-batches per second | of in step | expected | loss after 20 s |",
        ]
        rows.append("|---|---|---|---|---|")
        in_step = statistics.median(each[0][0] for each in rounds)
        expected_in_step = expected(kind, *next(iter(WAYS.values())))
        for number, (name, way) in enumerate(WAYS.items()):
            rates, losses = ([each[number][what] for each in rounds] for what in (0, 1))
            rate, wanted = statistics.median(rates), expected(kind, *way)
            rows.append(
                f"| {name} | {rate:.1f} ({min(rates):.1f} to {max(rates):.1f}) | {rate / in_step:.2f} "
                f"| {wanted:.1f}, {wanted / expected_in_step:.2f} of in step "
                f"| {statistics.median(losses):.3f} ({min(losses):.3f} to {max(losses):.3f}) |"
            )
        rows.append("")
    rows += [
        f"Medians of n = {len(next(iter(found.values())))} runs each, by turns, with lowest and highest. The loss is",
        "that of the last validation within 20 s, in nats; all validate every 2 s. Expected is without exchange and",
        "other work.",
        f"The load of the machine was {load:.1f} when the benchmark began.",
        "",
        describe(Path(sys.executable), ("torch", "manyhosts")),
        "Again: `python benchmarks/asynchronous.py`.",
        "",
    ]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds, load = parser.parse_args().rounds, os.getloadavg()[0]
    found: dict[str, list[list[tuple[float, float]]]] = {kind: [] for kind in KINDS}
    for seed in range(rounds):
        for kind in KINDS:
            found[kind].append(runs(kind, seed))
            print(kind, found[kind][-1], flush=True)
        REPORT.write_text(report(found, load))


if __name__ == "__main__":
    main()
