"""What does a step of each strategy take in time, bytes and memory, and `fsdp` against a loop on FSDP2 by hand?

    python benchmarks/strategies.py [--rounds 7] [--steps 12] [--places host,lab]

Two workers train a small transformer: on this host, and on two hosts of a lab (root on Linux) whose cables carry
1 Gbit/s. The loop by hand is what PyTorch's tutorial of `fully_shard` writes: each block a unit, then the whole. All
have the same model, samples, optimizer and steps, and must end with the same loss. They take turns, each in fresh
processes, and nobody always goes first. Ours are strategies as a trainer calls them; what that adds is in overhead.md.

Wants a quiet machine, and takes some ten minutes there. The answer is written to strategies.md beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import describe

REPORT = Path(__file__).with_suffix(".md")
WARM_UP = 3
"""Steps that are not timed."""
BATCH, CONTEXT, CHARACTERS = 16, 64, 96
PLACES = {"host": "two workers of one host", "lab": "two hosts, 1 Gbit/s"}
HAND = "FSDP2 by hand"
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp, zero=3": ("fsdp", {"zero": 3}),
    "fsdp, zero=2": ("fsdp", {"zero": 2}),
    "fsdp, zero=1": ("fsdp", {"zero": 1}),
    "ddp": ("ddp", {}),
}
"""Names of strategies, and options."""


class Run:
    """One run of one contestant in one worker: what it trains, and what is seen of it."""

    def __init__(self, width: int, steps: int) -> None:
        import torch
        from torch import nn

        self.steps = WARM_UP + steps
        self.times: list[float] = []
        torch.manual_seed(0)
        layer: dict[str, Any] = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        blocks = nn.Sequential(*(nn.TransformerEncoderLayer(width, 4, **layer) for _ in range(4)))
        self.model = nn.Sequential(nn.Embedding(CHARACTERS, width), blocks, nn.Linear(width, CHARACTERS))
        self.text = torch.randint(0, CHARACTERS, (BATCH * self.steps, CONTEXT))
        self.size = sum(each.nbytes for each in self.model.parameters())
        self.held = 0
        self.sent: list[int] = []
        """What the interface had sent before the first step that is timed, and after the last."""

    def batch(self, step: int, rank: int, size: int) -> tuple[Any, Any]:
        """This worker's part of the batch of a step."""
        first = step * BATCH + rank * BATCH // size
        return self.text[first : first + BATCH // size], self.text[first : first + BATCH // size, 0]

    def loss(self, outputs: Any, targets: Any) -> Any:
        from torch import nn

        return nn.functional.cross_entropy(outputs.mean(1), targets)

    def optimizer(self, parameters: Any) -> Any:
        import torch

        made = torch.optim.AdamW(parameters, lr=1e-4)
        made.register_step_post_hook(lambda *_: self._after(made))
        return made

    def _after(self, optimizer: Any) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) in (WARM_UP, self.steps):
            self.sent.append(bytes_sent())
        if len(self.times) == WARM_UP:
            kept = [each for state in optimizer.state.values() for each in state.values()]
            own = [each for group in optimizer.param_groups for each in group["params"]]
            self.held = sum(_local(each).nbytes for each in [*own, *kept, *(each.grad for each in own)])


def bytes_sent() -> int:
    """What the interface that the workers talk over has sent since it is there."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    [line] = [each for each in lines if each.strip().startswith(os.environ["GLOO_SOCKET_IFNAME"] + ":")]
    return int(line.partition(":")[2].split()[8])


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def by_hand(run: Run, rank: int, size: int) -> float:
    """The loop that PyTorch's tutorial has. This worker's share of the loss of the last step."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    for block in run.model[1].children():
        fully_shard(block)
    fully_shard(run.model)
    optimizer = run.optimizer(run.model.parameters())
    for step in range(run.steps):
        inputs, targets = run.batch(step, rank, size)
        optimizer.zero_grad()
        loss = run.loss(run.model(inputs), targets)
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss.detach())
    return float(loss.detach()) / size


