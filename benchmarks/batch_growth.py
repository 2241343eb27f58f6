"""Asks what a batch that grows with the workers does to accuracy, and what undoes it.

    python benchmarks/batch_growth.py --data DIR     # DIR holds fashion-mnist.npz
    python benchmarks/batch_growth.py --page         # the page once more, of the runs that are recorded

Every run sees the same number of samples: a batch twice as large makes half the steps. `grown`: each worker adds a
batch of its own, and nothing else changes. `sqrt`, `linear`: the learning rate grows with it, by `lr_scaling`, and
rises to its value over the first tenth of the run, by `warmup`. `fixed`: the batch is that of one worker, cut over
all of them. None of this depends on how many processes compute it, so one process computes all: with
`virtual_workers` it cuts each batch into as many parts as there would be workers, computes each on its own, and adds
them as they would.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import small_runs
from machine import describe
from small_runs import Task, Wanted

RULES = ["grown", "sqrt", "linear", "fixed"]
WORKERS = [1, 2, 4, 8, 16]
SEEDS = [0, 1, 2]


def start(task: Task) -> Task:
    """The task with the batch of one worker: half of what it has elsewhere, and a learning rate that suits it."""
    return dataclasses.replace(task, batch=task.batch // 2, lr=task.lr * 0.7)


def growing(task: Task, workers: int, seed: int, label: str) -> Wanted:
    """The run in which each worker adds its own batch."""
    scaling = None if label == "grown" else label
    warmup = None if scaling is None else f"{0.1 * task.samples / len(task.train):g} epochs"
    rule = {"lr_scaling": scaling, "warmup": warmup}
    return Wanted(task, label, workers, seed, batch=task.batch * workers, rule=rule, virtual=True)


def found(lines: Sequence[Mapping[str, Any]], task: str, label: str, workers: int) -> list[float]:
    """Accuracies in percent, one for each seed; of one worker every rule is the same run."""
    label = "grown" if workers == 1 else label
    return [
        100 * one["accuracy"] for one in lines if (one["task"], one["label"], one["workers"]) == (task, label, workers)
    ]


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """What was found, as it stands."""
    text = ["# A batch that grows with the workers", "", (__doc__ or "").split("\n\n", 2)[2].strip(), ""]
    text += [describe(Path(sys.executable), ["torch", "numpy"]), "", "![accuracy by workers](batch_growth.png)", ""]
    for task, what, batch in (
        ("images", "Images: a ConvNet on Fashion-MNIST", 64),
        ("letters", "Letters: a transformer", 16),
    ):
        text += [f"## {what}", "", "Test accuracy in percent: mean (lowest to highest, n seeds).", ""]
        text += ["| workers' worth of batch | " + " | ".join(RULES) + " |", "|---|" + "---|" * len(RULES)]
        for workers in WORKERS:
            cells = [spread(found(lines, task, label, workers)) for label in RULES]
            text.append(f"| {workers} ({batch * workers}) | {' | '.join(cells)} |")
        text += ["", *conclusions(lines, task), ""]
    return "\n".join(text)


def conclusions(lines: Sequence[Mapping[str, Any]], task: str) -> list[str]:
    """For each rule: up to which batch its mean lies within the spread of the seeds of one worker, or above."""
    alone = found(lines, task, "grown", 1)
    if len(alone) < 2:
        return []
    said = []
    for label in RULES:
        good = 1
        for workers in WORKERS[1:]:
            values = found(lines, task, label, workers)
            if not values or statistics.mean(values) < min(alone):
                break
            good = workers
        said.append(f"`{label}` up to {good}")
    return [f"Not below the lowest seed of one worker, in workers' worth of batch: {', '.join(said)}."]


def spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f}, {len(values)})"


LINES = {
    "grown": ("tab:red", "o", "batch grows, learning rate stays"),
    "sqrt": ("tab:orange", "s", "batch grows, learning rate by its square root"),
    "linear": ("tab:blue", "^", "batch grows, learning rate in proportion"),
    "fixed": ("tab:green", "D", "batch stays (what batch_size does)"),
}
"""Rule → colour, marker and words of its line."""
TITLES = {"images": "images: ConvNet on Fashion-MNIST", "letters": "letters: small transformer"}


def plot(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A line for each rule, with bars from the lowest to the highest seed."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["font.size"] = 11
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for axis, task in zip(axes, ("images", "letters"), strict=True):
        for label, (color, marker, words) in LINES.items():
            known = [(workers, values) for workers in WORKERS if (values := found(lines, task, label, workers))]
            means = [statistics.mean(values) for _, values in known]
            bars = [
                [mean - min(values) for mean, (_, values) in zip(means, known, strict=True)],
                [max(values) - mean for mean, (_, values) in zip(means, known, strict=True)],
            ]
            at = [workers for workers, _ in known]
            axis.errorbar(at, means, yerr=bars, marker=marker, markersize=6, capsize=3, color=color, label=words)
        axis.set_xscale("log", base=2)
        axis.set_xticks(WORKERS, [str(workers) for workers in WORKERS])
        axis.set_xlabel("workers")
        axis.set_ylabel("test accuracy (%)")
        axis.set_title(TITLES[task])
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def every_run(tasks: Sequence[Task]) -> list[Wanted]:
    """In the order in which they tell most."""
    wanted = []
    for seed in SEEDS:
        for task in tasks:
            wanted.append(growing(task, 1, seed, "grown"))
            for workers in reversed(WORKERS[1:]):
                wanted += [growing(task, workers, seed, label) for label in RULES[:3]]
                wanted.append(Wanted(task, "fixed", workers, seed, batch=task.batch, virtual=True))
    return wanted


if __name__ == "__main__":
    small_runs.study(
        __file__,
        __doc__ or "",
        lambda data: every_run([start(task) for task in (small_runs.images(data, count=12_000), small_runs.letters())]),
        page,
        plot,
    )
