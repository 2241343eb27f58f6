"""What BatchNorm over the batch of all workers costs against PyTorch's own, local one: two workers of this machine.

    python benchmarks/batch_norm.py > benchmarks/batch_norm.md

Steps of a small ResNet (19 BatchNorm layers) with `batch_norm="local"` and `"global"` take turns in the same two
processes, in blocks of steps: what else the machine does falls on both.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import describe
from torch import Tensor, nn

BLOCKS, STEPS = 8, 10
FEWEST_BLOCKS, SECONDS = 3, 75
"""On a busy machine there are fewer blocks, so that all is over in two minutes; the page says how many there were."""
WORKER = "MANYHOSTS_BENCHMARK_BATCH_NORM"


def block(channels: int, into: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, into, 3, stride, 1, bias=False),
        nn.BatchNorm2d(into),
        nn.ReLU(),
        nn.Conv2d(into, into, 3, 1, 1, bias=False),
        nn.BatchNorm2d(into),
    )


class Residual(nn.Module):
    def __init__(self, channels: int, into: int, stride: int) -> None:
        super().__init__()
        self.path = block(channels, into, stride)
        self.short = (
            nn.Identity()
            if channels == into and stride == 1
            else nn.Sequential(nn.Conv2d(channels, into, 1, stride, bias=False), nn.BatchNorm2d(into))
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.relu(self.path(x) + self.short(x))
        return out


def network() -> nn.Module:
    """A ResNet-18 of a quarter of its width, for pictures of 32 x 32."""
    widths = (16, 16, 32, 64, 128)
    blocks: list[nn.Module] = []
    for number in range(1, 5):
        blocks.append(Residual(widths[number - 1], widths[number], 1 if number == 1 else 2))
        blocks.append(Residual(widths[number], widths[number], 1))
    first = (nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def worker() -> None:
    from manyhosts.cluster.place import Place
    from manyhosts.communication.batch_norm import make_global
    from manyhosts.communication.shared_norm import OwnBatch, acting
    from manyhosts.communication.world import World

    world = World(Place.from_environment())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = network()
    batch = make_global(model, world)
    samples, targets = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(samples), targets).backward()
        flat = torch.cat([each.grad.view(-1) for each in model.parameters() if each.grad is not None])
        world.all_reduce(flat)
        optimizer.step()

    found: dict[str, list[float]] = {"local": [], "global": []}
    began, number = time.perf_counter(), 0
    while number <= FEWEST_BLOCKS or (number <= BLOCKS and world.agree(time.perf_counter() - began) < SECONDS):
        for name, acted in (("local", OwnBatch()), ("global", batch)):
            world.barrier()
            begin = time.perf_counter()
            with acting(acted):
                for _ in range(STEPS):
                    step()
            if number:  # the first block of each warms up
                found[name].append((time.perf_counter() - begin) / STEPS)
        number += 1
    if world.rank == 0:
        local, over_all = (1000 * statistics.median(found[name]) for name in ("local", "global"))
        ratios = sorted(one / other for one, other in zip(found["global"], found["local"], strict=True))
        print(f"{local:.2f} {over_all:.2f} {statistics.median(ratios):.3f} {ratios[0]:.3f} {ratios[-1]:.3f}")
        assert batch is not None
        print("shared memory" if batch.is_shared_memory else "Gloo")
        print(len(ratios))
    world.leave()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "manyhosts.cli.main", "run", "--workers", "2", "--no-prefix"]
        command += ["--run-dir", str(Path(folder) / "run"), "--env", f"{WORKER}=1", str(Path(__file__).absolute())]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    local, over_all, ratio, low, high = done.stdout.split("\n")[0].split()
    print("# BatchNorm over the batch of all workers\n")
    print("<!-- made by benchmarks/batch_norm.py -->\n")
    print(describe(Path(sys.executable), ["torch"]))
    way, blocks = done.stdout.split("\n")[1:3]
    print("\nTwo workers of this machine with one thread each, a ResNet-18 of a quarter of its width (20 BatchNorm")
    print(f"layers), 32 pictures of 32 x 32 for each; {blocks} blocks of {STEPS} steps each, taking turns.\n")
    print("| BatchNorm | a step |\n|---|---:|")
    print(f"| local, PyTorch's | {local} ms |")
    print(f"| over the batch of both workers, by {way} | {over_all} ms |")
    print(f"\nThe median block took {ratio} times as long as the local one beside it ({low} to {high}).")


if __name__ == "__main__":
    worker() if WORKER in os.environ else main()
