"""Does a run start as fast as that of another commit? From the command to the end of the first training step.

    python benchmarks/start_ratio.py OTHER_PYTHON [--rounds 7]

OTHER_PYTHON has the other commit installed. A small convolutional network on digits starts with either, by turns: one
worker started by `python`, the same with pieces of half a batch, and two workers started by `manyhosts run`; with a
loss of PyTorch's, which nobody need look at, and with a step of the script's. `import manyhosts` is timed, too. One
warm-up of each, which also compiles its modules to bytecode, is not counted. The clock may also measure other programs,
which want the same cores; so what all processes of the command computed until its end is given, too. The answer, with
each time, is written to start_ratio.md and .jsonl in this folder.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe, origin

REPORT = Path(__file__).with_suffix(".md")
RECORD = Path(__file__).with_suffix(".jsonl")
SCRIPT = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import manyhosts as mh


def stamp(*_):
    if os.environ.get("RANK", "0") == "0":
        with open(sys.argv[1], "w") as file:
            file.write(str(time.time()))


def optimizer(params):
    made = torch.optim.AdamW(params, lr=3e-3)
    made.register_step_post_hook(stamp)
    return made


def convnet():
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


def step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


torch.manual_seed(0)
data = TensorDataset(torch.randn(1197, 1, 8, 8), torch.randint(0, 10, (1197,)))
given = {"step": step} if "step" in sys.argv else {"loss": nn.CrossEntropyLoss()}
if "micro" in sys.argv:
    given["micro_batch_size"] = 16
mh.Trainer(model=convnet, optimizer=optimizer, data=mh.Data(train=data, batch_size=32), **given).fit("1 step")
"""
CASES = {
    "import manyhosts": None,
    "one worker, a loss of PyTorch's": (1, []),
    "one worker, a step, pieces of half a batch": (1, ["step", "micro"]),
    "two workers, a loss of PyTorch's": (2, []),
    "two workers, a step": (2, ["step"]),
}


def seconds(python: Path, case: str, folder: Path) -> tuple[float, float]:
    """From the command to the first step, or the end of the import; and what was computed until its end."""
    asked = CASES[case]
    script, stamp = folder / "train.py", folder / "stamp"
    script.write_text(SCRIPT)
    if asked is None:
        words = [str(python), "-c", f"import manyhosts, time; open({str(stamp)!r}, 'w').write(str(time.time()))"]
    else:
        workers, more = asked
        started_by = [
            str(python.parent / "manyhosts"),
            "run",
            "--workers",
            str(workers),
            "--run-dir",
            str(folder / "run"),
        ]
        words = [*([str(python)] if workers == 1 else started_by), str(script), str(stamp), *more]
    began, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "MANYHOSTS_RUN_DIR": str(folder / "run")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once, as where pip installs them
    subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return float(stamp.read_text()) - began, computed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    pythons = {"other": asked.other.absolute(), "this": Path(sys.executable)}
    lines = []
    with RECORD.open("w") as record:
        record.write(json.dumps(origin()) + "\n")
        for case in CASES:
            rounds: list[dict[str, tuple[float, float]]] = []
            for number in range(asked.rounds + 1):
                rounds.append({})
                for name in sorted(pythons, reverse=bool(number % 2)):
                    with tempfile.TemporaryDirectory() as folder:
                        wall, computed = rounds[-1][name] = seconds(pythons[name], case, Path(folder))
                    if number:
                        line = {"case": case, "round": number, "who": name, "s": wall, "computed_s": computed}
                        record.write(json.dumps(line) + "\n")
                        record.flush()
            lines.append(f"| {case} | {' | '.join(columns(rounds[1:], 0) + columns(rounds[1:], 1))} |")
            print(lines[-1], flush=True)
            REPORT.write_text(page(asked.other, lines, asked.rounds))
    print(f"wrote {REPORT}")


def columns(rounds: list[dict[str, tuple[float, float]]], which: int) -> list[str]:
    """Medians of both, and of their ratios by round."""
    ratios = sorted(each["this"][which] / each["other"][which] for each in rounds)
    other, this = (statistics.median(each[name][which] for each in rounds) for name in ("other", "this"))
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return [f"{other:.2f}", f"{this:.2f}", spread]


def page(other: Path, lines: list[str], rounds: int) -> str:
    where = other.absolute().parent
    found = subprocess.run(
        ["git", "log", "-1", "--format=%h, %cs"], cwd=where, capture_output=True, text=True, check=True
    )
    return (
        "# From the command to the first step, against another commit\n\n"
        "Written by `python benchmarks/start_ratio.py OTHER_PYTHON`; its first lines say what is compared, and how.\n\n"
        f"{describe(Path(sys.executable), ['torch', 'manyhosts'])} The other commit: {found.stdout.strip()}.\n"
        f"{rounds} rounds, by turns; medians, and the median of the ratios of the rounds (lowest to highest).\n\n"
        "| what starts | other commit, s | this one, s | ratio | other computed, s | this one, s | ratio |\n"
        "|---|---:|---:|---:|---:|---:|---:|\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
