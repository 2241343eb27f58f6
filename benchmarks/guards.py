"""Which share of a run of ten minutes do the looks at the loss take, and what do they add to a start?

    python benchmarks/guards.py [--rounds 5]

Two models train in one process, with pieces of half a batch, so that looks come again: with looks as they are by
default, and by turns with `weight="samples"`, where nothing is looked at. One process of one thread for each run. Times
are what that thread computed, as other programs may want the cores. A look is timed where it is called; the share is
that of the first look, those before steps 10 and 100, and one before each 800th, next to 600 s of the steps that were
measured. The answer is written to guards.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import describe

REPORT = Path(__file__).with_suffix(".md")
STEPS = {"perceptron": 105, "convolutions": 105}
RUN_S, EVERY = 600, 800


def made(name: str) -> tuple[Any, Any, int]:
    """A model, samples for it, and its batch."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    classes = torch.randint(0, 10, (1024,))
    if name == "perceptron":
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), (torch.randn(1024, 64), classes), 64
    layers: list[nn.Module] = []
    for into, out in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10)), (torch.randn(1024, 3, 32, 32), classes), 32


def train(name: str, folder: str, *, looks: bool) -> dict[str, Any]:
    """What one run has taken: seconds of each look and of each step, and from the call of `fit` to its first step."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import manyhosts as mh
    from manyhosts.training.loop import counting

    taken: list[float] = []
    look = counting.LossWeights.looked_at

    def timed(self: Any, step: Any, *, first: bool) -> Any:
        began = time.thread_time()
        found = look(self, step, first=first)
        taken.append(time.thread_time() - began)
        return found

    counting.LossWeights.looked_at = timed  # type: ignore[method-assign]
    model, samples, batch = made(name)
    ends: list[float] = []

    def step(model: nn.Module, given: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(given[0]), given[1])

    class Clock(mh.Callback):  # type: ignore[misc, unused-ignore]
        def after_step(self, moment: Any) -> None:
            ends.append(time.thread_time())

    trainer = mh.Trainer(
        model=model,
        step=step,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        data=mh.Data(TensorDataset(*samples), batch_size=batch, loader_workers=0),
        micro_batch_size=batch // 2,
        threads=1,
        run_dir=folder,
        callbacks=[Clock()],
        **({} if looks else {"weight": "samples"}),
    )
    began = time.thread_time()
    trainer.fit(f"{STEPS[name]} steps")
    steps = [after - before for before, after in pairwise(ends)]
    return {"looks": taken if looks else [], "start": ends[0] - began, "steps": steps}


def measure(name: str, *, looks: bool) -> dict[str, Any]:
    """One run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            __file__,
            "--train",
            name,
            "--folder",
            f"{folder}/run",
            *(["--looks"] if looks else []),
        ]
        ended = subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder)
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return found


def row(name: str, rounds: list[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[str, float]:
    """A line of the table, and the share of a run."""
    first = [each["looks"][0] for each, _ in rounds]
    later = [look for each, _ in rounds for look in each["looks"][1:]]
    step = statistics.median(statistics.median(plain["steps"]) for _, plain in rounds)
    count = 2 + RUN_S / step / EVERY
    share = 100 * (statistics.median(first) + count * statistics.median(later)) / RUN_S
    ratios = [statistics.median(each["steps"]) / statistics.median(plain["steps"]) for each, plain in rounds]
    starts = [each["start"] - plain["start"] for each, plain in rounds]
    cells = [
        name,
        f"{step * 1e3:.2f}",
        spread([each * 1e3 for each in first], ".0f"),
        spread([each * 1e3 for each in later], ".1f"),
        f"{count:.0f}",
        f"{share:.2f}",
        spread(ratios, ".3f"),
        spread([each * 1e3 for each in starts], ".0f"),
    ]
    return f"| {' | '.join(cells)} |", share


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", choices=STEPS)
    parser.add_argument("--folder")
    parser.add_argument("--looks", action="store_true")
    asked = parser.parse_args()
    if asked.train:
        print(f"\n{json.dumps(train(asked.train, asked.folder, looks=asked.looks))}")
        return
    lines, shares = [], []
    for name in STEPS:
        rounds = []
        for number in range(asked.rounds):
            order = (True, False) if number % 2 else (False, True)
            found = {looks: measure(name, looks=looks) for looks in order}
            rounds.append((found[True], found[False]))
        line, share = row(name, rounds)
        lines.append(line)
        shares.append(share)
        print(line, flush=True)
    REPORT.write_text(page(lines, max(shares), asked.rounds))
    print(f"wrote {REPORT}")


def page(lines: list[str], largest: float, rounds: int) -> str:
    return (
        "# What the looks at the loss cost\n\n"
        "Written by `python benchmarks/guards.py`; its first lines say what is compared, and how.\n\n"
        f"{describe(Path(sys.executable), ['torch', 'manyhosts'])} Times are those that the thread "
        "computed, without waits; both ways took turns.\n"
        f"{rounds} rounds; median (lowest to highest).\n\n"
        f"The looks take at most {largest:.2f} % of a run of 10 minutes.\n\n"
        "| model | step without looks, ms | first look, ms | a later look, ms | later looks in 10 min "
        "| share of 10 min, % | step with looks, times one without | start longer by, ms |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
