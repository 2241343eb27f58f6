"""How long does training stand still for a snapshot, and what does it cost in all?

    python benchmarks/stall.py [--rounds 5] [--megabytes 500] [--snapshots 3] [--folder DIR]

A model of square linear layers with AdamW on random samples, in one process with all cores: parameters and optimizer
state are `--megabytes` together. Every 20 steps all of it is saved to the same disk: not at all, by `torch.save` (which
does not wait until the bytes are on the disk), by `torch.save` followed by fsync, or by our store (hashed, synced, and
in place by one rename). Each runs the same steps in a fresh process, in turn. Waiting is the time in calls that
training makes for the snapshot; the whole cost is that of the run over the one without snapshots, what the writing
takes from the cores included. The weights at the end must be equal bit for bit, and a snapshot of ours, read back, must
be the state of its step. All of them have the C library give back at once what is freed: left to itself it keeps some
gradients of the step before, now more and now fewer, which is no part of what a snapshot needs.
The answer is written to stall.md beside this file.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import describe

REPORT = Path(__file__).with_suffix(".md")
EVERY = 20
LAYERS = 10
BATCH = 64
WARM_UP = 2  # steps before the clock starts: the optimizer makes its state in the first


@dataclass
class Figures:
    """What one run tells."""

    total_s: float
    waits_s: list[float]
    """For each snapshot."""
    extra_mb: float
    """Most memory in use over what it was before the first snapshot, with the step's own."""
    state_mb: float
    weights_sha256: str


class Nothing:
    """No snapshots: the ground for the others."""

    def __init__(self, folder: Path) -> None:
        self.waited_s = 0.0

    def save(self, step: int, state: dict[str, Any], unchanged: list[Any]) -> None:
        return

    def before_update(self) -> None:
        return

    def finish(self, step: int, state: dict[str, Any]) -> None:
        return


class TorchSave(Nothing):
    """What everybody writes first; the file before is written over."""

    sync = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / "checkpoint.pt"

    def save(self, step: int, state: dict[str, Any], unchanged: list[Any]) -> None:
        import torch

        begin = time.perf_counter()
        with self.path.open("wb") as file:
            torch.save(state, file)
            if self.sync:
                file.flush()
                os.fsync(file.fileno())
        self.waited_s += time.perf_counter() - begin


class TorchSaveSynced(TorchSave):
    """The same, on the disk before training continues."""

    sync = True


class OurStore(Nothing):
    """A snapshot beside the next step."""

    def __init__(self, folder: Path) -> None:
        from manyhosts.snapshot.store import Store

        self.store = Store(folder, keep=2)

    @property
    def waited_s(self) -> float:
        return self.store.stalled_s

    @waited_s.setter
    def waited_s(self, value: float) -> None:
        raise AttributeError("the store keeps this clock")

    def save(self, step: int, state: dict[str, Any], unchanged: list[Any]) -> None:
        from manyhosts.snapshot.store import Facts

        facts = Facts(step=step, epoch=0, position={}, strategy="single", model={})
        self.store.save(state, facts, unchanged_until_update=unchanged)

    def before_update(self) -> None:
        self.store.before_update()

    def finish(self, step: int, state: dict[str, Any]) -> None:
        from manyhosts.events import SnapshotSaved

        self.store.wait()
        skipped = [event for event in self.store.finished() if not isinstance(event, SnapshotSaved)]
        assert not skipped, skipped
        loaded = self.store.latest()
        assert loaded is not None
        assert loaded.facts.step == step
        assert same(dict(loaded.state), state), f"the snapshot of step {step} is not its state"


CONTESTANTS: dict[str, Callable[[Path], Nothing]] = {
    "no snapshots": Nothing,
    "torch.save": TorchSave,
    "torch.save and fsync": TorchSaveSynced,
    "manyhosts": OurStore,
}


def same(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def run_one(name: str, folder: Path, megabytes: int, snapshots: int) -> Figures:
    """One run in this process."""
    import torch
    from torch import nn

    from manyhosts.snapshot.fingerprint import weights_sha256

    torch.manual_seed(0)
    width = round((megabytes * 1e6 / 3 / 4 / LAYERS) ** 0.5)  # parameters and two moments, four bytes each
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = torch.randn(BATCH, width), torch.randn(BATCH, width)
    saver = CONTESTANTS[name](folder)

    def forward_backward() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()

    def state() -> dict[str, Any]:
        return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}

    for _ in range(WARM_UP):
        forward_backward()
        optimizer.step()
    moments = [value for values in optimizer.state.values() for value in values.values()]
    unchanged = [*model.parameters(), *moments]
    state_mb = sum(tensor.nbytes for tensor in unchanged) / 1e6
    memory_before = most_memory_mb()
    waits = []
    begin = time.perf_counter()
    steps = EVERY * snapshots + EVERY // 2  # half a period more, so that the last writing has its time too
    for step in range(1, steps + 1):
        forward_backward()
        saver.before_update()
        optimizer.step()
        if step % EVERY == 0 and step // EVERY <= snapshots:
            waits.append(saver.waited_s)
            saver.save(step, state(), unchanged)
    total = time.perf_counter() - begin
    waits.append(saver.waited_s)
    extra = most_memory_mb() - memory_before
    digest = weights_sha256(model)
    if name == "manyhosts":
        check_last_snapshot(saver, EVERY * snapshots, forward_backward, optimizer, state)
    return Figures(
        total_s=total,
        waits_s=[after - before for before, after in pairwise(waits)],
        extra_mb=extra,
        state_mb=state_mb,
        weights_sha256=digest,
    )


