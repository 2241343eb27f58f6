"""Do the stages of a pipeline wait as long as theory says, and is a step as fast as its cut lets one expect?

    python benchmarks/strategies_pipeline.py [--steps 4] [--unit 0.15]

Each block sleeps: a unit in the forward pass, one for the gradient of what it is given and one for that of its weight,
so that two cores carry four stages. Workers are processes of this host, and train as any script does; from when their
model is made they run before all else that the machine does, where the system lets them (as root on Linux). What they
have waited is what the run itself says at its end; next to it is what theory says of the schedule, with messages that
take no time. Each share is that of all stages, and n is the steps behind the first.

The uneven model has one block that sleeps eight times as long as each of the others. It is cut by layers and by
measured time; the step that is expected of a cut is found by playing its passes through with the sleeps alone.

The answer is written to strategies_pipeline.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from machine import describe
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.config.stage_order import even_cuts, loads, order_of, seconds_of, stage_costs

REPORT = Path(__file__).with_suffix(".md")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
SIZES = ((2, 4), (2, 8), (4, 4), (4, 8))
"""Stages that wait for each other, each on a worker, and micro-batches."""
UNEVEN = ((2, (8.0, *[1.0] * 7)), (4, (1.0, 1.0, 1.0, 8.0, *[1.0] * 8)))
"""Workers, and what each block costs."""
UNEVEN_MICRO_BATCHES = 12


class _Asleep(torch.autograd.Function):
    """Passes on what it is given, and sleeps before it passes on the gradient."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """A linear layer whose passes take as long as they are told."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, given: Tensor) -> Tensor:
        time.sleep(self.seconds)
        weight: Tensor = _Asleep.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call]
        made: Tensor = _Asleep.apply(nn.functional.linear(given, weight), self.seconds)  # type: ignore[no-untyped-call]
        return made


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One run."""

    workers: int
    micro_batches: int
    steps: int
    strategy: mh.Pipeline
    costs: Sequence[float] = field(default=())
    """Seconds of each pass of each block."""


def train(asked: Asked, folder: Path) -> None:
    """The life of a worker."""
    count = asked.micro_batches * (1 + asked.steps)
    begins: list[float] = []

    def model() -> nn.Module:
        take_precedence()  # before its blocks are timed
        return nn.Sequential(*(Sleeper(each) for each in asked.costs))

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.01)
        made.register_step_post_hook(lambda *_: begins.append(time.perf_counter()))
        return made

    trainer = mh.Trainer(
        model=model,
        loss=nn.MSELoss(),
        optimizer=optimizer,
        data=mh.Data(train=TensorDataset(torch.randn(count, 4), torch.randn(count, 4)), batch_size=asked.micro_batches),
        strategy=asked.strategy,
        micro_batch_size=1,
        snapshots=mh.Snapshots(every="1000 epochs"),
        run_dir=str(folder / "run"),
    )
    trainer.fit(f"{1 + asked.steps} steps")
    if os.environ["RANK"] == "0":
        (folder / "steps.json").write_text(json.dumps(begins))


def take_precedence() -> bool:
    """Have the threads of this process run before all others, where the system lets it. They sleep most of the time."""
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
    except (AttributeError, OSError):
        return False
    return True


@dataclass(frozen=True)
class Found:
    """What a run has shown."""

    seconds: list[float]
    """Of each step behind the first, from update to update."""
    waited: list[float]
    """The share of each stage, as the run says."""
    theory: float
    begins: list[str]
    """Of the stages."""


def run(asked: Asked) -> Found:
    """Train with workers of their own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        children = [_child(lambda: train(asked, folder), rank, asked.workers, port) for rank in range(asked.workers)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert not any(codes), f"workers ended with {codes}"
        times = json.loads((folder / "steps.json").read_text())
        told = (folder / "run" / "metrics.jsonl").read_text()
    waited = re.search(r"the stages waited ([\d %,.]+) of .* it would be ([\d.]+) %", told)
    stages = re.search(r"which begin with ([^\"(]+)", told)
    assert waited, told
    assert stages, told
    return Found(
        [later - earlier for earlier, later in pairwise(times)],
        [float(each) / 100 for each in re.findall(r"[\d.]+", waited.group(1))],
        float(waited.group(2)) / 100,
        [each.strip() for each in stages.group(1).split(",")],
    )


def _child(work: Callable[[], None], rank: int, count: int, port: int) -> int:
    """Fork a worker: torch is there already."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        torch.set_num_threads(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        if rank == 0 and code == 0:
            time.sleep(0.5)  # the store lives here: let the others finish with it
        os._exit(code)


def bubbles(unit: float, steps: int) -> list[str]:
    """A table of what stages wait."""
    lines = [
        "| workers | micro-batches | schedule | waited | in theory | apart | each stage | step, ms | in theory |",
        "|---:|---:|---|---:|---:|---:|---|---:|---:|",
    ]
    for workers, micro_batches in SIZES:
        for schedule in SCHEDULES:
            each_has = 2 if schedule == "interleaved" else 1
            asked = Asked(
                workers=workers,
                micro_batches=micro_batches,
                steps=steps,
                strategy=mh.Pipeline(schedule=schedule, cuts="layers"),
                costs=[unit / each_has] * workers * each_has,
            )
            found = run(asked)
            share, busy = statistics.mean(found.waited), 3 * unit * micro_batches
            stages = ", ".join(f"{100 * each:.1f}" for each in found.waited)
            lines.append(
                f"| {workers} | {micro_batches} | {schedule} | {100 * share:.1f} % | {100 * found.theory:.1f} % "
                f"| {100 * (share / found.theory - 1):+.1f} % | {stages} "
                f"| {1e3 * statistics.median(found.seconds):.0f} | {1e3 * busy / (1 - found.theory):.0f} |"
            )
            print(lines[-1], flush=True)
    return lines


def uneven(unit: float, steps: int) -> list[str]:
    """A table of how an uneven model is cut."""
    lines = [
        "| workers | cut | first blocks of stages | slowest stage | best of all cuts | step, ms | expected | apart |",
        "|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    for workers, costs in UNEVEN:
        order = order_of("1f1b", workers=workers, virtual_stages=1, micro_batches=UNEVEN_MICRO_BATCHES)
        blocks = len(costs)
        every = ([0, *inner, blocks] for inner in combinations(range(1, blocks), workers - 1))
        best = min(max(loads([*costs], cuts)) for cuts in every)
        asked = Asked(
            workers=workers,
            micro_batches=UNEVEN_MICRO_BATCHES,
            steps=steps,
            strategy=mh.Pipeline(cuts="layers"),
            costs=[unit * each for each in costs],
        )
        times = []
        for cut in ("layers", "measured"):
            found = run(replace(asked, strategy=mh.Pipeline(cuts=cut)))
            cuts = [*map(int, found.begins), blocks]
            assert cut != "layers" or cuts == even_cuts(blocks, workers), f"cut at {cuts}"
            stages, seconds = loads([*costs], cuts), statistics.median(found.seconds)
            expected = unit * seconds_of(order, stage_costs(order, stages, [2 * each for each in stages]))
            times.append((seconds, expected))
            lines.append(
                f"| {workers} | {cut} | {', '.join(found.begins)} | {max(stages):g} | {best:g} | {1e3 * seconds:.0f} "
                f"| {1e3 * expected:.0f} | {100 * (seconds / expected - 1):+.1f} % |"
            )
            print(lines[-1], flush=True)
        (by_layers, one), (measured, other) = times
        lines[-1] += (
            f"\n| {workers} | measured against layers | | | | {100 * (by_layers / measured - 1):.1f} % faster | "
        )
        lines[-1] += f"{100 * (one / other - 1):.1f} % | |"
    return lines


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="that are counted, behind the first")
    parser.add_argument("--unit", type=float, default=0.15, help="seconds that a pass sleeps")
    asked = parser.parse_args()
    load = f"When it began, {os.getloadavg()[0]:.1f} processes wanted the {os.cpu_count()} cores."
    waits, cuts = bubbles(asked.unit, asked.steps), uneven(asked.unit / 8, asked.steps)
    words = (__doc__ or "").split("\n\n")
    page = [
        "# How long the stages of a pipeline wait",
        "",
        *words[2].splitlines(),
        "",
        f"{describe(Path(sys.executable), ['torch'])} {load} n = {asked.steps} steps; a unit is "
        f"{1e3 * asked.unit:.0f} ms.",
        "",
        *waits,
        "",
        "## A model with one block of eight times the others'",
        "",
        *words[3].splitlines(),
        "",
        *cuts,
    ]
    REPORT.write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