def by_strategy(name: str, run: Run, rank: int, size: int) -> float:
    """A strategy of ours, as a trainer calls it. The loss of the last step."""
    from manyhosts.cluster.place import Place
    from manyhosts.communication.world import World
    from manyhosts.config.strategies import named
    from manyhosts.strategies.strategy import Piece
    from manyhosts.strategies.table import STRATEGIES

    world = World(Place.from_environment())
    kind, options = OURS[name]
    strategy = STRATEGIES.load(kind)(dataclasses.replace(named(kind), **options), world)
    model = strategy.place(run.model)
    optimizer = run.optimizer(model.parameters())

    def compute(module: Any, piece: Piece) -> dict[str, Any]:
        inputs, targets = piece.batch
        return {"loss": run.loss(module(inputs), targets)}

    for step in range(run.steps):
        piece = Piece(partial(run.batch, step, rank, size), BATCH // size, 1 / size, (step, rank, 0))
        outcome = strategy.forward_backward(model, [piece], compute, lambda loss: loss, [0.0])
        strategy.update(model, optimizer)
    loss = float(outcome.values["loss"])
    world.barrier()
    return loss


def work(name: str, width: int, steps: int) -> None:
    """The life of a worker: one contestant. The leader's figures are the last line of the output."""
    import torch

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run = Run(width, steps)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = by_hand(run, rank, size) if name == HAND else by_strategy(name, run, rank, size)
    assert len(run.times) == run.steps, f"{name} made {len(run.times)} steps of {run.steps}"
    times = [later - earlier for earlier, later in pairwise(run.times[WARM_UP - 1 :])]
    sent = (run.sent[1] - run.sent[0]) / steps / (size if os.environ["GLOO_SOCKET_IFNAME"] == "lo" else 1)
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if rank == 0:
        figures = {"seconds": statistics.median(times), "sent": sent, "held": run.held, "peak": peak, "loss": loss}
        print(json.dumps(figures | {"parameters": run.size}), flush=True)
    os._exit(0)  # Gloo's destructors abort now and then in a process that has finished its work


Start = Callable[[int, list[str], dict[str, str]], "subprocess.Popen[str]"]


@contextmanager
def starting(place: str) -> Iterator[tuple[Start, str, str]]:
    """How a worker is started there by its rank, the first one's address, and the interface that they talk over."""
    if place == "host":
        yield (
            lambda rank, words, env: subprocess.Popen(words, env=os.environ | env, stdout=subprocess.PIPE, text=True),
            "127.0.0.1",
            "lo",
        )
        return
    from manyhosts.lab import lab

    with lab(2, bandwidth="1gbit", prefix="strat") as hosts:
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        yield (
            lambda rank, words, env: hosts[rank].start(words, env=path | env, stdout=subprocess.PIPE),
            hosts[0].address,
            "eth0",
        )


def measure(start: Start, address: str, interface: str, words: list[str]) -> dict[str, float]:
    """The figures of one contestant, by two workers."""
    with socket.socket() as probe:  # free here, and nobody listens on a lab's host
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    place |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": interface}
    workers = [start(rank, words, place | {"RANK": str(rank)}) for rank in range(2)]
    try:
        out, _ = workers[0].communicate(timeout=600)
        workers[1].communicate(timeout=60)
    finally:
        for worker in workers:
            worker.kill()
    if any(worker.returncode for worker in workers):
        raise SystemExit(f"{' '.join(words)} failed")
    found: dict[str, float] = json.loads(out.strip().splitlines()[-1])
    return found


def table(place: str, figures: dict[str, list[dict[str, float]]]) -> list[str]:
    """What was measured at one place."""
    hand = figures[HAND]
    lines = [
        "",
        f"## {PLACES[place][0].upper()}{PLACES[place][1:]}",
        "",
        f"n = {len(hand)} rounds; {hand[0]['parameters'] / 1e6:.1f} MB of parameters. Medians, with the lowest and the "
        "highest; a ratio is that to the loop by hand of the same round.",
        "",
        "| | step, ms | ratio | sent per step and worker, MB | kept between steps, MB | peak of memory, MB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, found in figures.items():
        ratios = [one["seconds"] / other["seconds"] for one, other in zip(found, hand, strict=True)]
        cells = [
            _spread([1e3 * each["seconds"] for each in found], 1),
            _spread(ratios, 3),
            *(f"{statistics.median(each[key] for each in found) / 1e6:.1f}" for key in ("sent", "held", "peak")),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12, help="steps of each run that are timed")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--places", default=",".join(PLACES), help="some of these")
    parser.add_argument("--output", type=Path, default=REPORT)
    parser.add_argument("--one", choices=[HAND, *OURS], help="be a worker; the benchmark starts them itself")
    asked = parser.parse_args()
    if asked.one:
        work(asked.one, asked.width, asked.steps)
    names = [HAND, *OURS]
    lines = ["# What a step of each strategy takes", "", *(__doc__ or "").split("\n\n")[2].splitlines(), ""]
    busy = f"When it began, {os.getloadavg()[1]:.1f} processes wanted the {os.cpu_count()} cores."
    lines += [describe(Path(sys.executable), ["torch"]), busy]
    for place in asked.places.split(","):
        figures: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        with starting(place) as how:
            for turn in range(asked.rounds):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:  # nobody always goes first
                    words = [sys.executable, str(Path(__file__).resolve()), "--one", name]
                    words += ["--width", str(asked.width), "--steps", str(asked.steps)]
                    figures[name].append(measure(*how, words))
                    print(place, turn + 1, name, figures[name][-1], flush=True)
        losses = {name: found[0]["loss"] for name, found in figures.items()}
        assert all(math.isclose(each, losses[HAND], rel_tol=1e-3) for each in losses.values()), f"they differ: {losses}"
        lines += table(place, figures)
    asked.output.write_text("\n".join(lines) + "\n")
    print(asked.output.read_text())


if __name__ == "__main__":
    main()