def check_last_snapshot(
    saver: Nothing, step: int, forward_backward: Callable[[], None], optimizer: Any, state: Callable[[], Any]
) -> None:
    """One more snapshot while training continues at once: what is read back must be the state of its step."""
    import copy

    then = copy.deepcopy(state())
    saver.save(step + 1, state(), [])
    forward_backward()
    saver.before_update()
    optimizer.step()
    saver.finish(step + 1, then)


def most_memory_mb() -> float:
    """The most memory that this process ever had, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError("/proc/self/status does not say VmHWM")


def measure(name: str, asked: argparse.Namespace) -> Figures:
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        words = [sys.executable, __file__, "--one", name, "--folder", folder]
        words += ["--megabytes", str(asked.megabytes), "--snapshots", str(asked.snapshots)]
        at_once = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        done = subprocess.run(words, capture_output=True, text=True, env=at_once)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return Figures(**json.loads(done.stdout.strip().splitlines()[-1]))


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def report(runs: dict[str, list[Figures]], asked: argparse.Namespace) -> str:
    """The recorded answer, as Markdown."""
    ours, theirs = runs["manyhosts"], runs["torch.save"]
    rows = []
    for name, taken in runs.items():
        cells = [name, spread([run.total_s for run in taken], 2), "", "", ""]
        if name != "no snapshots":
            cost = [run.total_s - plain.total_s for run, plain in zip(taken, runs["no snapshots"], strict=True)]
            cells[2] = spread([wait for run in taken for wait in run.waits_s], 3)
            cells[3] = spread([100 * sum(run.waits_s) / run.total_s for run in taken], 2)
            cells[4] = spread([seconds / asked.snapshots for seconds in cost], 2)
        rows.append("| " + " | ".join([*cells, spread([run.extra_mb for run in taken], 0)]) + " |")
    per_round = [sum(one.waits_s) / sum(other.waits_s) for one, other in zip(ours, theirs, strict=True)]
    our_shares = [100 * sum(run.waits_s) / run.total_s for run in ours]
    plain_mb = statistics.median(run.extra_mb for run in runs["no snapshots"])
    extra = statistics.median(run.extra_mb for run in ours) - plain_mb
    state_mb = ours[0].state_mb
    return "\n".join(
        [
            "# How long training stands still for a snapshot",
            "",
            "Written by `python benchmarks/stall.py`; its first lines say what is compared, and how.",
            "",
            describe(Path(sys.executable), ["torch", "manyhosts", "safetensors"]),
            f"{len(ours)} rounds, each contestant once per round in a fresh process; {asked.snapshots} snapshots of "
            f"{state_mb:.0f} MB a run, one every {EVERY} steps. Median (lowest - highest).",
            "",
            "| snapshots by | run, s | waiting per snapshot, s | waiting, % of the run "
            "| whole cost per snapshot, s | most memory over that before the first, MB |",
            "|---|---:|---:|---:|---:|---:|",
            *rows,
            "",
            f"* Waiting, of that for `torch.save` in the same round: {spread([100 * r for r in per_round], 1)} %; "
            "the aim is at most 20 %.",
            f"* Waiting, of the whole run: {spread(our_shares, 2)} %; the aim is at most 3 %.",
            f"* Memory over that of the run without snapshots: {extra:.0f} MB, "
            f"{extra / state_mb:.2f} copies of the state; the aim is at most one.",
            "* The weights at the end of all runs had the same bits.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--snapshots", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be tried  [default: that of /tmp]")
    parser.add_argument("--one", choices=list(CONTESTANTS), help="run this one here, and print its figures")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(asdict(run_one(asked.one, asked.folder, asked.megabytes, asked.snapshots))))
        return
    runs: dict[str, list[Figures]] = {name: [] for name in CONTESTANTS}
    names = list(CONTESTANTS)
    for turn in range(asked.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:  # nobody always goes first
            runs[name].append(measure(name, asked))
        reported = ", ".join(f"{name} {taken[-1].total_s:.1f} s" for name, taken in runs.items())
        print(f"round {turn + 1}: {reported}", flush=True)
    weights = {run.weights_sha256 for taken in runs.values() for run in taken}
    assert len(weights) == 1, f"{len(weights)} different weights at the end of the runs"
    REPORT.write_text(report(runs, asked))
    print(REPORT.read_text())


if __name__ == "__main__":
    main()
