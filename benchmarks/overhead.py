"""What does one step of `mh.Trainer` and `mh.Run` cost, against a plain PyTorch loop, Fabric, Accelerate and Lightning?

    python benchmarks/overhead.py [--rounds 5] [--epochs 60]

A network of two layers on scikit-learn's digits, batch 32, SGD with momentum, shuffled, one process with one thread:
so small that nearly all of a step is what the loop around it costs. All train the same model on the same samples
for the same number of steps, in turn, each time in a fresh process; the clock is put around the optimizer's own step,
so it stands at the same place in all of them. One run's figure is the time from step WARM_UP to the last step, over the
steps between. The answer is written to overhead.md beside this file.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import describe

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".venv-bench"
REPORT = Path(__file__).with_suffix(".md")
BATCH = 32
STEPS_PER_EPOCH = 57  # 1,797 digits by 32
WARM_UP = STEPS_PER_EPOCH  # one epoch: caches, allocators and imports on first use


class Clock:
    """Notes the time after each step of an optimizer."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def watch(self, optimizer: Optimizer) -> Optimizer:
        step = optimizer.step

        def noted(*arguments: Any, **named: Any) -> Any:
            result = step(*arguments, **named)
            self.times.append(time.perf_counter())
            return result

        optimizer.step = noted  # type: ignore[method-assign]  # a hook could draw random numbers, which a trainer seeds
        return optimizer

    def microseconds_per_step(self) -> float:
        return (self.times[-1] - self.times[WARM_UP]) / (len(self.times) - 1 - WARM_UP) * 1e6


def digits() -> Dataset[tuple[Tensor, ...]]:
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import TensorDataset

    data = load_digits()
    return TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))


def network() -> nn.Module:
    from torch import nn

    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def sgd(parameters: Iterable[Any], clock: Clock) -> Optimizer:
    import torch

    return clock.watch(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))


def loader() -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(digits(), batch_size=BATCH, shuffle=True)


def plain(epochs: int, clock: Clock) -> None:
    """The loop that everybody writes first."""
    from torch import nn

    model, loss_of, batches = network(), nn.CrossEntropyLoss(), loader()
    optimizer = sgd(model.parameters(), clock)
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()


def accelerate(epochs: int, clock: Clock) -> None:
    """The loop with Accelerate's prepared parts."""
    from accelerate import Accelerator
    from torch import nn

    accelerator = Accelerator(cpu=True)
    model, loss_of = network(), nn.CrossEntropyLoss()
    model, optimizer, batches = accelerator.prepare(model, sgd(model.parameters(), clock), loader())
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()


def fabric(epochs: int, clock: Clock) -> None:
    """The loop with Fabric's prepared parts."""
    from lightning.fabric import Fabric
    from torch import nn

    made = Fabric(accelerator="cpu", devices=1)
    bare = network()
    model, optimizer = made.setup(bare, sgd(bare.parameters(), clock))
    batches, loss_of = made.setup_dataloaders(loader()), nn.CrossEntropyLoss()
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            made.backward(loss_of(model(inputs), targets))
            optimizer.step()


def lightning(epochs: int, clock: Clock) -> None:
    """Lightning's Trainer with everything switched off that can be: no log, no progress, no checkpoint, no summary."""
    import logging
    import warnings

    import lightning
    from torch import nn

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss_of = network(), nn.CrossEntropyLoss()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            inputs, targets = batch
            loss: Tensor = self.loss_of(self.model(inputs), targets)
            return loss

        def configure_optimizers(self) -> Optimizer:
            return sgd(self.parameters(), clock)

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader())


def manyhosts(epochs: int, clock: Clock) -> None:
    """`mh.Trainer` as it comes: with progress lines, a record of every step, TensorBoard and snapshots."""
    from torch import nn

    import manyhosts as mh

    with tempfile.TemporaryDirectory() as folder:
        trainer = mh.Trainer(
            model=network(),
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda parameters: sgd(parameters, clock),
            data=mh.Data(train=digits(), batch_size=BATCH),
            run_dir=folder,
        )
        trainer.fit(f"{epochs} epochs")


