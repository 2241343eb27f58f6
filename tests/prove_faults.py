"""Faults that mh.Trainer once had, put back from outside: right scripts that `manyhosts prove` must then find wrong.

Each text replaces a function of manyhosts by what it was with the fault, in the worker's process, and then trains as a
person would. Nothing in manyhosts knows of this.
"""

from __future__ import annotations

from dataclasses import dataclass

from prove_scripts import Script


@dataclass(frozen=True, kw_only=True)
class Fault(Script):
    """A script that puts a fault back, what `prove` is to say of it, and where the two trials depart first."""

    step: int
    """The first step that departs; 0 for the weights before it."""
    what: str
    """`Departure.what`."""
    tensor: str = ""
    """`Departure.name`."""


_NOTHING = "lambda *_, **__: None"
AFTER_THE_SNAPSHOT = 5
"""The first step of a resumed trial, with eight steps in all."""

_RESTORED = """
from manyhosts.training.state import snapshot_schedule

restore = snapshot_schedule.take_up


def with_less(parts, kept, **words):
    kept = dict(kept)
    change(parts, kept, words)
    restore(parts, kept, **words)


snapshot_schedule.take_up = with_less
"""

FAULTS = {
    "random numbers of collate without an address": Fault(
        text="""
from manyhosts.data import fetch

fetch.collated = lambda collate, samples, *_: collate(samples)


class AtOnce(Plain):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def masked(samples):
    batch = torch.utils.data.default_collate(samples)
    batch[0].mul_(torch.rand_like(batch[0]) > 0.2)
    return batch


fit(train=AtOnce(), data={"collate": masked})
""",
        promise="workers",
        cause="own generator in collate",
        named="torch.rand",
        step=1,
        what="loss",
    ),
    "random numbers of the step without an address": Fault(
        text=f"""
from manyhosts.data import randomness

randomness.seed_compute = {_NOTHING}


def mixed(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs + 0.1 * torch.randn_like(inputs)), targets)


fit(step=mixed)
""",
        promise="workers",
        cause="own generator in the step",
        named="torch.rand",
        step=1,
        what="loss",
    ),
    "random numbers of the update without an address": Fault(
        text="""
from manyhosts.training.loop import step

step.may_draw = lambda _: False


class Langevin(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.01 * torch.randn_like(parameter))


torch.manual_seed(int(os.environ["RANK"]))
fit(optimizer=lambda params: Langevin(params, lr=0.1), data={"loader_workers": 0})
""",
        promise="ranks",
        cause="unknown",
        step=1,
        what="parameter",
        tensor="0.weight",
    ),
    "gradients without the strides of their parameters": Fault(
        text="""
from manyhosts.communication import buckets

buckets.gradient_view = lambda flat, parameter: flat.view(parameter.shape)


def images():
    layers = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(4, 4))
    return layers.to(memory_format=torch.channels_last)


fit(model=images, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True))
""",
        promise="workers",
        step=1,
        what="parameter",
        tensor="1.weight",
    ),
    "class weights that do not count": Fault(
        text=f"""
from manyhosts.training.loop import counting
from manyhosts.loss import weighing

counting.LossWeights.heed = {_NOTHING}
weighing.class_mean = lambda _: None
fit(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0, 10.0])))
""",
        promise="workers",
        cause="loss is no mean",
        step=1,
        what="loss",
    ),
    "a loss that is a sum": Fault(
        text=f"""
from manyhosts.training.loop import counting
from manyhosts.loss import weighing

counting.LossWeights.heed = {_NOTHING}
weighing.refuse_sum = {_NOTHING}
fit(loss=nn.CrossEntropyLoss(reduction="sum"), optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
""",
        promise="micro",
        cause="loss is a sum",
        step=1,
        what="loss",
    ),
    "samples that are compared with each other": Fault(
        text=f"""
from manyhosts.training.loop import counting

counting.LossWeights.heed = {_NOTHING}


def contrasted(model, batch):
    codes = nn.functional.normalize(model(batch[0]), dim=1)
    return nn.functional.cross_entropy(codes @ codes.T / 0.5, torch.arange(len(codes)))


fit(step=contrasted)
""",
        promise="workers",
        cause="loss is no mean",
        step=1,
        what="loss",
    ),
    "ignored targets that count": Fault(
        text="""
from manyhosts.loss import weighing

weighing.class_mean = lambda _: None
targets[:40] = -100
fit()
""",
        promise="micro",
        cause="loss is no mean",
        step=1,
        what="loss",
    ),
    "parameters outside the model": Fault(
        text=f"""
from manyhosts.training.setup import build
from manyhosts.training.state import registry

build.check_optimized = {_NOTHING}
registry.by_name = lambda optimizer, _: optimizer.state_dict()  # which has no name for it
scale = nn.Parameter(torch.ones(4))


def scaled(model, batch):
    return nn.functional.cross_entropy(model(batch[0]) * scale, batch[1])


fit(step=scaled, optimizer=lambda params: torch.optim.SGD([*params, scale], lr=0.1))
""",
        promise="ranks",
        cause="parameters outside the model",
        named="shape (4)",
        step=1,
        what="parameter",
        tensor="(outside the model) 0",
    ),
    "buffers that differ between workers": Fault(
        text=f"""
from manyhosts.communication import model_watch
from manyhosts.training.state import snapshot_schedule

model_watch.ModelWatch.check = snapshot_schedule.compare_weights = {_NOTHING}


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(8))
        self.inner = network()

    def forward(self, x):
        if self.training:
            self.average = self.average * 0.9 + 0.1 * x.detach().mean(0)
        return self.inner(x) + self.average.sum() * 0


fit(model=Centred)
""",
        promise="ranks",
        cause="state changed in forward",
        named="average",
        step=1,
        what="buffer",
        tensor="average",
    ),
    "values of a step by their place": Fault(
        text="""
from manyhosts.strategies.tally import LocalSums

LocalSums.fits = lambda self, names: not self.of or len(self.sums) == len(names)
LocalSums.in_places = lambda self, names, device: [
    value.double().reshape(1) for value in self.sums.values()
][: len(names)]


def logged(model, batch):
    output = model(batch[0])
    loss = nn.functional.cross_entropy(output, batch[1])
    found = {"loss": loss, "mean": output.detach().mean() + 7}
    return found if int(batch[1][0]) else dict(reversed(found.items()))


fit(step=logged)
""",
        promise="workers",
        step=1,
        what="loss",
    ),
    "a resume without the momentum": Fault(
        text=f"""
def change(parts, kept, words):
    kept["optimizer"] = {{**kept["optimizer"], "state": {{}}}}

{_RESTORED}
fit()
""",
        promise="resume",
        cause="lost by the resume",
        named="momentum_buffer of 0.weight",
        step=AFTER_THE_SNAPSHOT,
        what="parameter",
        tensor="0.weight",
    ),
    "a resume without the schedule": Fault(
        text=f"""
def change(parts, kept, words):
    words["schedule"] = False
    for group in kept["optimizer"]["param_groups"]:
        group["lr"] = group["initial_lr"]

{_RESTORED}
fit(schedule=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
""",
        promise="resume",
        cause="lost by the resume",
        named="learning rate",
        step=AFTER_THE_SNAPSHOT,
        what="learning rate",
    ),
    "a resume without buffers that are not persistent": Fault(
        text=f"""
from manyhosts.communication import model_watch


def change(parts, kept, words):
    kept["buffers"] = {{}}

{_RESTORED}


class Slowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("size", torch.ones(1), persistent=False)
        self.inner = network()

    def forward(self, x):
        if self.training:
            self.size.mul_(0.9)
        return self.inner(x) * self.size


fit(model=Slowing)
""",
        promise="resume",
        cause="not in the snapshot",
        named="size",
        step=AFTER_THE_SNAPSHOT - 1,
        what="buffer",
        tensor="size",
    ),
    "a resume without the weights of the loss": Fault(
        text=f"""
def change(parts, kept, words):
    kept["loss"] = {{name: torch.zeros_like(value) for name, value in kept["loss"].items()}}

{_RESTORED}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs * self.scale, targets)


fit(loss=Scaled())
""",
        promise="resume",
        cause="not in the snapshot",
        named="loss.scale",
        step=AFTER_THE_SNAPSHOT - 1,
        what="parameter",
        tensor="loss.scale",
    ),
    "samples that are taken twice after a resume": Fault(
        text="""
from dataclasses import replace
from manyhosts.training.state.run_state import RunState

read = RunState.from_dict


def a_step_too_early(kept, stream):
    return read({**kept, "sample": kept["sample"] - 12}, stream)


RunState.from_dict = a_step_too_early
fit()
""",
        promise="resume",
        cause="samples",
        named="after the resume",
        step=AFTER_THE_SNAPSHOT,
        what="samples",
    ),
    "statistics that a checkpoint counts twice": Fault(
        text="""
from torch.utils.checkpoint import checkpoint
from manyhosts.communication import shared_norm

shared_norm._computed_again = lambda: False


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh())
        self.inner = network()

    def forward(self, x):
        return self.inner(checkpoint(self.norm, x, use_reentrant=False))


fit(model=Checkpointed, virtual_workers=4)
""",
        promise="workers",
        step=1,
        what="buffer",
        tensor="norm.1.running_mean",
    ),
}
