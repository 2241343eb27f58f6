"""Two nodes, one of half the speed: what do they give together, of the sum of what each gives alone?

    python benchmarks/uneven.py [--rounds 5]

Two nodes, rehearsed on this machine, one worker each. What a sample takes is slept, so that this machine's other
work falls on none of them: 2 ms on the one, 4 ms on the other. Each worker measures first what it gives alone, in
pieces of the same size. Then both train together, with equal parts, with shares by speed, and with the same of 12
virtual workers, by turns. Counted are all steps of a run, and those behind its first quarter, when shares were found.

Then backup workers are played: by what each of four steps at once took in busy processes of this machine.

The answer is written to uneven.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe

from manyhosts.data.cut import shared_out

REPORT = Path(__file__).with_suffix(".md")
EACH_S = {"0": 0.002, "1": 0.004}
BATCH, STEPS, PARTS = 48, 100, 12
WAYS: dict[str, dict[str, Any]] = {
    "equal parts": {},
    "`balance=speed`": {"balance": "speed"},
    "`balance=speed`, 12 virtual workers": {"balance": "speed", "virtual_workers": PARTS},
    "equal parts, 12 virtual workers": {"virtual_workers": PARTS},
}
SCRIPT = """
import json, os, sys, time
import torch
from torch import nn
import manyhosts as mh
from manyhosts.events import StepDone

each_s, asked, batch, steps = json.loads(sys.argv[1])
own_s = each_s[os.environ["GROUP_RANK"]]
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(960, 64, generator=torch.Generator().manual_seed(0)))

def step(model, batch):
    time.sleep(len(batch[0]) * own_s)
    return model(batch[0]).square().mean()

