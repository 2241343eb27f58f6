"""Small training scripts for `manyhosts prove`: right ones, and broken ones with the cause that must be named."""

from __future__ import annotations

from dataclasses import dataclass

_HEAD = """
import os
import random
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import manyhosts as mh

SAMPLES = 64
_generator = torch.Generator().manual_seed(7)
inputs = torch.randn(SAMPLES, 8, generator=_generator)
targets = torch.randint(0, 4, (SAMPLES,), generator=_generator)


class Plain(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return inputs[index], targets[index]


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def fit(**changes):
    data = mh.Data(changes.pop("train", Plain()), batch_size=changes.pop("batch_size", 12), **changes.pop("data", {}))
    asked = {
        "model": network,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "data": data,
    }
    if "step" not in changes:
        asked["loss"] = nn.CrossEntropyLoss()
    mh.Trainer(**{**asked, **changes}).fit("5 epochs")

"""


@dataclass(frozen=True)
class Script:
    """The text of a script, and what `prove` is to say of it."""

    text: str
    promise: str = ""
    """The one that does not hold; empty where all do."""
    cause: str = ""
    """`Cause.kind`."""
    named: str = ""
    """Something that the sentence must say: the name of a buffer, of a generator."""

    @property
    def code(self) -> str:
        """The whole script."""
        return _HEAD + self.text


_TEACHER = """
class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = network(), network().requires_grad_(False)

    @torch.no_grad()
    def average(self):
        for own, other in zip(self.teacher.parameters(), self.student.parameters()):
            own.data.lerp_(other.data, 0.1)


def step(model, batch):
    logits = model.student(batch[0])
    loss = nn.functional.cross_entropy(logits, batch[1])
    return loss + nn.functional.mse_loss(logits, model.teacher(batch[0]).detach())


"""
RIGHT = {
    "plain": Script("fit()"),
    "a teacher that a callback averages": Script(
        _TEACHER
        + """
class Teach(mh.Callback):
    def after_step(self, moment):
        moment.model.average()


fit(model=Teacher, step=step, callbacks=[Teach(), mh.EMA(0.9)])
"""
    ),
    "adamw with weight decay": Script(
        "fit(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), clip_gradients=0.5,"
        " schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20))"
    ),
    "unseeded model": Script("fit(model=network())"),
    "samples drawn by weights": Script('fit(data={"weights": mh.balanced(targets)})'),
    "dropout": Script(
        "fit(model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 4)))"
    ),
    "virtual workers and dropout": Script(
        "fit(virtual_workers=3, model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.4), nn.Linear(16, 4)))"
    ),
    "batch norm": Script(
        "fit(model=lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)),"
        " optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))"
    ),
    "augmentation": Script("""
class Noisy(Plain):
    def __getitem__(self, index):
        return inputs[index] + 0.1 * torch.randn(8) + 0.1 * float(np.random.rand()) + random.random(), targets[index]


fit(train=Noisy())
"""),
    "attention with dropout": Script("""
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 6)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        query, key, value = self.inner(x.view(-1, 1, 4, 2)).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.2)
        return self.head(mixed.flatten(1))


fit(model=Attention)
"""),
    "noise in the step": Script("""
def step(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs + 0.1 * torch.randn_like(inputs)), targets)


fit(step=step)
"""),
    "slopes that are drawn": Script("""
fit(model=lambda: nn.Sequential(nn.Linear(8, 16), nn.RReLU(), nn.Linear(16, 4)))
"""),
    "an order with repeats": Script(
        'fit(data={"order": lambda epoch: np.random.permutation(np.resize(np.arange(40 + epoch), SAMPLES))})'
    ),
    "parts": Script("""
def blocks():
    made = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
    return nn.Sequential(*made, nn.Linear(8, 4))


fit(model=blocks, strategy="fsdp")
"""),
}