def own_loop(epochs: int, clock: Clock) -> None:
    """`mh.Run` as it comes, with the same records."""
    from torch import nn

    import manyhosts as mh

    loss_of = nn.CrossEntropyLoss()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = loss_of(run.models["model"](batch[0]), batch[1])
        return found

    def step(run: Any) -> None:
        run.backward(loss)
        run.update()

    with tempfile.TemporaryDirectory() as folder:
        run = mh.Run(
            models=network,
            optimizers=lambda parameters: sgd(parameters, clock),
            data=mh.Data(train=digits(), batch_size=BATCH),
            run_dir=folder,
        )
        run.fit(step, f"{epochs} epochs")


CONTESTANTS: dict[str, Callable[[int, Clock], None]] = {
    "plain loop": plain,
    "manyhosts": manyhosts,
    "own loop (mh.Run)": own_loop,
    "Fabric": fabric,
    "Accelerate": accelerate,
    "Lightning": lightning,
}


def run_one(name: str, epochs: int) -> None:
    """One run in this process. The figure is the last line of the output."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = Clock()
    CONTESTANTS[name](epochs, clock)
    wanted = epochs * STEPS_PER_EPOCH
    assert len(clock.times) == wanted, f"{name} made {len(clock.times)} steps of {wanted}"
    print(json.dumps(clock.microseconds_per_step()))


def environment() -> Path:
    """The Python that has all of them, made on first use."""
    python = VENV / "bin" / "python"
    stamp = VENV / "installed"
    lists = [ROOT / "requirements" / "runtime.txt", Path(__file__).with_name("requirements.txt")]
    if not stamp.exists() or stamp.stat().st_mtime < max(path.stat().st_mtime for path in lists):
        print(f"installing those we compare with into {VENV.name} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *(word for path in lists for word in ("-r", str(path)))], check=True)
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], check=True)
        stamp.touch()
    return python


def measure(python: Path, name: str, epochs: int) -> float:
    words = [str(python), __file__, "--one", name, "--epochs", str(epochs)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def report(figures: dict[str, list[float]], steps: int, python: Path) -> str:
    """The recorded answer, as Markdown."""
    rounds = len(figures["plain loop"])
    rows = []
    for name, taken in figures.items():
        ratios = [own / plain for own, plain in zip(taken, figures["plain loop"], strict=True)]
        rows.append(
            f"| {name} | {statistics.median(taken):.0f} | {min(taken):.0f} - {max(taken):.0f} "
            f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} - {max(ratios):.2f} |"
        )
    packages = ["torch", "manyhosts", "accelerate", "lightning"]
    return "\n".join(
        [
            "# What one step costs",
            "",
            "Written by `python benchmarks/overhead.py`; its first lines say what is compared, and how.",
            "",
            f"{describe(python, packages)}",
            f"{rounds} rounds, each contestant once per round in a fresh process, {steps} steps a run.",
            "",
            "The ratio is that to the plain loop of the same round.",
            "",
            "| loop | microseconds per step, median | lowest - highest | ratio, median | lowest - highest |",
            "|---|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--one", choices=list(CONTESTANTS), help="run this one here, and print its figure")
    asked = parser.parse_args()
    if asked.one:
        run_one(asked.one, asked.epochs)
        return
    python = environment()
    figures: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    names = list(CONTESTANTS)
    for turn in range(asked.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:  # nobody always goes first
            figures[name].append(measure(python, name, asked.epochs))
        print(
            f"round {turn + 1}: " + ", ".join(f"{name} {taken[-1]:.0f}" for name, taken in figures.items()), flush=True
        )
    steps = asked.epochs * STEPS_PER_EPOCH - 1 - WARM_UP
    REPORT.write_text(report(figures, steps, python))
    print(REPORT.read_text())


if __name__ == "__main__":
    main()