model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
begin = time.perf_counter()
for _ in range(20):
    optimizer.zero_grad()
    pieces = asked.get("virtual_workers", 2) // 2  # as many as it has of equal parts
    for _ in range(pieces):
        step(model, [torch.ones(batch // 2 // pieces, 64)]).backward()
    optimizer.step()
alone = 20 * (batch // 2) / (time.perf_counter() - begin)

ends = []
trainer = mh.Trainer(
    model=lambda: nn.Linear(64, 64),
    step=step,
    weight="samples",
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    data=mh.Data(train=data, batch_size=batch),
    listeners=[lambda event: ends.append(time.perf_counter()) if isinstance(event, StepDone) else None],
    **asked,
)
result = trainer.fit(f"{steps} steps")
print("ALONE", os.environ["GROUP_RANK"], alone, flush=True)
if trainer.is_main:
    quarter = len(ends) // 4
    whole = batch * (len(ends) - 1) / (ends[-1] - ends[0])
    late = batch * (len(ends) - 1 - quarter) / (ends[-1] - ends[quarter])
    print("TOGETHER", json.dumps({"whole": whole, "late": late, "sha": result.weights_sha256}), flush=True)
"""


def once(way: str, project: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="manyhosts-uneven-") as run_dir:
        asked = json.dumps([EACH_S, WAYS[way], BATCH, STEPS])
        words = ["run", "--warm", "--nodes", "2", "--workers-per-node", "1", "--run-dir", run_dir]
        subprocess.run(
            [sys.executable, "-P", "-m", "manyhosts.cli.main", *words, "uneven_nodes.py", asked],
            cwd=project,
            check=True,
            capture_output=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MANYHOSTS_WARM_S": "30"},
        )
        said = "".join(path.read_text() for path in Path(run_dir, "logs").glob("*.log")).splitlines()
    alone = {line.split()[1]: float(line.split()[2]) for line in said if line.startswith("ALONE")}
    [together] = [json.loads(line.partition(" ")[2]) for line in said if line.startswith("TOGETHER")]
    return {**together, "alone": sum(alone.values())}


def measure(rounds: int) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    ways = list(WAYS)
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        (project / "uneven_nodes.py").write_text(SCRIPT)
        for turn in range(rounds):
            for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                found[way].append(once(way, project))
    return found


BUSY = """
import sys, time
import torch
torch.set_num_threads(1)
inputs, weights = torch.randn(256, 512), torch.randn(512, 512)
for _ in range(200):
    begin = time.perf_counter()
    for _ in range(2):
        torch.relu(inputs @ weights)
    print(time.perf_counter() - begin)
"""


def spreads() -> list[list[float]]:
    """What the same work took, again and again, in four processes at once: rows are workers."""
    started = [
        subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True, env={**os.environ})
        for _ in range(4)
    ]
    return [[float(line) for line in process.communicate()[0].split()][50:] for process in started]


def played(rows: list[list[float]], slow: float, steps: int = 4000) -> dict[str, float]:
    """Mean seconds of a step of workers whose times are drawn from `rows`, the last one's `slow` times as long.

    With backups a worker that is done computes the part of the next one, unless that is there, and whichever is first
    counts. Nothing that was begun can be broken off: a backward pass is one call. So who is late begins the next late.
    """
    draw, size = random.Random(0), len(rows)
    factors = [1.0] * (size - 1) + [slow]
    usual = [statistics.fmean(row) * factor for row, factor in zip(rows, factors, strict=True)]
    shares = [share * size / 96 for share in shared_out(96, usual)]

    def took() -> list[float]:
        return [draw.choice(row) * factor for row, factor in zip(rows, factors, strict=True)]

    equal = by_speed = begin = 0.0
    free = [0.0] * size
    for _ in range(steps):
        first, second = took(), took()
        equal += max(first)
        by_speed += max(share * each for share, each in zip(shares, first, strict=True))
        done = [max(begin, free[rank]) + first[rank] for rank in range(size)]
        free, end = list(done), list(done)
        for rank in sorted(range(size), key=lambda rank: done[rank]):
            part = (rank + 1) % size
            if end[part] > done[rank]:
                free[rank] = done[rank] + second[rank]
                end[part] = min(end[part], free[rank])
        begin = max(end)
    return {"equal parts": equal / steps, "shares by speed": by_speed / steps, "backup workers": begin / steps}


def report(found: dict[str, list[dict[str, Any]]], plays: list[dict[str, float]], tail: float) -> str:
    rows = []
    for way, runs in found.items():
        whole, late = ([run[name] / run["alone"] for run in runs] for name in ("whole", "late"))
        rows.append(f"| {way} | {spread(late)} | {spread(whole)} |")
    same = {run["sha"] for way, runs in found.items() if "virtual" in way for run in runs}
    bits = "equal bits in every run" if len(same) == 1 else f"{len(same)} DIFFERENT results"
    base = [play["shares by speed"] for play in plays]
    played_rows = "\n".join(
        f"| {name} | " + " | ".join(f"{play[name] / own:.2f}" for play, own in zip(plays, base, strict=True)) + " |"
        for name in plays[0]
    )
    return f"""# Two nodes, one of half the speed

Two nodes, rehearsed on one machine, with one worker each; a sample takes 2 ms on the one and 4 ms on the other, which
is slept. A batch has {BATCH} samples, a run {STEPS} steps. Samples per second of both together, as a share of the sum
of what each gave alone in the same run: once shares were found (behind the first quarter of the steps), and over the
whole run. The median of n = {len(next(iter(found.values())))} runs each, by turns, with the lowest and the highest.

| way | once found | whole run |
|---|---|---|
{chr(10).join(rows)}

With virtual workers: {bits}, with equal parts and with parts that moved.

## Backup workers

Played, not built: four workers whose times are drawn from what the same work took in four processes of this machine
at once, which had other work to do, too: the highest twentieth of them begins at {tail:.1f} times the median. The last
worker takes as long as the others, twice, or four times as long. A worker that is done computes the part of the next
one, and whichever is there first counts; nothing that was begun can be broken off. Mean time of a step, of that with
shares by speed:

| | all alike | one of half the speed | one of a quarter |
|---|---|---|---|
{played_rows}

{describe(Path(sys.executable), ["torch", "manyhosts"])} {os.getloadavg()[0]:.0f} processes wanted to run at the end.
Again: `python benchmarks/uneven.py`.
"""


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    begin = time.perf_counter()
    measured = spreads()
    tail = statistics.median(statistics.quantiles(row, n=20)[-1] / statistics.median(row) for row in measured)
    plays = [played(measured, slow) for slow in (1.0, 2.0, 4.0)]
    REPORT.write_text(report(measure(parser.parse_args().rounds), plays, tail))
    print(REPORT.read_text(), f"\n({time.perf_counter() - begin:.0f} s)")


if __name__ == "__main__":
    main()
