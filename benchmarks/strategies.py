"""What does a step of each strategy take in time, bytes and memory, and against a loop in plain PyTorch that does it?

    python benchmarks/strategies.py [--rounds 7] [--steps 12] [--places host,lab] [--ways ddp,fsdp,pipeline,tensor]

Two workers (of `fsdp+tensor` four) train a small transformer: on this host, and on as many hosts of a lab (root on
Linux) whose cables carry 1 Gbit/s. The loops by hand are what PyTorch's tutorials write: `DistributedDataParallel`;
`fully_shard` of each block, then of all of the model; `PipelineStage` with a schedule, of 4 micro-batches;
`parallelize_module` with the plan that `tensor` finds; both of these over a mesh. All have the same model, cut at the
same places, samples, optimizer and steps, and must end with the same loss. They take turns, each in fresh processes,
and none always goes first. Ours are strategies as a trainer calls them; what that adds is in overhead.md.

Wants a quiet machine, and takes some ten minutes there for each way; with `--rounds 3 --steps 8 --places host` some
five minutes for all of them. The answer is written to strategies.md beside this
file, in the place of what that page has of the same ways and places.
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
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from machine import describe

REPORT = Path(__file__).with_suffix(".md")
WARM_UP = 3
"""Steps that are not timed."""
BATCH, CONTEXT, CHARACTERS = 16, 64, 96
PLACES = {"host": "{} workers of one host", "lab": "{} hosts, 1 Gbit/s"}
MICRO_BATCHES = 4
DISTRIBUTED = "DistributedDataParallel"
FSDP2, ONE_F_ONE_B, GPIPE, PARALLELIZE = "FSDP2 by hand", "Schedule1F1B", "ScheduleGPipe", "parallelize_module"
BOTH = "parallelize_module and FSDP2 by hand"
WAYS: dict[str, dict[str, tuple[str, ...]]] = {
    "ddp": {DISTRIBUTED: ("ddp",)},
    "fsdp": {FSDP2: ("fsdp, zero=3", "fsdp, zero=2", "fsdp, zero=1")},
    "pipeline": {ONE_F_ONE_B: ("pipeline, 1f1b",), GPIPE: ("pipeline, gpipe",)},
    "tensor": {PARALLELIZE: ("tensor",)},
    "fsdp+tensor": {BOTH: ("fsdp+tensor",)},
}
"""Loops by hand, and what is compared with each."""
WORKERS = {"fsdp+tensor": (4, "four")}
"""Of a way that needs more than two."""
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp, zero=3": ("fsdp", {"zero": 3}),
    "fsdp, zero=2": ("fsdp", {"zero": 2}),
    "fsdp, zero=1": ("fsdp", {"zero": 1}),
    "ddp": ("ddp", {}),
    "pipeline, 1f1b": ("pipeline", {"schedule": "1f1b", "cuts": "layers"}),
    "pipeline, gpipe": ("pipeline", {"schedule": "gpipe", "cuts": "layers"}),
    "tensor": ("tensor", {}),
    "fsdp+tensor": ("fsdp+tensor", {"shard": 2, "size": 2}),
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
        blocks = nn.Sequential(*(make_block(width) for _ in range(4)))
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

        return torch.optim.AdamW(parameters, lr=1e-4)

    def after(self, optimizer: Any) -> None:
        """A step is over. No hook of the optimizer: of one that has some, strategies of parts watch each operation."""
        self.times.append(time.perf_counter())
        if len(self.times) in (WARM_UP, self.steps):
            self.sent.append(bytes_sent())
        if len(self.times) == WARM_UP:
            kept = [each for state in optimizer.state.values() for each in state.values()]
            own = [each for group in optimizer.param_groups for each in group["params"] if not each.is_meta]
            self.held = sum(_local(each).nbytes for each in [*own, *kept, *(each.grad for each in own)])


def make_block(width: int) -> Any:
    """A block of a transformer, whose layers all are called, so that each can be cut."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, given: Any) -> Any:
            normed = self.before(given)
            heads = [
                each(normed).unflatten(-1, (-1, width // 4)).transpose(1, 2)
                for each in (self.query, self.key, self.value)
            ]
            mixed = nn.functional.scaled_dot_product_attention(*heads)
            given = given + self.out(mixed.transpose(1, 2).flatten(2))
            return given + self.down(torch.relu(self.up(self.between(given))))

    return Block()


def bytes_sent() -> int:
    """What the interface that the workers talk over has sent since it is there."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    [line] = [each for each in lines if each.strip().startswith(os.environ["GLOO_SOCKET_IFNAME"] + ":")]
    return int(line.partition(":")[2].split()[8])


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def distributed(run: Run, rank: int, size: int) -> float:
    """The loop that PyTorch's tutorial has. The loss of the last step."""
    from torch import nn

    return _of_own_samples(run, nn.parallel.DistributedDataParallel(run.model), rank, size)


def fully_sharded(run: Run, rank: int, size: int) -> float:
    """The same where parameters lie in parts."""
    _put_into_parts(run, None)
    return _of_own_samples(run, run.model, rank, size)


def _put_into_parts(run: Run, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in run.model[1].children():
        fully_shard(block, mesh=mesh)
    fully_shard(run.model, mesh=mesh)


def _of_own_samples(run: Run, model: Any, rank: int, size: int) -> float:
    import torch.distributed as dist

    optimizer = run.optimizer(model.parameters())
    for step in range(run.steps):
        inputs, targets = run.batch(step, rank, size)
        optimizer.zero_grad()
        loss = run.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        run.after(optimizer)
    dist.all_reduce(loss.detach())
    return float(loss.detach()) / dist.get_world_size()


def pipelined(kind: str, run: Run, rank: int, size: int) -> float:
    """The same of pipelining, with as many blocks on each worker."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import pipelining

    first, blocks, last = run.model.children()
    chain = [first, *blocks.children(), last]
    own = nn.Sequential(*chain[rank * len(chain) // size : (rank + 1) * len(chain) // size])
    stage = pipelining.PipelineStage(own, rank, size, torch.device("cpu"))
    schedule = getattr(pipelining, kind)(stage, MICRO_BATCHES, loss_fn=run.loss)
    optimizer = run.optimizer(own.parameters())
    found = torch.zeros(1)
    for step in range(run.steps):
        inputs, targets = run.batch(step, 0, 1)
        losses: list[Any] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
            found[0] = torch.stack(losses).detach().mean()
        optimizer.step()
        run.after(optimizer)
    dist.broadcast(found, src=size - 1)
    return float(found)


def parallelized(run: Run, rank: int, size: int) -> float:
    """The same of tensor parallelism, with the layers cut that ours finds."""
    from torch.distributed.device_mesh import init_device_mesh

    _cut_layers(run, init_device_mesh("cpu", (size,)))
    optimizer = run.optimizer(run.model.parameters())
    for step in range(run.steps):
        inputs, targets = run.batch(step, 0, 1)
        optimizer.zero_grad()
        loss = run.loss(run.model(inputs), targets)
        loss.backward()
        optimizer.step()
        run.after(optimizer)
    return float(loss.detach())


def both(run: Run, rank: int, size: int) -> float:
    """The same where pairs cut layers, whose parts are kept in parts."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("shard", "tensor"))
    _cut_layers(run, mesh["tensor"])
    _put_into_parts(run, mesh["shard"])
    return _of_own_samples(run, run.model, rank // 2, size // 2)


def _cut_layers(run: Run, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {
        "0": RowwiseParallel(input_layouts=Replicate()),
        **{f"1.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")},
        **{f"1.*.{name}": RowwiseParallel() for name in ("out", "down")},
        "2": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(run.model, mesh, plan)


class Compute:
    """Model and loss, as a trainer gives them to a strategy: together, or apart."""

    context = nullcontext

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, module: Any, piece: Any) -> dict[str, Any]:
        inputs, targets = piece.batch
        return self.values_of(module(inputs), targets)

    def inputs_of(self, piece: Any) -> Any:
        return piece.batch

    def values_of(self, outputs: Any, targets: Any) -> dict[str, Any]:
        return {"loss": self.run.loss(outputs, targets)}


def by_strategy(name: str, run: Run, rank: int, size: int) -> float:
    """A strategy of ours, as a trainer calls it. The loss of the last step."""
    from manyhosts.cluster.place import Place
    from manyhosts.communication.world import World
    from manyhosts.config.strategies import named
    from manyhosts.strategies.strategy import Piece, Sample
    from manyhosts.strategies.table import STRATEGIES

    world = World(Place.from_environment())
    kind, options = OURS[name]
    strategy = STRATEGIES.load(kind)(dataclasses.replace(named(kind), **options), world)
    shard, pieces = strategy.shard(), MICRO_BATCHES if kind == "pipeline" else 1
    strategy.look(lambda: Sample(lambda: run.batch(0, 0, 1)[0], nullcontext, "fp32"))
    model = strategy.place(run.model)
    optimizer, compute = run.optimizer(model.parameters()), Compute(run)
    for step in range(run.steps):
        inputs, targets = run.batch(step, shard.index, shard.count)
        parts = list(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True))
        share = BATCH // shard.count // pieces
        given = [Piece(partial(tuple, part), share, share / BATCH, (step, rank, n)) for n, part in enumerate(parts)]
        outcome = strategy.forward_backward(model, given, compute, lambda loss: loss, [0.0])
        strategy.update(model, optimizer)
        run.after(optimizer)
    loss = float(outcome.values["loss"])
    world.barrier()
    return loss


def work(name: str, width: int, steps: int) -> None:
    """The life of a worker: one contestant. Its figures are the last line of its output."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run = Run(width, steps)
    hands: dict[str, Callable[[Run, int, int], float]] = {DISTRIBUTED: distributed, FSDP2: fully_sharded}
    hands |= {PARALLELIZE: parallelized, BOTH: both}
    hands |= {kind: partial(pipelined, kind) for kind in (ONE_F_ONE_B, GPIPE)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if name in hands:
        dist.init_process_group("gloo")
    loss = hands[name](run, rank, size) if name in hands else by_strategy(name, run, rank, size)
    assert len(run.times) == run.steps, f"{name} made {len(run.times)} steps of {run.steps}"
    times = [later - earlier for earlier, later in pairwise(run.times[WARM_UP - 1 :])]
    sent = (run.sent[1] - run.sent[0]) / steps / (size if os.environ["GLOO_SOCKET_IFNAME"] == "lo" else 1)
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    figures = {"seconds": statistics.median(times), "sent": sent, "held": run.held, "peak": peak, "loss": loss}
    print(json.dumps(figures | {"parameters": run.size}), flush=True)
    os._exit(0)  # Gloo's destructors abort now and then in a process that has finished its work


Start = Callable[[int, list[str], dict[str, str]], "subprocess.Popen[str]"]


@contextmanager
def starting(place: str, workers: int) -> Iterator[tuple[Start, str, str]]:
    """How a worker is started there by its rank, the first one's address, and the interface that they talk over."""
    if place == "host":
        yield (
            lambda rank, words, env: subprocess.Popen(words, env=os.environ | env, stdout=subprocess.PIPE, text=True),
            "127.0.0.1",
            "lo",
        )
        return
    from manyhosts.lab import lab

    with lab(workers, bandwidth="1gbit", prefix="strat") as hosts:
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        yield (
            lambda rank, words, env: hosts[rank].start(words, env=path | env, stdout=subprocess.PIPE),
            hosts[0].address,
            "eth0",
        )


def measure(start: Start, address: str, interface: str, workers: int, words: list[str]) -> dict[str, float]:
    """The figures of one contestant: of several that differ the largest."""
    with socket.socket() as probe:  # free here, and nobody listens on a lab's host
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": str(workers), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    place |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": interface}
    started = [start(rank, words, place | {"RANK": str(rank)}) for rank in range(workers)]
    try:
        outputs = [worker.communicate(timeout=600)[0] for worker in started]
    finally:
        for worker in started:
            worker.kill()
    if any(worker.returncode for worker in started):
        raise SystemExit(f"{' '.join(words)} failed")
    found = [json.loads(out.strip().splitlines()[-1]) for out in outputs]
    return {key: max(each[key] for each in found) for key in found[0]}


def table(way: str, figures: dict[str, list[dict[str, float]]], busy: str) -> list[str]:
    """What was measured of one way at one place."""
    rounds = next(iter(figures.values()))
    lines = [
        f"{describe(Path(sys.executable), ['torch'])} {busy}",
        "",
        f"n = {len(rounds)} rounds; {rounds[0]['parameters'] / 1e6:.1f} MB of parameters. Medians, with the lowest and "
        "the highest; a ratio is that to the loop by hand above it, of the same round. Of all workers the largest one.",
        "",
        "| | step, ms | ratio | sent per step and worker, MB | kept between steps, MB | peak of memory, MB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, found in figures.items():
        hand = figures[next(by_hand for by_hand, ours in WAYS[way].items() if name in (by_hand, *ours))]
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


def sections(page: Path) -> dict[str, str]:
    """What `page` has, by headings."""
    parts = page.read_text().split("\n## ")[1:] if page.exists() else []
    return {heading: text.strip() for heading, _, text in (part.partition("\n") for part in parts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12, help="steps of each run that are timed")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--places", default=",".join(PLACES), help="some of these")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of these")
    parser.add_argument("--output", type=Path, default=REPORT, help="the page that the answer is written to")
    parser.add_argument("--one", help="be a worker; the benchmark starts them itself")
    asked = parser.parse_args()
    if asked.one:
        work(asked.one, asked.width, asked.steps)
    found = sections(asked.output)
    for place, way in product(asked.places.split(","), asked.ways.split(",")):
        names = [name for hand, ours in WAYS[way].items() for name in (hand, *ours)]
        figures: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        busy = f"When it began, {os.getloadavg()[1]:.1f} processes wanted the {os.cpu_count()} cores."
        workers, word = WORKERS.get(way, (2, "two"))
        with starting(place, workers) as how:
            for turn in range(asked.rounds):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:  # nobody always goes first
                    words = [sys.executable, str(Path(__file__).resolve()), "--one", name]
                    words += ["--width", str(asked.width), "--steps", str(asked.steps)]
                    figures[name].append(measure(*how, workers, words))
                    print(place, turn + 1, name, figures[name][-1], flush=True)
        losses = {name: rounds[0]["loss"] for name, rounds in figures.items()}
        assert all(math.isclose(each, losses[names[0]], rel_tol=1e-3) for each in losses.values()), f"{losses}"
        found[f"{way}: {PLACES[place].format(word)}"] = "\n".join(table(way, figures, busy))
    lines = ["# What a step of each strategy takes", "", *(__doc__ or "").split("\n\n")[2].splitlines()]
    asked.output.write_text("\n".join(lines) + "\n" + "".join(f"\n## {each}\n\n{found[each]}\n" for each in found))
    print(asked.output.read_text())


if __name__ == "__main__":
    main()
