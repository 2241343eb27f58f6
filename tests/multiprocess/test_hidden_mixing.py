"""Models and losses in which samples meet where nobody sees it from outside: refused on all workers, or made right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset
from unusual import BATCH, Case, in_plain_pytorch, rows, state_of, with_us

import manyhosts as mh
from manyhosts.errors import ManyhostsError

pytestmark = [pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")]


def layers(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 2))


class OwnNorm(nn.Module):
    """In training, and only then, over the samples of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt() if self.training else x


class OwnForward(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
            self.running_var.lerp_(x.var(0, unbiased=False), 0.1)
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


class KeepsMean(nn.Module):
    """A running mean that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class WritesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class Coder(nn.Module):
    """A variational autoencoder, as the examples of PyTorch have it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


def summed_bound(model: nn.Module, batch: Any) -> Tensor:
    found, mean, log_variance = model(batch[0])
    divergence: Tensor = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return nn.functional.mse_loss(found, batch[0], reduction="sum") + divergence


def mean_bound(model: nn.Module, batch: Any) -> Tensor:
    return summed_bound(model, batch) / len(batch[0])


def by_gradient_of_the_batch(model: nn.Module, batch: Any) -> Tensor:
    """One step of an inner loop, as in MAML."""
    parameters = dict(model.named_parameters())
    inner = nn.functional.mse_loss(model(batch[0]), batch[1])
    gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
    fast = {name: each - 0.1 * gradient for (name, each), gradient in zip(parameters.items(), gradients, strict=True)}
    return nn.functional.mse_loss(torch.func.functional_call(model, fast, (batch[0],)), batch[1])


def with_neighbours(x: Tensor) -> Tensor:
    return (x + x.roll(1, 0)) / 2


def mixes_in_a_helper(model: nn.Module, batch: Any) -> Tensor:
    inputs = with_neighbours(batch[0]) if model.training else batch[0]
    return nn.functional.mse_loss(model(inputs), batch[1])


def goes_backward(model: nn.Module, batch: Any) -> Tensor:
    loss = nn.functional.mse_loss(model(batch[0]), batch[1]) / 2
    if model.training:
        loss.backward(retain_graph=True)
    return loss


def detached(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]).detach(), batch[1])


class Named(Dataset[Any]):
    """Rows with a name each, which no tensor can hold."""

    def __len__(self) -> int:
        return len(rows())

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, targets = rows()[index]
        return {"inputs": inputs, "targets": targets, "name": f"row {index}"}


def summed(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch["inputs"]), batch["targets"], reduction="sum")


class Ragged(Dataset[Any]):
    def __len__(self) -> int:
        return len(rows())

    def __getitem__(self, index: int) -> Any:
        inputs, targets = rows()[index]
        return inputs.expand(1 + index % 5, 6), targets.expand(1 + index % 5, 2)


def padded(samples: list[Any]) -> Any:
    """To the longest of this batch."""
    return [pad_sequence(list(each), batch_first=True) for each in zip(*samples, strict=True)]


