"""Four workers, one permanently at a quarter of the speed: what do servers give without a bound, with one, and in step?

    python benchmarks/asynchronous.py [--rounds 3]

What a micro-batch takes is slept, so that this machine's other work falls on none of the workers: 50 ms on three of
them, 200 ms on the fourth. In step, a batch is one micro-batch for each worker; else 128 micro-batches are handed out
between two meetings. Counted are micro-batches per second behind the first step. The four could give 3.25 times what
one fast worker does, and in step they give as much as one fast worker.

The answer is written to asynchronous.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe

REPORT = Path(__file__).with_suffix(".md")
SAMPLES, PIECE = 4096, 8
WAYS: dict[str, tuple[int | None, int, int]] = {
    "in step (`staleness=0`)": (0, 4, 30),
    "bounded (`staleness=2`)": (2, 128, 3),
    "no bound (`staleness=None`)": (None, 128, 6),
}
"""The bound, the micro-batches of a batch, and the steps of a run."""
SCRIPT = """
import json, os, sys, time
import torch
from torch import nn
import manyhosts as mh
from manyhosts.events import StepDone

bound, pieces, steps, piece, samples = json.loads(sys.argv[1])
own_s = 0.2 if os.environ["RANK"] == "3" else 0.05
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(samples, 64, generator=torch.Generator().manual_seed(0)))

def step(model, batch):
    if model.training:
        time.sleep(own_s * len(batch[0]) / piece)
    return model(batch[0]).square().mean()

ends = []
trainer = mh.Trainer(
    model=lambda: nn.Linear(64, 64),
    step=step,
    weight="samples",
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    data=mh.Data(train=data, batch_size=piece * pieces),
    micro_batch_size=piece,
    strategy=mh.ParameterServer(staleness=bound),
    listeners=[lambda event: ends.append(time.perf_counter()) if isinstance(event, StepDone) else None],
)
trainer.fit(f"{steps} steps")
if os.environ["RANK"] == "0":
    print("RATE", pieces * (len(ends) - 1) / (ends[-1] - ends[0]), flush=True)
"""


def rate(way: tuple[int | None, int, int]) -> float:
    """Micro-batches per second of one run."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        command = [str(Path(sys.executable).with_name("manyhosts")), "run", "--workers", "4", "--no-prefix"]
        command += ["--run-dir", str(Path(folder) / "run"), str(script), json.dumps([*way, PIECE, SAMPLES])]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("RATE")]
    assert found, done.stdout + done.stderr
    return float(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    load = os.getloadavg()[0]
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            found[name].append(rate(way))
            print(name, found[name][-1], flush=True)
    REPORT.write_text(report(found, load))


def report(found: dict[str, list[float]], load: float) -> str:
    in_step = statistics.median(next(iter(found.values())))
    rows = []
    for name, rates in found.items():
        ratio: Any = statistics.median(rates) / in_step
        low, high = min(rates), max(rates)
        rows.append(f"| {name} | {statistics.median(rates):.1f} ({low:.1f} to {high:.1f}) | {ratio:.2f} |")
    n = len(next(iter(found.values())))
    return "\n".join(
        [
            "# Four workers, one at a quarter of the speed",
            "",
            "A micro-batch takes 50 ms on three workers and 200 ms on the fourth, which is slept. Micro-batches per",
            f"second behind the first step: the median of n = {n} runs each, by turns, with lowest and highest.",
            "What four such workers could give is 65 per second, 3.25 times the first row's 20.",
            "",
            "| way | micro-batches per second | of the first row |",
            "|---|---|---|",
            *rows,
            "",
            f"The machine had other work to do: its load was {load:.0f} when the benchmark began.",
            "",
            describe(Path(sys.executable), ("torch", "manyhosts")),
            "Again: `python benchmarks/asynchronous.py`.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