BROKEN = {
    "own generator of torch in the dataset": Script(
        """
class Noisy(Plain):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)

    def __getitem__(self, index):
        return inputs[index] + torch.randn(8, generator=self.generator), targets[index]


fit(train=Noisy())
""",
        "workers",
        "own generator in the dataset",
        "Noisy.generator",
    ),
    "generator of NumPy, made at import": Script(
        """
rng = np.random.default_rng(3)


class Noisy(Plain):
    def __getitem__(self, index):
        return inputs[index] + float(rng.normal()), targets[index]


fit(train=Noisy())
""",
        "workers",
        "own generator in the dataset",
        "rng",
    ),
    "moving average counted per pass": Script(
        """
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(8))
        self.inner = network()

    def forward(self, x):
        if self.training:
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.inner(x - self.average)


fit(model=Centred)
""",
        "workers",
        "does not run",
        "'average'",
    ),
    "a teacher averaged in the step": Script(
        _TEACHER
        + """
def averaging(model, batch):
    if model.training:
        model.average()
    return step(model, batch)


fit(model=Teacher, step=averaging, micro_batch_size=4)
""",
        "workers",
        "state changed in forward",
        "teacher.0",
    ),
    "a count of passes": Script(
        """
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.inner = network()

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (1 + 0.01 * self.calls)


fit(model=Counting)
""",
        "resume",
        "state changed in forward",
        "calls",
    ),
    "a sum over a fixed number": Script(
        """
def step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 12


fit(step=step)
""",
        "workers",
        "does not run",
        "the loss is no mean",
    ),
    "samples compared with each other": Script(
        """
def step(model, batch):
    codes = nn.functional.normalize(model(batch[0]), dim=1)
    return nn.functional.cross_entropy(codes @ codes.T / 0.5, torch.arange(len(codes)))


fit(step=step)
""",
        "workers",
        "does not run",
        "the loss is no mean",
    ),
    "own generator in collate": Script(
        """
generator = np.random.default_rng(1)


def masked(samples):
    batch = torch.utils.data.default_collate(samples)
    batch[0].mul_(float(generator.random()))
    return batch


fit(data={"collate": masked})
""",
        "resume",
        "own generator in collate",
        "generator",
    ),
    "samples compared by what is drawn for them": Script(
        """
def step(model, batch):
    outputs = model(batch[0])
    noise = torch.randn(len(outputs), 4)
    spread = noise.std(0, unbiased=False)
    return nn.functional.cross_entropy(outputs, batch[1]) + (spread * outputs.mean(0).abs()).sum()


fit(step=step, weight="samples")
""",
        "workers",
        "loss is no mean",
    ),
    "samples mixed in the model": Script(
        """
class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        return self.inner(x - x.mean(0))


fit(model=Mixing, weight="samples")  # or the trainer would refuse it
""",
        "workers",
        "samples mixed in the model",
    ),
    "samples mixed in a model in parts": Script(
        """
class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x - x.mean(0))
        return self.last(x)


fit(model=Mixing, weight="samples", strategy=mh.FSDP(zero=2))
""",
        "workers",
        "samples mixed in the model",
    ),
    "data by rank": Script(
        """
class Ranked(Plain):
    def __getitem__(self, index):
        return inputs[index] + 0.01 * int(os.environ.get("RANK", "0")), targets[index]


fit(train=Ranked())
""",
        "workers",
        "data depends on the worker",
    ),
    "data without a seed": Script(
        "noise = torch.randn(SAMPLES, 8)\nfit(train=TensorDataset(inputs + noise, targets))",
        "workers",
        "unseeded data",
    ),
    "an order of the dataset's own": Script(
        """
class Shuffled(Plain):
    def __init__(self):
        self.order = np.random.default_rng().permutation(SAMPLES)

    def __getitem__(self, index):
        return inputs[self.order[index]], targets[self.order[index]]


fit(train=Shuffled())
""",
        "resume",
        "unseeded data",
    ),
    "a count of readings": Script(
        """
class Counting(Plain):
    read = 0

    def __getitem__(self, index):
        self.read += 1
        return inputs[index] * (1 + 0.01 * self.read), targets[index]


fit(train=Counting())
""",
        "workers",
        "data depends on the order of reading",
        "read",
    ),
    "data by the clock": Script(
        """
class Timed(Plain):
    def __getitem__(self, index):
        return inputs[index] + (time.time() % 1), targets[index]


fit(train=Timed())
""",
        "resume",
        "data depends on the time",
    ),
    "a stream by the number of workers": Script(
        """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        random = torch.Generator().manual_seed(int(os.environ["WORLD_SIZE"]))
        for target in targets:
            yield torch.randn(8, generator=random), target


fit(train=Stream())
""",
        "workers",
        "data depends on the worker",
        "the stream gives other samples",
    ),
    "data by the loader process": Script(
        """
import multiprocessing


class Numbered(Plain):
    def __getitem__(self, index):
        return inputs[index] * (1 + sum(multiprocessing.current_process()._identity)), targets[index]


fit(train=Numbered(), data={"loader_workers": 2})
""",
        "workers",
        "loader processes",
    ),
    "weights without a seed": Script(
        "torch.seed()\nfit(model=network())",
        "workers",
        "initial weights",
    ),
    "schedule by the number of workers": Script(
        """
workers = int(os.environ.get("WORLD_SIZE", "1"))
fit(optimizer=lambda p: torch.optim.SGD(p, lr=0.1 * workers))
""",
        "workers",
        "learning rate",
    ),
    "batch per worker": Script(
        "fit(data={'batch_size_per_worker': 12}, batch_size=None)", "workers", "batch per worker"
    ),
    "local batch norm": Script(
        "fit(batch_norm='local', model=lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)))",
        "workers",
        "batch norm",
    ),
    "local steps": Script("fit(strategy=mh.LocalSGD(sync_every=2))", "workers", "strategy"),
    "weights changed on the leader": Script(
        """
model = network()


def drift(event):
    if type(event).__name__ == "StepDone" and event.step == 2:
        with torch.no_grad():
            model[2].bias.add_(0.01)


fit(model=model, listeners=[drift])
""",
        "ranks",
        "changed between steps",
        "2.bias",
    ),
    "model by rank": Script(
        """
class Ranked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        return self.inner(x) * (1 + int(os.environ.get("RANK", "0")))


fit(model=Ranked)
""",
        "workers",
        "model depends on the worker",
    ),
    "own generator in the step": Script(
        """
generator = torch.Generator().manual_seed(1)


def step(model, batch):
    noise = torch.randn(batch[0].shape, generator=generator)
    return nn.functional.cross_entropy(model(batch[0] + noise), batch[1])


fit(step=step)
""",
        "resume",
        "own generator in the step",
        "generator",
    ),
}

SMALL = Script(
    """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.side = network(), nn.Linear(8, 4)

    def forward(self, x):
        return self.main(x), self.side(x)


def step(model, batch):
    outputs, side = model(batch[0])
    return 1e5 * nn.functional.cross_entropy(outputs, batch[1]) + 1e-2 * side.var(0).sum().sqrt()


fit(model=Both, step=step, weight="samples", optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
""",
    "workers",
)
"""Samples are compared, with a gradient too small to be seen in float32, and as large as any with Adam."""
