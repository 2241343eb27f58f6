"""What updates that wait for nobody cost in loss: four workers beside one process, on digits and on text, three seeds.

    python benchmarks/asynchronous_loss.py [--seeds 3] [--tasks digits text] [--more]

The models and the data are those of examples/digits.py and examples/char_lm.py. One process makes an update for each
micro-batch of 32 samples, in order; the four make them as they come, of the same micro-batches; in step, 32 samples
are a batch of all four. The learning rate falls in a line to nothing over the run. Digits are trained with smoothed
labels (0.1), so that the loss ends above nothing and two seeds of one process are near each other. Hogwild and the one
process beside it use SGD without momentum, the others AdamW. A way whose mean loss is not within 2 % of one process's
is run again on 1.3 times the samples; with --more those of four workers that are not in step are run on as many alone.

The answer is written to asynchronous_loss.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from machine import describe

REPORT = Path(__file__).with_suffix(".md")
EXAMPLES = Path(__file__).parents[1] / "examples"
ENOUGH, MORE_SAMPLES = 1.02, 1.3
WAYS = {
    "one process, AdamW": (1, "ParameterServer()", "AdamW"),
    "in step (`staleness=0`)": (4, "ParameterServer(staleness=0)", "AdamW"),
    "bounded (`staleness=2`)": (4, "ParameterServer(staleness=2)", "AdamW"),
    "no bound (`staleness=None`)": (4, "ParameterServer()", "AdamW"),
    "one process, SGD": (1, "ParameterServer()", "SGD"),
    "`hogwild`": (4, "Hogwild()", "SGD"),
}
"""Workers, strategy and optimizer of each; a row of one process comes before those that are held against it."""
TASKS = {
    "digits": {"example": "digits.py", "model": "convnet", "smooth": 0.1, "meetings": 60, "AdamW": 3e-3, "SGD": 0.1},
    "text": {
        "example": "char_lm.py",
        "model": "lambda: GPT(len(alphabet))",
        "smooth": 0.0,
        "meetings": 20,
        "AdamW": 2e-3,
        "SGD": 0.3,
    },
}
SCRIPT = """
import json, sys
from pathlib import Path
import torch
import manyhosts as mh

task, ways, seeds, times = json.loads(sys.argv[1])
torch.set_num_threads(1)
exec(Path(task["example"]).read_text().split("trainer = ")[0])  # its model and its data
for number, (name, strategy, optimizer) in enumerate(ways):
    for seed in range(seeds):
        in_step = "staleness=0" in strategy
        updates = round(task["meetings"] * times) * (8 if in_step else 1)
        trainer = mh.Trainer(
            model=eval(task["model"]),
            loss=torch.nn.CrossEntropyLoss(label_smoothing=task["smooth"]),
            optimizer=lambda params: getattr(torch.optim, optimizer)(params, lr=task[optimizer]),
            schedule=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1 / updates, updates),
            data=mh.Data(train=train, validation=validation, batch_size=32 if in_step else 256),
            micro_batch_size=None if in_step else 32,
            strategy=eval("mh." + strategy),
            run_dir=f"way-{number}-{seed}",
            seed=seed,
        )
        mh.print("LOSS", json.dumps([name, float(trainer.fit(f"{updates} steps").validation["loss"])]))
"""


def losses(task: str, names: Sequence[str], seeds: int, samples: float) -> dict[str, list[float]]:
    """Of each way the validation loss at the end, by seed. All ways are on equally many workers: one start for all."""
    given = {**TASKS[task], "example": str(EXAMPLES / str(TASKS[task]["example"]))}
    workers = {WAYS[name][0] for name in names}.pop()
    words = [given, [[name, *WAYS[name][1:]] for name in names], seeds, samples]
    found: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        command = [str(Path(sys.executable).with_name("manyhosts")), "run", "--workers", str(workers), "--no-prefix"]
        done = subprocess.run(
            [*command, str(script), json.dumps(words)], capture_output=True, text=True, check=False, cwd=folder
        )
    for line in done.stdout.splitlines():
        if line.startswith("LOSS"):
            name, loss = json.loads(line.removeprefix("LOSS"))
            found[name].append(loss)
    assert all(len(each) == seeds for each in found.values()), done.stdout + done.stderr
    print(task, samples, found, flush=True)
    return found


def measured(task: str, seeds: int, *, more: bool) -> list[tuple[str, float, list[float]]]:
    """Of each way, and of some again: its name, how many times the usual samples, and the loss of each seed."""
    alone = losses(task, [name for name in WAYS if WAYS[name][0] == 1], seeds, 1.0)
    missed = [name for name, way in WAYS.items() if way[0] > 1 and "staleness=0" not in way[1]]
    together = losses(task, [name for name in WAYS if WAYS[name][0] > 1 and not (more and name in missed)], seeds, 1.0)
    beside = ""
    for name, (workers, _, _) in WAYS.items():
        beside = name if workers == 1 else beside
        if name in together and statistics.mean(together[name]) <= ENOUGH * statistics.mean(alone[beside]):
            missed = [each for each in missed if each != name]
    again = losses(task, missed, seeds, MORE_SAMPLES) if missed else {}
    return [
        (name, samples, ways[name])
        for name in WAYS
        for samples, ways in ((1.0, {**alone, **together}), (MORE_SAMPLES, again))
        if name in ways
    ]


def report(found: dict[str, list[tuple[str, float, list[float]]]], seeds: int, load: float) -> str:
    rows, alone = [], 0.0
    for task, ways in found.items():
        for name, samples, losses in ways:
            mean = statistics.mean(losses)
            alone = mean if name.startswith("one process") else alone
            spread = f"{min(losses):.4f} to {max(losses):.4f}"
            rows.append(f"| {task} | {name} | {samples:.1f} | {mean:.4f} ({spread}) | {mean / alone:.3f} |")
    return "\n".join(
        [
            "# The loss of updates that wait for nobody",
            "",
            "Validation loss at the end of a run: the mean of the seeds, with lowest and highest, and that mean over",
            f"that of the row of one process above it. n = {seeds} seeds; four workers. Loss in nats; samples in times",
            "those of one process, and a way is tried on 1.3 times as many where it was not within 2 % on as many.",
            "",
            "| task | way | samples | loss | of one process |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"The machine had other work to do: its load was {load:.0f} when the benchmark began.",
            "",
            describe(Path(sys.executable), ("torch", "manyhosts")),
            "Again: `python benchmarks/asynchronous_loss.py`.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--more", action="store_true")
    asked, load = parser.parse_args(), os.getloadavg()[0]
    found: dict[str, list[tuple[str, float, list[float]]]] = {}
    for task in asked.tasks:
        found[task] = measured(task, asked.seeds, more=asked.more)
        REPORT.write_text(report(found, asked.seeds, load))  # what there is, where it is broken off


if __name__ == "__main__":
    main()
