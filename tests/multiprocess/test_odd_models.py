"""Models that keep more than trained weights: on one worker and two the same, and resumed as if nothing had happened.

What a kind of model does once per step it does in a callback; what it does in `forward` is right, refused or said.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import images_and_labels, network
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ManyhostsError
from manyhosts.events import Note

pytestmark = pytest.mark.multiprocess
STEPS = 10


class Pair(nn.Module):
    """A network that is trained, and one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.online = network()
        self.head = nn.Linear(10, 10)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(16, 10), dim=1))
        self.register_buffer("end", torch.zeros((), dtype=torch.int64))
        self.scale = 1.0
        """A plain number, such as a running mean that somebody keeps."""


class Act(mh.Callback):
    """Calls a function with the model after each step."""

    def __init__(self, act: Callable[[Any, Any], None]) -> None:
        self.act = act

    def after_step(self, moment: Any) -> None:
        with torch.no_grad():
            self.act(moment.model, moment)


def follow(model: Any, share: float) -> None:
    for own, other in zip(model.target.parameters(), model.online.parameters(), strict=True):
        own.lerp_(other, share)


def teacher_loss(model: Any, batch: Any) -> Tensor:
    logits = model.online(batch[0])
    return functional.cross_entropy(logits, batch[1]) + functional.mse_loss(logits, model.target(batch[0]).detach())


def byol_loss(model: Any, batch: Any) -> Tensor:
    predicted = functional.normalize(model.head(model.online(batch[0])), dim=1)
    with torch.no_grad():
        wanted = functional.normalize(model.target(batch[0].flip(-1)), dim=1)
    return 2 - 2 * (predicted * wanted).sum(1).mean()


def queue_loss(model: Any, batch: Any) -> Tensor:
    codes = functional.normalize(model.online(batch[0]), dim=1)
    with torch.no_grad():
        keys = functional.normalize(model.target(batch[0]), dim=1)
    positive, negative = (codes * keys).sum(1, keepdim=True), codes @ model.queue.clone().T
    return functional.cross_entropy(
        torch.cat([positive, negative], 1) / 0.2, torch.zeros(len(codes), dtype=torch.int64)
    )


def enqueue(model: Any, moment: Any) -> None:
    """Keys of samples that all workers know: those that the step's own number names."""
    follow(model, 0.1)
    images, _ = images_and_labels(4, first=moment.step * 4)
    place = int(model.end)
    model.queue[place : place + 4] = functional.normalize(model.target(images), dim=1)
    model.end.fill_((place + 4) % 16)


def copied_each_third(model: Any, moment: Any) -> None:
    if moment.step % 3 == 0:
        model.target.load_state_dict(model.online.state_dict())


class Scale(mh.Callback):
    """A running number of Python's in the model, kept in snapshots by the callback that counts it."""

    def __init__(self) -> None:
        self.value = 1.0

    def begin(self, moment: Any) -> None:
        moment.model.scale = self.value

    def after_step(self, moment: Any) -> None:
        norm = float(moment.model.head.weight.norm())
        moment.model.scale = self.value = 0.9 * self.value + 0.1 * norm

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


def scaled_loss(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model.head(model.online(batch[0])) * model.scale, batch[1])


def lookahead(slow: dict[str, Tensor]) -> mh.Callback:
    class Lookahead(mh.Callback):
        def attach(self, moment: Any) -> None:
            slow.update({name: each.detach().clone() for name, each in moment.model.online.named_parameters()})

        def after_step(self, moment: Any) -> None:
            if moment.step % 4 == 0:
                with torch.no_grad():
                    for name, each in moment.model.online.named_parameters():
                        slow[name].lerp_(each, 0.5)
                        each.copy_(slow[name])

        def state_dict(self) -> dict[str, Any]:
            return {"slow": slow}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            for name, value in state["slow"].items():
                slow[name].copy_(value)

    return Lookahead()


def clipped(model: Any, moment: Any) -> None:
    for each in model.online.parameters():
        each.clamp_(-0.2, 0.2)


def noisy(model: Any, moment: Any) -> None:
    for each in model.online.parameters():
        each.add_(torch.randn_like(each), alpha=1e-3)


def reset_head(model: Any, moment: Any) -> None:
    if moment.step == 6:
        model.head.reset_parameters()


def decayed(model: Any, moment: Any) -> None:
    for group in moment.optimizer.param_groups:
        group["lr"] *= 0.95


def plain_loss(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model.head(model.online(batch[0])), batch[1])


def pruned(model: Any, moment: Any) -> None:
    weight = model.online[-1].weight
    weight.mul_(weight.abs() > 0.01)


