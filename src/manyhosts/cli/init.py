"""`manyhosts init`: writes a train.py that runs."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import click

from manyhosts.errors import ConfigError

TRAIN = '''"""Classifies handwritten digits: 1,797 real images of 8 x 8 pixels."""

import manyhosts as mh
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
digits = TensorDataset(images, torch.tensor(labels))
train, validation, test = random_split(digits, [0.7, 0.15, 0.15], torch.Generator().manual_seed(0))


def network() -> nn.Module:  # a function: the weights come from the run's seed, so that every run begins alike
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


def main() -> None:
    trainer = mh.Trainer(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        data=mh.Data(train=train, validation=validation, test=test, batch_size=64),
        metrics={"accuracy": MulticlassAccuracy(num_classes=10)},
    )
    trainer.fit("10 epochs")
    mh.print(trainer.test())  # once, on any number of workers


if __name__ == "__main__":  # so that a notebook or a test may import `network` without training it
    main()
'''


LOOP = '''"""A GAN on handwritten digits of 8 x 8 pixels: two models and two optimizers in a loop of its own.

Its two models work against each other, so its loss need not fall.
"""

import manyhosts as mh
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

NOISE = 16
images = torch.tensor(load_digits().images, dtype=torch.float32).view(-1, 64) / 16


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def told_apart(batch):  # the mean over the samples of `batch`; called for each part of the global batch
    (real,) = batch
    made = run.models["generator"](torch.randn(len(real), NOISE)).detach()
    return softplus(-run.models["critic"](real)).mean() + softplus(run.models["critic"](made)).mean()


def fooled(batch):
    made = run.models["generator"](torch.randn(len(batch[0]), NOISE))
    return softplus(-run.models["critic"](made)).mean()


def step(run):  # all or nothing: it may be called again when a worker is lost, so it changes nothing else
    run.backward(told_apart, "critic")
    run.update("critic")
    run.backward(fooled, "generator")
    run.update("generator")


run = mh.Run(
    models={"generator": generator, "critic": critic},
    optimizers={name: lambda params: torch.optim.Adam(params, lr=1e-3) for name in ("generator", "critic")},
    data=mh.Data(train=TensorDataset(images), batch_size=64),
    virtual_workers=4,  # the same bits on 1 to 4 workers
)

if __name__ == "__main__":
    run.fit(step, "10 epochs")
'''


@click.command()
@click.argument("folder", default=".", type=click.Path(path_type=Path), metavar="[DIR]")
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
@click.option("--loop", is_flag=True, help="Write one with a loop of its own (mh.Run).")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
def init(folder: Path, dry_run: bool, loop: bool, trace: bool) -> int:
    """Write a train.py that runs into DIR (default: here). It never overwrites one."""
    path = folder / "train.py"
    if "" in (click.get_current_context().find_object(list) or ()):
        raise ConfigError("DIR is empty", where="DIR", fix="name a folder, or leave it out: train.py is written here")
    if folder.suffix == ".py":
        fix = "name a folder: `manyhosts init` writes train.py here, `manyhosts init DIR` into DIR"
        raise ConfigError(
            f"{folder} is the name of a script, and train.py is written into a folder", where="DIR", fix=fix
        )
    if path.exists():
        raise ConfigError(
            "there is a train.py already", where=str(path), fix="name another folder: `manyhosts init DIR`"
        )
    script = LOOP if loop else TRAIN
    if dry_run:
        print(f"--- {path}\n{script}", end="")
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(script)
    except OSError as cause:
        fix = "name a folder that you may write in: `manyhosts init DIR`"
        raise ConfigError(f"nothing can be written there: {cause.strerror}", where=str(path), fix=fix) from cause
    typed = shlex.quote(str(path))
    print(f"Wrote {path}. Now:")
    if importlib.util.find_spec("sklearn") is None:
        print("  pip install scikit-learn               # the digits come inside it")
    print(f"  python {typed}                   # one process\n  manyhosts run --workers 2 {typed}")
    return 0
