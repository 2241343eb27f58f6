"""Asks what each way of sending less costs in accuracy, next to one process that sends nothing.

    python benchmarks/accuracy.py --data DIR         # DIR holds fashion-mnist.npz
    python benchmarks/accuracy.py --page             # the page once more, of the runs that are recorded

Every run sees the same samples in the same order, from the same first weights. So each run is compared with that of
one process of the same seed, in points of test accuracy. Both tasks are short (a learning rate that falls to zero over
471 and 1,200 steps of 128 samples), so that many runs fit on a small machine: what a way costs while a model learns
fastest shows more here than at the end of a long training. The learning rate is half of the best one that was found for
one process among powers of two (images 88.3 % at 1.6e-2, 88.2 at 8e-3, 87.3 at 4e-3; letters 58.5 % at 4e-2, 58.1 at
2e-2, 57.1 at 1e-2; seed 0). Warm-ups are the first third of a run; rounds of local steps have 8 of them, unless a row
says otherwise. Workers are processes of one machine; accuracy does not know the difference.
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

import manyhosts as mh

WARM = 3
"""Warm-ups are this part of a run: the first third."""
AIMS = {
    "fp16": 0.3,
    "bf16": 0.3,
    "int8": 0.3,
    "powersgd, warmed up": 0.3,
    "powersgd of rank 4, warmed up": 0.3,
    "powersgd of rank 4": 0.3,
    "local-sgd": 0.5,
    "local-sgd, warmed up": 0.5,
    "local-sgd, warmed up, rate as it is": 0.5,
    "local-sgd, every 4, warmed up": 0.5,
    "diloco": 0.5,
    "diloco, warmed up": 0.5,
    "diloco, every 32, warmed up": 0.5,
}
"""Points of accuracy that a way may cost."""
ONLY_ON = {
    **dict.fromkeys(("powersgd of rank 4", "local-sgd", "local-sgd, warmed up, rate as it is", "diloco", "topk"), 4),
    "local-sgd, every 4, warmed up": 8,
    "diloco, every 32, warmed up": 8,
}
"""Ways to see what a warm-up, a rule or a short round is for, and the one that has no aim, on so many workers."""
ROUNDS = [(0, 4), (0, 8), (0, 2), (1, 4), (1, 2), (2, 4), (2, 2), (1, 8), (2, 8)]
"""Seeds and numbers of workers, in the order in which they tell most."""


def methods(steps: int) -> dict[str, Any]:
    """Every way that is compared, for a run of so many steps; those that drop most also with an exact beginning."""
    warm = steps // WARM
    return {
        "none": mh.DDP(),
        "fp16": mh.DDP(compression="fp16"),
        "bf16": mh.DDP(compression="bf16"),
        "int8": mh.DDP(compression="int8"),
        "powersgd, warmed up": mh.DDP(compression="powersgd", compression_warmup=warm),
        "powersgd of rank 4, warmed up": mh.DDP(compression="powersgd", powersgd_rank=4, compression_warmup=warm),
        "powersgd of rank 4": mh.DDP(compression="powersgd", powersgd_rank=4),
        "topk": mh.DDP(compression="topk"),
        "local-sgd": mh.LocalSGD(sync_every=8),
        "local-sgd, warmed up": mh.LocalSGD(sync_every=8, sync_warmup=warm),
        "local-sgd, warmed up, rate as it is": mh.LocalSGD(sync_every=8, sync_warmup=warm, local_lr_scaling=None),
        "local-sgd, every 4, warmed up": mh.LocalSGD(sync_every=4, sync_warmup=warm),
        "diloco": mh.DiLoCo(sync_every=8),
        "diloco, warmed up": mh.DiLoCo(sync_every=8, sync_warmup=warm),
        "diloco, every 32, warmed up": mh.DiLoCo(sync_every=32, sync_warmup=warm),
    }


def tasks(data: Path) -> list[Task]:
    """The two that are learned; `data` holds the images."""
    images = dataclasses.replace(small_runs.images(data), lr=8e-3)
    return [images, small_runs.letters(count=153_600, context=16, width=32, layers=1, batch=128, lr=2e-2)]


def every_run(of: Sequence[Task]) -> list[Wanted]:
    """All runs, those with an exact beginning first in each round."""
    wanted = []
    for seed, workers in ROUNDS:
        for task in of:
            found = methods(small_runs.steps_of(task, task.batch))
            wanted.append(Wanted(task, "single", 1, seed))
            wanted += [
                Wanted(task, label, workers, seed, strategy=found[label])
                for label in sorted(found, key=lambda label: "warmed" not in label)
                if ONLY_ON.get(label, workers) == workers
            ]
    return wanted


def differences(lines: Sequence[Mapping[str, Any]], task: str, label: str, workers: int | None = None) -> list[float]:
    """In points, to the run of one process of the same seed; of all numbers of workers where none is given."""
    alone = {line["seed"]: line["accuracy"] for line in lines if (line["task"], line["label"]) == (task, "single")}
    return [
        100 * (line["accuracy"] - alone[line["seed"]])
        for line in lines
        if (line["task"], line["label"]) == (task, label) and workers in (None, line["workers"])
    ]


def spread(found: Sequence[float]) -> str:
    """The mean, the lowest and the highest, and how many."""
    if not found:
        return ""
    if len(found) == 1:
        return f"{found[0]:+.2f} (n = 1)"
    return f"{statistics.mean(found):+.2f} ({min(found):+.2f} to {max(found):+.2f}, n = {len(found)})"


def verdict(by_workers: Mapping[int, Sequence[float]], aim: float | None) -> str:
    """Whether the mean on each number of workers is within what was aimed at; one run alone says nothing."""
    means = {workers: statistics.mean(found) for workers, found in by_workers.items() if len(found) > 1}
    if aim is None:
        return ""
    if not means:
        return "too few runs to say"
    missed = [str(workers) for workers, mean in means.items() if mean < -aim]
    return f"missed on {' and '.join(missed)}" if missed else "kept"


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """What was found, as it stands."""
    text = ["# Accuracy of each way of sending less", "", (__doc__ or "").split("\n\n", 2)[2].strip(), ""]
    text += [describe(Path(sys.executable), ["torch", "numpy"]), "", "![differences by method](accuracy.png)", ""]
    for task, what in (("images", "Images: a ConvNet on Fashion-MNIST"), ("letters", "Letters: a small transformer")):
        alone = [100 * line["accuracy"] for line in lines if (line["task"], line["label"]) == (task, "single")]
        if not alone:
            continue
        text += [f"## {what}", ""]
        text += [
            f"One process: {statistics.mean(alone):.2f} % ({min(alone):.2f} to {max(alone):.2f}, {len(alone)} seeds). "
            "Differences to it in points: mean (lowest to highest).",
            "",
            "| way | 2 workers | 4 workers | 8 workers | all | aim | |",
            "|---|---|---|---|---|---|---|",
        ]
        for label in methods(300):
            all_of_them = differences(lines, task, label)
            if all_of_them:
                by_workers = {workers: differences(lines, task, label, workers) for workers in (2, 4, 8)}
                cells = [spread(found) for found in by_workers.values()]
                aim = AIMS.get(label)
                said = f"within {aim}" if aim is not None else ""
                text.append(
                    f"| {label} | {' | '.join(cells)} | {spread(all_of_them)} | {said} | {verdict(by_workers, aim)} |"
                )
        text.append("")
    return "\n".join(text)


MARKS = {2: ("tab:green", "o"), 4: ("tab:blue", "s"), 8: ("tab:orange", "^")}
"""Workers → colour and marker of their dots: to be distinguished in grey, too."""
TITLES = {"images": "images: ConvNet on Fashion-MNIST", "letters": "letters: small transformer"}


def plot(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Each run a dot, each way a row."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["font.size"] = 11
    from matplotlib import pyplot

    labels = list(methods(300))
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 6), sharey=True, layout="constrained")
    for axis, task in zip(axes, ("images", "letters"), strict=True):
        band = axis.axvspan(-0.3, 0.3, color="0.9")
        axis.axvline(0, color="0.6", linewidth=0.8)
        for row, label in enumerate(labels):
            for workers, (color, marker) in MARKS.items():
                found = differences(lines, task, label, workers)
                axis.plot(found, [row] * len(found), marker, color=color, markersize=6, alpha=0.8)
        axis.set_yticks(range(len(labels)), labels)
        axis.set_title(TITLES[task])
        axis.grid(axis="y", alpha=0.3)
    axes[0].invert_yaxis()
    dots = [pyplot.Line2D([], [], marker=marker, linestyle="", color=color) for color, marker in MARKS.values()]
    figure.supxlabel("test accuracy minus that of one process with the same seed (percentage points)")
    names = [*(f"{workers} workers" for workers in MARKS), "within 0.3 points"]
    figure.legend([*dots, band], names, loc="outside upper right", ncols=4)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    small_runs.study(
        __file__,
        __doc__ or "",
        lambda data: every_run(tasks(data)),
        page,
        plot,
    )