MODELS: dict[str, tuple[Callable[..., Tensor], Callable[[], list[mh.Callback]]]] = {
    "mean teacher": (teacher_loss, lambda: [Act(lambda model, _: follow(model, 0.1))]),
    "byol": (byol_loss, lambda: [Act(lambda model, _: follow(model, 0.05))]),
    "moco, with a queue": (queue_loss, lambda: [Act(enqueue)]),
    "target network, copied": (teacher_loss, lambda: [Act(copied_each_third)]),
    "running number of python": (scaled_loss, lambda: [Scale()]),
    "lookahead": (plain_loss, lambda: [lookahead({})]),
    "weights clipped, as a critic's": (plain_loss, lambda: [Act(clipped)]),
    "noise on weights": (plain_loss, lambda: [Act(noisy)]),
    "head made again": (plain_loss, lambda: [Act(reset_head)]),
    "rate changed by a callback": (plain_loss, lambda: [Act(decayed)]),
    "pruned each step": (plain_loss, lambda: [Act(pruned)]),
    "polyak, evaluated": (plain_loss, lambda: [mh.EMA(0.9)]),
    "swa and frozen": (plain_loss, lambda: [mh.SWA("4 steps", every="2 steps"), mh.Freeze("head", until="5 steps")]),
}


def make(path: Path, name: str) -> mh.Trainer:
    loss, callbacks = MODELS[name]
    return mh.Trainer(
        model=Pair,
        step=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        data=mh.Data(TensorDataset(*images_and_labels(60)), batch_size=12),
        snapshots=mh.Snapshots(every="1 step", keep=50),
        weight="samples",
        callbacks=callbacks(),
        run_dir=path,
    )


def fitted(rank: int, folder: Path) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """By name: the weights of a whole run, and of the same resumed in the middle of its second epoch."""
    found = {}
    for number, name in enumerate(MODELS):
        path, again = folder / f"{number}", folder / f"{number}-again"
        whole = make(path, name)
        whole.fit(f"{STEPS} steps")
        if rank == 0:
            half = folder / f"{number}-half"
            shutil.copytree(path, half)
            for each in (half / "snapshots").iterdir():
                if int(each.name.removeprefix("step-")) > 7:
                    shutil.rmtree(each)
            half.rename(again)
        while not again.exists():
            time.sleep(0.01)
        resumed = make(again, name)
        resumed.fit(f"{STEPS} steps")
        kept = [
            {
                **{name: value.clone() for name, value in each.model.state_dict().items()},
                **{name: value.clone() for name, value in each.components.callbacks.tensors().items()},
            }
            for each in (whole, resumed)
        ]
        found[name] = (kept[0], kept[1])
    return found


def test_what_a_model_keeps_is_the_same_on_two_workers_and_after_a_resume(tmp_path: Path) -> None:
    one = run_ranks(1, fitted, tmp_path / "one")[0]
    two = run_ranks(2, fitted, tmp_path / "two")
    for name in MODELS:
        for answer in (one, *two):
            whole, resumed = answer[name]
            for key, value in whole.items():
                assert torch.equal(value, resumed[key]), (name, key)
        for key, value in one[name][0].items():
            away = (two[0][name][0][key].double() - value.double()).abs().max()
            assert away < 2e-5, (name, key, away)


class Within(nn.Module):
    """Does in its forward pass what should happen once per step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.online, self.kind = network(), kind
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("running", torch.zeros(1, 8, 8))

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.online(images)
        if self.training:
            with torch.no_grad():
                if self.kind == "average":
                    follow(self, 0.1)
                if self.kind == "counter in a buffer":
                    self.seen += 1
                if self.kind == "running mean of samples":
                    self.running.lerp_(images.mean(0), 0.1)
                if self.kind == "trained weights":
                    self.online[-1].weight.data.clamp_(-0.05, 0.05)
        return out + 0 * self.target(images).detach() + 0 * self.seen + 0 * self.running.sum()


def within(rank: int, folder: Path, kind: str, micro: int | None) -> str:
    said: list[str] = []
    try:
        mh.Trainer(
            model=lambda: Within(kind),
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
            data=mh.Data(TensorDataset(*images_and_labels(60)), batch_size=12),
            micro_batch_size=micro,
            listeners=[lambda event: said.append(event.text) if isinstance(event, Note) else None],
            run_dir=folder,
        ).fit("6 steps")
    except ManyhostsError as error:
        said.append(str(error))
    return "\n".join(said)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_a_forward_pass_keeps_is_said_or_refused_where_a_step_has_several_pieces(
    workers: int, tmp_path: Path
) -> None:
    for number, (kind, named) in enumerate(
        {
            "average": "target.0.weight",
            "counter in a buffer": "seen",
            "running mean of samples": "running",
            "trained weights": "online.4.weight",
        }.items()
    ):
        said = run_ranks(workers, within, tmp_path / str(number), kind, 3)[0]
        assert named in said, (kind, said)