class ActiveNorm(nn.BatchNorm1d):
    """A BatchNorm that does something besides."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def averaged(model: nn.Module, batch: Any) -> Tensor:
    return summed(model, batch) / batch["targets"].numel()


REFUSED: dict[str, tuple[Case, str]] = {
    "own norm": (Case(lambda: layers(OwnNorm())), "the model looks at the other samples of a batch"),
    "BatchNorm of one's own": (Case(lambda: layers(OwnForward(8))), "the model looks at the other samples of a batch"),
    "kept mean": (Case(lambda: layers(KeepsMean())), "'1.mean' is kept from one batch to the next"),
    "written parameter": (Case(lambda: layers(WritesParameter())), "changes the parameter '1.mean'"),
    "max_norm": (
        Case(lambda: nn.Sequential(nn.Linear(6, 2), nn.Embedding(3, 2, max_norm=1.0))),
        "the embedding '1' has max_norm",
    ),
    "sum with draws": (Case(Coder, loss=None, step=summed_bound), "the loss is no mean over the samples"),
    "MAML": (Case(layers, loss=None, step=by_gradient_of_the_batch), "the loss is no mean over the samples"),
    "sum with names": (Case(layers, data=Named, loss=None, step=summed), "the loss is no mean over the samples"),  # type: ignore[arg-type]
    "padding": (
        Case(layers, data=Ragged, settings={"collate": padded}),  # type: ignore[arg-type]
        "the loss is no mean over the samples",
    ),
    "mixing in training": (
        Case(layers, loss=None, step=mixes_in_a_helper),
        "the loss is no mean over the samples",
    ),
    "own backward": (Case(layers, loss=None, step=goes_backward), "the step has changed gradients itself"),
    "detached": (Case(layers, loss=None, step=detached), "does not depend on any parameter that is trained"),
}
RIGHT = {
    "SyncBatchNorm": Case(lambda: layers(nn.SyncBatchNorm(8)), tolerance=1e-4),
    "BatchNorm with more": Case(lambda: layers(ActiveNorm(8)), tolerance=1e-4),
    "scripted": Case(lambda: torch.jit.script(layers())),
}
NOT_ACCUSED = {
    "mean with draws": Case(Coder, loss=None, step=mean_bound),
    "mean with names": Case(layers, data=Named, loss=None, step=averaged),  # type: ignore[arg-type]
}


def train_all(rank: int, run_dir: Path) -> dict[str, Any]:
    cases = {name: case for name, (case, _) in REFUSED.items()} | RIGHT | NOT_ACCUSED
    return {name: train(rank, case, run_dir / name) for name, case in cases.items()}


def train(rank: int, case: Case, run_dir: Path) -> dict[str, Tensor] | str:
    collate: Callable[..., Any] | None = case.settings.get("collate")
    if collate is None:
        return with_us(rank, case, run_dir, 3)
    data = mh.Data(train=case.data(), batch_size=BATCH, collate=collate)
    try:
        trainer = mh.Trainer(model=case.model, loss=case.loss, optimizer=case.optimizer, data=data, run_dir=run_dir)
        trainer.fit("3 steps")
    except ManyhostsError as error:
        return str(error)
    return state_of(trainer.model)


def step_that_sums(rank: int, run_dir: Path, weight: str | None) -> tuple[str, list[float]]:
    """What `fit` says where the step itself averages a number over the workers, and the numbers."""
    averages: list[float] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        average = loss.detach().clone()
        dist.all_reduce(average)
        averages.append(float(average) / 2)
        return loss

    made = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(20, 6, generator=made), torch.randint(2, (20,), generator=made))
    trainer = mh.Trainer(
        model=layers, step=step, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=mh.Data(data, batch_size=10), weight=weight, run_dir=run_dir,
    )  # fmt: skip
    try:
        trainer.fit("2 steps")
    except ManyhostsError as error:
        return str(error), averages
    return "", averages


def test_step_that_calls_a_collective_is_refused_unless_it_is_said_to_be_meant(tmp_path: Path) -> None:
    """One worker looks at more pieces than the others, whose collectives would then be matched with others."""
    for said, averages in run_ranks(2, step_that_sums, tmp_path / "refused", None):
        assert "calls a collective of torch.distributed (allreduce) in a forward pass" in said
        assert "where:" in said
        assert averages == []
    (_, first), (_, second) = run_ranks(2, step_that_sums, tmp_path / "meant", "samples")
    assert first == second
    assert len(first) == 2


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, train_all, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_on_all_workers_in_the_first_steps(name: str, answers: list[dict[str, Any]]) -> None:
    said = {each[name] for each in answers}
    assert len(said) == 1, said
    assert REFUSED[name][1] in said.pop()


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_that_of_a_plain_loop(name: str, answers: list[dict[str, Any]]) -> None:
    expected, tolerance = in_plain_pytorch(RIGHT[name], 3), RIGHT[name].tolerance
    for each in answers:
        assert not isinstance(each[name], str), each[name]
        for tensor, value in expected.items():
            about = partial("{}: {}".format, tensor)
            torch.testing.assert_close(each[name][tensor], value, rtol=tolerance, atol=tolerance, msg=about)


@pytest.mark.parametrize("name", NOT_ACCUSED)
def test_a_mean_over_samples_is_not_accused(name: str, answers: list[dict[str, Any]]) -> None:
    for each in answers:
        assert not isinstance(each[name], str), each[name]
