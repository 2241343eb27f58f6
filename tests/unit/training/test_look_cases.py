"""Sixty losses, models and steps of all kinds: each is found right, found wrong, or said not to have been tried.

`truth` is written down by hand, and where nothing is drawn held against gradients: a case is right where the gradient
of a batch is the mean of the gradients of its parts, in float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhosts.data import randomness
from manyhosts.data.steps import LoadedPiece, PiecePlan
from manyhosts.loss.comparison import CHANGES_GRADIENTS, KEEPS, Look, look_at
from manyhosts.loss.compute import ForwardPass
from manyhosts.training.loop.counting import NO_MEAN, choose, not_tried

WIDE, CLASSES, COUNT = 8, 4, 12


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def batch_of(count: int = COUNT) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    return torch.randn(count, WIDE, generator=made), torch.randint(0, CLASSES, (count,), generator=made)


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.into, self.out, self.dropout = nn.Linear(2, 12), nn.Linear(4, CLASSES), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x.reshape(len(x), 4, 2)).unsqueeze(1).chunk(3, -1)
        p = self.dropout if self.training else 0.0
        return self.out(functional.scaled_dot_product_attention(q, k, v, dropout_p=p).squeeze(1).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.LSTM(2, 6, num_layers=2, dropout=0.2, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x.reshape(len(x), 4, 2))[0].mean(1))


class Experts(nn.Module):
    """A mixture of experts; `balance` is over the batch, as it is published."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDE, 3), nn.ModuleList(nn.Linear(WIDE, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(x).softmax(1)
        balance = 3 * (shares.mean(0) * functional.one_hot(shares.argmax(1), 3).to(x).mean(0)).sum()
        return torch.stack([each(x) for each in self.experts], 1).mul(shares.unsqueeze(2)).sum(1), balance


class InHalves(nn.Module):
    """Autocast within."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x)


class KeepsPicture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.picture, self.all_of_them = small(), torch.zeros(1), dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.picture = self.inner(x)
        self.all_of_them = {"last": self.picture}
        return self.picture


class Picks(nn.Module):
    """Samples that are chosen at random, only in training."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + x[torch.randperm(len(x))]) / 2 if self.training else x


class Permutes(nn.Module):
    """Features in a random order, the same for all samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, torch.randperm(x.shape[1])]


class OwnNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3) if self.training else x


class Counted(nn.Module):
    """Something in it depends on how often it was called, and is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = small(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (1 + 0.1 * self.calls)


def with_(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers, small())


def entropy(outputs: Tensor, targets: Tensor, **more: Any) -> Tensor:
    return functional.cross_entropy(outputs, targets, **more)


def info_nce(outputs: Tensor, targets: Tensor) -> Tensor:
    found = functional.normalize(outputs)
    return functional.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))


def clip(outputs: Tensor, targets: Tensor) -> Tensor:
    one, other = (functional.normalize(each) for each in outputs.chunk(2, 1))
    scores, own = one @ other.T * 5, torch.arange(len(one))
    return (functional.cross_entropy(scores, own) + functional.cross_entropy(scores.T, own)) / 2


def hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    apart, same = torch.cdist(outputs, outputs), targets[:, None] == targets
    return (apart.masked_fill(~same, 0).amax(1) - apart.masked_fill(same, 9).amin(1) + 1).relu().mean()


def triplets(outputs: Tensor, targets: Tensor) -> Tensor:
    anchor, positive, negative = outputs, outputs * 0.9, outputs.roll(1, 1)
    return functional.triplet_margin_loss(anchor, positive, negative)


def supervised_contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    found = functional.normalize(outputs)
    scores = (found @ found.T / 0.5 - 9 * torch.eye(len(found))).log_softmax(1)
    same = (targets[:, None] == targets).to(scores) - torch.eye(len(found)).to(scores)
    return -(scores * same).sum(1).div(same.sum(1).clamp(min=1)).mean()


def barlow(outputs: Tensor, targets: Tensor) -> Tensor:
    one = (outputs - outputs.mean(0)) / (outputs.std(0) + 1e-4)
    return ((one.T @ one / len(one)) - torch.eye(CLASSES)).square().sum()


def vicreg(outputs: Tensor, targets: Tensor) -> Tensor:
    return (1 - (outputs.var(0) + 1e-4).sqrt()).relu().mean() + outputs.square().mean()


def clusters(outputs: Tensor, targets: Tensor) -> Tensor:
    """Deep embedded clustering: the target distribution is over the batch."""
    shares = outputs.softmax(1)
    wanted = shares.square() / shares.sum(0)
    return functional.kl_div(shares.log(), (wanted / wanted.sum(1, keepdim=True)).detach(), reduction="batchmean")


def dice(outputs: Tensor, targets: Tensor) -> Tensor:
    found, wanted = outputs.sigmoid(), functional.one_hot(targets, CLASSES).to(outputs)
    return 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())


