"""Contrastive learning, after SimCLR (Chen et al. 2020): the loss looks at all samples of the batch, on any worker.

manyhosts run --workers 2 examples/contrastive.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

import manyhosts as mh


def seen_twice(batch):
    """Two rows for each sample, of two views of it: shifted by up to a pixel, with noise."""
    (images,) = batch
    views = []
    for _ in range(2):
        shift = [int(each) for each in torch.randint(-1, 2, (2,))]
        views.append(torch.roll(images, shift, (2, 3)) + 0.1 * torch.randn_like(images))
    return tuple(normalize(run.models["encoder"](view), dim=1) for view in views)


def told_apart(rows):
    """How far each view is from finding the other view of its sample among all views of the batch."""
    first, second = rows
    everything = torch.cat([first, second])
    likeness = everything @ everything.T / 0.2
    likeness = likeness.masked_fill(torch.eye(len(everything), dtype=torch.bool), -torch.inf)
    others = torch.arange(len(everything)).roll(len(first))
    return {"loss": cross_entropy(likeness, others), "found": (likeness.argmax(1) == others).float().mean()}


def step(run):
    """One step: the rows of all parts first, then the loss, then each part's backward pass."""
    run.log(
        **{name: value for name, value in run.backward(seen_twice, over_batch=told_apart).items() if name == "found"}
    )
    run.update()


images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
run = mh.Run(
    models={
        "encoder": lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
            nn.Linear(64, 32),
        )
    },
    optimizers=lambda params: torch.optim.AdamW(params, 3e-3),
    schedulers={"encoder": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)},
    data=mh.Data(train=TensorDataset(images), batch_size=96),
    virtual_workers=6,
)  # fmt: skip

if __name__ == "__main__":
    run.fit(step, "5 epochs")
