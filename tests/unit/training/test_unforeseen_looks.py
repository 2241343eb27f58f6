"""Losses and models that nobody had in mind when looks were written: whole batches against their parts, and looks.

What is `said` of each stands in the table; a test holds gradients of a batch against those of its parts in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhosts.data.steps import LoadedPiece, PiecePlan
from manyhosts.loss.comparison import CHANGES_GRADIENTS, KEEPS, Look, look_at
from manyhosts.loss.compute import ForwardPass
from manyhosts.training.loop.counting import NO_MEAN, choose

WIDE, CLASSES, COUNT = 8, 4, 12


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def batch_of(count: int = COUNT) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    return torch.randn(count, WIDE, generator=made), torch.randint(0, CLASSES, (count,), generator=made)


def each_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


class Scaled(torch.autograd.Function):
    """The same forward; backward, as many times as there are rows."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * len(gradient)


class Wrapped(nn.Module):
    """A small network whose inputs `change`s."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = small(), change

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.change(x))


class Masks(nn.Module):
    """Keeps a mask for each shape that it has seen."""

    def __init__(self, by: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.by, self.masks = small(), by, dict[Any, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if self.by(x) not in self.masks:
            self.masks[self.by(x)] = torch.ones(x.shape[1]).to(x)
        return self.inner(x * self.masks[self.by(x)])


class Queue(nn.Module):
    """MoCo: codes of the last batches in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.register_buffer("queue", torch.ones(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        codes = self.inner(x)
        scores = codes @ self.queue.T
        if self.training:
            self.queue = torch.cat([codes.detach(), self.queue])[:8]
        return scores[:, :CLASSES]


class Uncertain(nn.Module):
    """Weighs two losses by numbers that it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scales = small(), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.scales


class Waves(nn.Module):
    """Complex weights."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, CLASSES, dtype=dtype) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


def hooked(model: nn.Module, batch: Any) -> Tensor:
    """The gradient of an activation is brought to one length, over the batch."""
    hidden = model[0](batch[0])
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient / gradient.norm() * 0.1)
    return entropy(model[2](model[1](hidden)), batch[1])


def called(model: nn.Module, batch: Any) -> Tensor:
    weights = dict(model.named_parameters())
    return entropy(torch.func.functional_call(model, weights, (batch[0],)), batch[1])


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    return entropy(outputs, targets) + (outputs[1:] - outputs[:-1]).square().mean()


def class_means(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = each_loss(outputs, targets)
    return torch.stack([losses[targets == each].mean() for each in targets.unique()]).mean()


def baseline(outputs: Tensor, targets: Tensor) -> Tensor:
    """REINFORCE with the mean reward of the batch."""
    reward = outputs.detach().square().sum(1)
    return ((reward - reward.mean()) * each_loss(outputs, targets)).mean()


def self_paced(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = each_loss(outputs, targets)
    return (losses.detach().softmax(0) * losses).sum()


def macro_f1(outputs: Tensor, targets: Tensor) -> Tensor:
    shares, wanted = outputs.softmax(1), functional.one_hot(targets, CLASSES).to(outputs)
    return 1 - (2 * (shares * wanted).sum(0) / (shares + wanted).sum(0)).mean()


def forked(model: nn.Module, batch: Any) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        noise = torch.randn(WIDE).to(batch[0])
    return entropy(model(batch[0] + noise), batch[1])


def of_uncertain(model: nn.Module, batch: Any) -> Tensor:
    outputs, scales = model(batch[0])
    return entropy(outputs, batch[1]) * (-scales[0]).exp() + outputs.square().mean() * (-scales[1]).exp() + scales.sum()


def by_graph(model: nn.Module, batch: Any) -> Tensor:
    """Nodes of graphs, their mean for each graph."""
    sizes = batch[1] + 1
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    nodes = model(batch[0][owner])
    return entropy(torch.zeros(len(sizes), CLASSES).to(nodes).index_add(0, owner, nodes) / sizes[:, None], batch[1])


def by_node(model: nn.Module, batch: Any) -> Tensor:
    owner = torch.arange(len(batch[1])).repeat_interleave(batch[1] + 1)
    return entropy(model(batch[0][owner]), batch[1][owner])


def with_parametrization(which: Any) -> nn.Module:
    model = small()
    which(model[0])
    return model


@dataclass(frozen=True)
class Case:
    truth: bool
    """Whether the gradient of a batch is the mean of those of its parts."""
    said: str
    loss: Any = entropy
    step: Any = None
    model: Callable[[], nn.Module] = small


CASES = {
    "divided by its own value": Case(False, "gradient", lambda o, t: (x := entropy(o, t)) / x.detach()),
    "backward by the rows": Case(False, "gradient", lambda o, t: entropy(Scaled.apply(o), t)),
    "an activation's hook": Case(False, "gradient", step=hooked),
    "functional_call": Case(True, "right", step=called),
    "random numbers apart": Case(True, "right", step=forked),
    "median": Case(False, "wrong", lambda o, t: each_loss(o, t).median()),
    "hardest half": Case(False, "wrong", lambda o, t: each_loss(o, t).topk(max(1, len(t) // 2))[0].mean()),
    "neighbours in the batch": Case(False, "wrong", smooth),
    "mean of the means by class": Case(False, "wrong", class_means),
    "baseline of the batch": Case(False, "wrong", baseline),
    "self-paced": Case(False, "wrong", self_paced),
    "macro F1": Case(False, "wrong", macro_f1),
    "by the size of the batch": Case(False, "wrong", lambda o, t: entropy(o, t) * len(t) / 32),
    "square of a mean": Case(False, "wrong", lambda o, t: entropy(o, t) + o.mean().square()),
    "columns against rows": Case(False, "wrong", lambda o, t: (o[:, :1] - t.to(o)).square().mean()),
    "softmax over the batch": Case(False, "wrong", lambda o, t: -(o.log_softmax(0)[torch.arange(len(t)), t]).mean()),
    "largest of the batch": Case(False, "wrong", model=lambda: Wrapped(lambda x: x - x.amax(0))),
    "batch_norm as a function": Case(
        False, "wrong", model=lambda: Wrapped(lambda x: functional.batch_norm(x, None, None, training=True))
    ),
    "sorted by the batch": Case(False, "wrong", model=lambda: Wrapped(lambda x: x + x.sort(0)[0])),
    "mask by columns": Case(True, "right", model=lambda: Masks(lambda x: x.shape[1])),
    "mask by rows": Case(True, "right", model=lambda: Masks(len)),
    "a queue of codes": Case(False, "unknown", model=Queue),
    "weights of losses learned": Case(True, "right", step=of_uncertain, model=Uncertain),
    "complex weights": Case(True, "right", model=Waves),
    "graphs": Case(True, "right", step=by_graph),
    "graphs, by node": Case(False, "wrong", step=by_node),
    "weight norm": Case(True, "right", model=lambda: with_parametrization(nn.utils.parametrizations.weight_norm)),
    "spectral norm": Case(True, "right", model=lambda: with_parametrization(nn.utils.parametrizations.spectral_norm)),
}


def said_of(case: Case) -> str:
    torch.manual_seed(0)
    model = case.model().train()
    forward = ForwardPass(None if case.step else case.loss, case.step, seed=0, context=nullcontext)
    piece = LoadedPiece(PiecePlan(0, 0, range(COUNT), 1.0), list(batch_of()))  # type: ignore[arg-type]
    before = {name: each.clone() for name, each in model.state_dict().items()}
    seen = look_at(Look(forward, model, torch.device("cpu"), gradients=True), piece, None)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    if seen.findings.get(CHANGES_GRADIENTS):
        return "gradient"
    if seen.because or seen.findings.get(KEEPS):
        return "unknown"
    return "wrong" if choose(seen) == NO_MEAN else "right"


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_is_never_that_all_is_well_where_it_is_not(name: str) -> None:
    case = CASES[name]
    assert said_of(case) == case.said
    assert case.truth or case.said != "right"
    assert not case.truth or case.said not in ("wrong", "gradient")


def gradient(case: Case, model: nn.Module, begin: int, end: int) -> Tensor:
    inputs, targets = batch_of()
    batch = [inputs[begin:end].double(), targets[begin:end]]
    own = copy.deepcopy(model)
    loss = case.step(own, batch) if case.step is not None else case.loss(own(batch[0]), batch[1])
    found = torch.autograd.grad(loss, list(own.parameters()))
    return torch.cat([(torch.view_as_real(each) if each.is_complex() else each).flatten() for each in found])


def test_truth_is_that_of_gradients() -> None:
    for name, case in CASES.items():
        torch.manual_seed(1)
        model = case.model().train()
        model = Waves(torch.complex128) if name == "complex weights" else model.double()
        if name == "a queue of codes":
            continue  # of two pieces, the second sees what the first has left
        torch.set_default_dtype(torch.float64)
        try:
            whole = gradient(case, model, 0, COUNT)
            parts = (5 * gradient(case, model, 0, 5) + 7 * gradient(case, model, 5, COUNT)) / COUNT
        finally:
            torch.set_default_dtype(torch.float32)
        assert ((whole - parts).norm() <= 1e-6 * whole.norm()) == case.truth, name