def dice_each(outputs: Tensor, targets: Tensor) -> Tensor:
    found, wanted = outputs.sigmoid(), functional.one_hot(targets, CLASSES).to(outputs)
    return (1 - 2 * (found * wanted).sum(1) / (found.sum(1) + wanted.sum(1))).mean()


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = functional.cross_entropy(outputs, targets, reduction="none")
    return ((1 - (-loss).exp()).square() * loss).mean()


def focal_by_positives(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = functional.cross_entropy(outputs, targets, reduction="none")
    return loss.sum() / (targets > 0).sum().clamp(min=1)


def distilled(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.kl_div(outputs.log_softmax(1), outputs.detach().roll(1, 1).softmax(1), reduction="batchmean")


def distilled_wrongly(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.kl_div(outputs.log_softmax(1), outputs.detach().roll(1, 1).softmax(1), reduction="sum")


def ranks(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each pair of the batch."""
    return (outputs[:, 0, None] - outputs[:, 0] + 0.1 * (targets[:, None] - targets)).relu().mean()


def ranks_within(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.margin_ranking_loss(outputs[:, 0], outputs[:, 1], targets.sign() * 2.0 - 1, margin=0.1)


def listwise(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(targets.to(outputs).softmax(0) * outputs[:, 0].log_softmax(0)).sum()


def class_weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, weight=torch.arange(1.0, 5).to(outputs))


def ctc(outputs: Tensor, targets: Tensor) -> Tensor:
    log = outputs.reshape(len(outputs), 4, 1).expand(-1, 4, 3).log_softmax(2) + outputs.unsqueeze(2)
    ones = torch.full((len(outputs),), 4)
    words = targets.clamp(1, 2).unsqueeze(1)
    return functional.ctc_loss(log.transpose(0, 1), words, ones, ones // 4, reduction="none").mean()


def ctc_mean_of_words(outputs: Tensor, targets: Tensor) -> Tensor:
    log = outputs.reshape(len(outputs), 4, 1).expand(-1, 4, 3).log_softmax(2) + outputs.unsqueeze(2)
    ones, words = torch.full((len(outputs),), 4), 1 + (targets > 1).long()
    given = torch.tensor([1, 2]).repeat(len(outputs), 1)
    return functional.ctc_loss(log.transpose(0, 1), given, ones, words, reduction="sum") / words.sum()


def mixed_up(model: nn.Module, batch: Any) -> Tensor:
    other, share = torch.randperm(len(batch[0])), np.random.beta(1, 1)
    outputs = model(share * batch[0] + (1 - share) * batch[0][other])
    return share * entropy(outputs, batch[1]) + (1 - share) * entropy(outputs, batch[1][other])


def mixed_with_the_next(model: nn.Module, batch: Any) -> Tensor:
    share = torch.distributions.Beta(1.0, 1.0).sample()
    return entropy(model(share * batch[0] + (1 - share) * batch[0].flip(0)), batch[1])


def scaled_by_beta(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model(batch[0] * torch.distributions.Beta(2.0, 2.0).sample((len(batch[0]), 1))), batch[1])


def noise_of_numpy(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model(batch[0] + torch.from_numpy(np.random.randn(*batch[0].shape)).to(batch[0])), batch[1])


def layer_of_python(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model(batch[0]) * (1.0 if random.random() < 0.5 else 0.9), batch[1])


def sampled_negatives(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch[0])
    chosen = torch.multinomial(torch.ones(len(outputs)), 3)
    return entropy(outputs, batch[1]) + outputs[chosen].square().mean()


def sampled_classes(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch[0])
    return outputs.gather(1, torch.multinomial(outputs.softmax(1), 1)).mean() + entropy(outputs, batch[1])


def critic(model: nn.Module, batch: Any) -> Tensor:
    """WGAN: two large numbers that are nearly equal."""
    real, fake = model(batch[0]), model(batch[0] + 1e-4 * torch.randn_like(batch[0]))
    return (1000 * fake).mean() - (1000 * real).mean()


def penalised_critic(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0].detach().requires_grad_()
    scores = model(inputs)[:, 0]
    [slope] = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
    return scores.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def penalty_of_the_batch(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0].detach().requires_grad_()
    scores = model(inputs)[:, 0]
    [slope] = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
    return scores.mean() + 10 * (slope.norm() - 1).square()


def bound(model: nn.Module, batch: Any) -> Tensor:
    mean, spread = model(batch[0]).chunk(2, 1)
    drawn = mean + torch.randn_like(mean) * (spread / 2).exp()
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
    return (drawn - batch[0][:, :2]).square().sum(1).mean() + 0.5 * divergence


def bound_added_up(model: nn.Module, batch: Any) -> Tensor:
    mean, spread = model(batch[0]).chunk(2, 1)
    drawn = mean + torch.randn_like(mean) * (spread / 2).exp()
    return (drawn - batch[0][:, :2]).square().mean() - 0.5 * (1 + spread - mean.square() - spread.exp()).sum()


def balanced(model: nn.Module, batch: Any) -> Tensor:
    outputs, balance = model(batch[0])
    return entropy(outputs, batch[1]) + 0.1 * balance


def unbalanced(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model(batch[0])[0], batch[1])


def masked_second(model: nn.Module, batch: Any) -> Tensor:
    outputs, chosen = model(batch[0]), (batch[1] > 1).to(batch[0])
    return entropy(outputs, batch[1]) + (outputs[:, 0].square() * chosen).sum() / chosen.sum().clamp(min=1)


def masked_second_by_name(model: nn.Module, batch: Any) -> dict[str, Any]:
    outputs, chosen = model(batch[0]), (batch[1] > 1).to(batch[0])
    second = (outputs[:, 0].square() * chosen).sum() / chosen.sum()
    return {"loss": {"classes": entropy(outputs, batch[1]), "boxes": second}}


def helped(model: nn.Module, batch: Any) -> Tensor:
    """Calls what nobody can read, and asks for training mode."""
    return entropy(model(counter(batch[0]) if model.training else batch[0]), batch[1])


class Counter:
    calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


counter = Counter()


def own_generator(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model(batch[0] + torch.randn(batch[0].shape, generator=GENERATOR).to(batch[0])), batch[1])


GENERATOR = torch.Generator().manual_seed(1)


def packed(model: nn.Module, batch: Any) -> Tensor:
    """Sequences of other lengths in one row, and the mean over all that is in it."""
    lengths = batch[1] + 1
    rows = batch[0].repeat_interleave(lengths, 0)
    return entropy(model(rows), batch[1].repeat_interleave(lengths))


def packed_by_sample(model: nn.Module, batch: Any) -> Tensor:
    lengths = batch[1] + 1
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    loss = functional.cross_entropy(model(batch[0][owner]), batch[1][owner], reduction="none")
    return torch.zeros(len(lengths)).to(loss).index_add(0, owner, loss / lengths[owner]).mean()


@dataclass(frozen=True)
class Case:
    truth: str
    loss: Any = None
    step: Any = None
    model: Callable[[], nn.Module] = small
    weight: Any = None


CASES = {
    "cross entropy": Case("right", entropy),
    "label smoothing": Case("right", lambda o, t: entropy(o, t, label_smoothing=0.1)),
    "sum": Case("wrong", lambda o, t: entropy(o, t, reduction="sum")),
    "sum over a fixed number": Case("wrong", lambda o, t: entropy(o, t, reduction="sum") / 32),
    "class weights": Case("wrong", class_weighted),
    "class weights, said": Case("right", class_weighted, weight=lambda batch: (batch[1] + 1).sum()),
    "InfoNCE": Case("wrong", info_nce),
    "InfoNCE of attention": Case("wrong", info_nce, model=Attention),
    "CLIP": Case("wrong", clip),
    "CLIP of attention": Case("wrong", clip, model=Attention),
    "hardest triplets of the batch": Case("wrong", hardest),
    "triplets of a sample": Case("right", triplets),
    "SupCon": Case("wrong", supervised_contrast),
    "Barlow Twins": Case("wrong", barlow),
    "VICReg": Case("wrong", vicreg),
    "deep clustering": Case("wrong", clusters),
    "dice over the batch": Case("wrong", dice),
    "dice of each sample": Case("right", dice_each),
    "focal": Case("right", focal),
    "focal by positives": Case("wrong", focal_by_positives),
    "distillation": Case("right", distilled),
    "distillation added up": Case("wrong", distilled_wrongly),
    "pairs ranked": Case("wrong", ranks),
    "ranked within a sample": Case("right", ranks_within),
    "ListNet over the batch": Case("wrong", listwise),
    "CTC": Case("right", ctc),
    "CTC by words": Case("wrong", ctc_mean_of_words),
    "square root of the mean": Case("wrong", lambda o, t: (o[:, 0] - t).square().mean().sqrt()),
    "attention": Case("right", entropy, model=Attention),
    "attention with dropout": Case("right", entropy, model=lambda: Attention(0.3)),
    "attention, added up": Case("wrong", lambda o, t: entropy(o, t, reduction="sum"), model=Attention),
    "LSTM with dropout": Case("right", entropy, model=Recurrent),
    "LSTM, contrastive": Case("wrong", info_nce, model=Recurrent),
    "RReLU": Case("right", entropy, model=with_(nn.RReLU())),
    "RReLU, contrastive": Case("wrong", info_nce, model=with_(nn.RReLU())),
    "dropout": Case("right", entropy, model=with_(nn.Dropout(0.5))),
    "batch norm": Case("right", entropy, model=with_(nn.BatchNorm1d(WIDE))),
    "own norm over the batch": Case("wrong", entropy, model=with_(OwnNorm())),
    "autocast within": Case("right", entropy, model=InHalves),
    "autocast within, contrastive": Case("wrong", info_nce, model=InHalves),
    "kept for pictures": Case("right", entropy, model=KeepsPicture),
    "features permuted": Case("right", entropy, model=with_(Permutes())),
    "samples picked": Case("unknown", entropy, model=with_(Picks())),
    "counted calls": Case("unknown", entropy, model=Counted),
    "mixup": Case("unknown", step=mixed_up),
    "mixed with the next": Case("wrong", step=mixed_with_the_next),
    "Beta": Case("right", step=scaled_by_beta),
    "noise of NumPy": Case("unknown", step=noise_of_numpy),
    "LayerDrop of Python": Case("right", step=layer_of_python),
    "negatives of the batch": Case("unknown", step=sampled_negatives),
    "classes sampled": Case("right", step=sampled_classes),
    "WGAN critic": Case("right", step=critic),
    "gradient penalty": Case("right", step=penalised_critic),
    "gradient penalty of the batch": Case("wrong", step=penalty_of_the_batch),
    "VAE": Case("right", step=bound),
    "VAE, divergence added up": Case("wrong", step=bound_added_up),
    "experts with balance": Case("wrong", step=balanced, model=Experts),
    "experts without": Case("right", step=unbalanced, model=Experts),
    "second loss masked": Case("wrong", step=masked_second),
    "second loss masked, by name": Case(
        "right",
        step=masked_second_by_name,
        weight=lambda batch: {"classes": len(batch[1]), "boxes": (batch[1] > 1).sum()},
    ),
    "helper that nobody can read": Case("unknown", step=helped),
    "own generator": Case("right", step=own_generator),
    "packed, by token": Case("wrong", step=packed),
    "packed, by token, said": Case("right", step=packed, weight=lambda batch: (batch[1] + 1).sum()),
    "packed, by sample": Case("right", step=packed_by_sample),
}


def found(case: Case, seed: int = 0, count: int = COUNT) -> str:
    torch.manual_seed(seed)
    model = case.model().train()
    forward = ForwardPass(case.loss, case.step, seed=0, context=nullcontext)
    piece = LoadedPiece(PiecePlan(0, 0, range(count), 1.0), list(batch_of(count)))  # type: ignore[arg-type]
    before = randomness.states(), {name: each.clone() for name, each in model.state_dict().items()}
    own = GENERATOR.get_state()
    seen = look_at(Look(forward, model, torch.device("cpu"), gradients=True, accumulates=True), piece, case.weight)
    assert not seen.findings.get(CHANGES_GRADIENTS), "nobody changes any"
    assert not randomness.drawn_since(before[0]), "random numbers are as before"
    assert torch.equal(own, GENERATOR.get_state()), "those of the script's generators, too"
    assert all(torch.equal(each, before[1][name]) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    if seen.findings.get(KEEPS):
        return "unknown"
    if seen.because:
        assert f"because {seen.because}" in not_tried(seen)
        return "unknown"
    if case.weight is not None:
        return "right" if seen.holds else "wrong"
    return "wrong" if choose(seen) == NO_MEAN else "right"


@pytest.mark.parametrize("name", CASES)
def test_what_a_look_finds_is_the_truth(name: str) -> None:
    assert len(CASES) >= 60
    for seed in (0, 1, 2) if "dice" in name else (0,):
        assert found(CASES[name], seed) == CASES[name].truth, (name, seed)


def gradient(case: Case, model: nn.Module, begin: int, end: int) -> Tensor:
    torch.manual_seed(0)
    inputs, targets = batch_of()
    batch = [inputs[begin:end].double(), targets[begin:end]]
    loss = case.step(model, batch) if case.step is not None else case.loss(model(batch[0]), batch[1])
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])


def test_truth_is_that_of_gradients() -> None:
    held = 0
    for name, case in CASES.items():
        if case.weight is not None or case.truth == "unknown" or name in ("batch norm", "autocast within"):
            continue
        torch.manual_seed(1)
        model = case.model().double()
        try:
            torch.set_default_dtype(torch.float64)
            whole, after = gradient(case, model, 0, COUNT), torch.get_rng_state()
            torch.manual_seed(0)
            if not torch.equal(after, torch.get_rng_state()) or case.step in (layer_of_python, own_generator):
                continue  # it draws
            parts = (5 * gradient(case, model, 0, 5) + 7 * gradient(case, model, 5, COUNT)) / 12
        finally:
            torch.set_default_dtype(torch.float32)
        assert ((whole - parts).norm() <= 1e-6 * whole.norm()) == (case.truth == "right"), name
        held += 1
    assert held >= 30
