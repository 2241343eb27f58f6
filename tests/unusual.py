"""Models that are not made of the plainest tensors, each with the loop that one would write for it in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ManyhostsError

SAMPLES, BATCH = 23, 10  # batches of 10, 10 and 3: the last one cannot be cut evenly
STEPS = 6


def images(samples: int = SAMPLES) -> TensorDataset:
    source = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(samples, 3, 6, 6, generator=source), torch.randint(0, 4, (samples,), generator=source)
    )


def rows(samples: int = SAMPLES) -> TensorDataset:
    source = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 6, generator=source)
    return TensorDataset(inputs, torch.stack([inputs.sum(1).sin(), inputs.prod(1)], 1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    model: Callable[[], nn.Module]
    data: Callable[[], TensorDataset] = rows
    loss: Callable[[Any, Any], Tensor] | None = nn.functional.mse_loss
    step: Callable[[nn.Module, Any], Tensor] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    settings: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5


def in_plain_pytorch(case: Case, steps: int = STEPS) -> dict[str, Tensor]:
    """The state that a loop without us ends with."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = case.optimizer(model.parameters())
    data = case.data()
    done = 0
    while done < steps:
        for begin in range(0, len(data), BATCH):
            batch = [tensor[begin : begin + BATCH] for tensor in data.tensors]
            if done < steps:
                optimizer.zero_grad()
                loss = case.step(model, batch) if case.step else case.loss(model(batch[0]), batch[1])  # type: ignore[misc]
                loss.backward()
                optimizer.step()
                done += 1
    return state_of(model)


def trainer_for(case: Case, run_dir: Path, model: nn.Module | None = None, **more: Any) -> mh.Trainer:
    return mh.Trainer(
        model=case.model() if model is None else model,
        loss=case.loss,
        step=case.step,
        optimizer=case.optimizer,
        data=mh.Data(train=case.data(), batch_size=BATCH, shuffle=False),
        run_dir=run_dir,
        **{**case.settings, **more},
    )


def with_us(rank: int, case: Case, run_dir: Path, steps: int = STEPS, **more: Any) -> dict[str, Tensor] | str:
    """The state that our trainer ends with, or the error that it raises. Only the leader's model is the right one."""
    torch.manual_seed(rank)
    try:
        trainer = trainer_for(case, run_dir, **more)
        trainer.fit(f"{steps} steps")
    except ManyhostsError as error:
        return str(error)
    return state_of(trainer.model)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, those that are in no state_dict, too."""
    found = {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    return {name: value.float() if "float8" in str(value.dtype) else value for name, value in found.items()}


# The models.


class ChannelsLast(nn.Sequential):
    def __init__(self) -> None:
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)]
        super().__init__(*layers)
        self.to(memory_format=torch.channels_last)


class OddMemory(nn.Module):
    """Parameters and buffers that lie in memory in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.sliced = nn.Parameter(torch.randn(5, 9)[:, 2:4])
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("expanded", torch.randn(2).expand(4096, 2))
        self.register_buffer("windows", torch.randn(8).unfold(0, 4, 2))
        self.register_buffer("column", torch.randn(6, 3)[:, 1])
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("flag", torch.rand(()) < 0.5)
        self.register_buffer("mask", torch.rand(7) < 0.5)
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("small", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("count", torch.randint(0, 9, (3,)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.transposed).tanh() @ self.sliced * self.scale + self.expanded[: len(x)]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64).t())
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x.to(torch.complex64) @ self.weight.t()).abs())


class SharedLayer(nn.Module):
    """One layer in several checkpoints, so that its gradient comes in several parts."""

    def __init__(self, *, reentrant: bool, batch_norm: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.shared, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()

    def block(self, x: Tensor) -> Tensor:
        return self.norm(self.shared(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.first(x)).tanh()
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.out(x)


class Critic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        )


def with_gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0].clone().requires_grad_()
    outputs = model(inputs)
    [gradient] = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
    return nn.functional.mse_loss(outputs, batch[1]) + (gradient.norm(dim=1) - 1).square().mean()


class WithoutCheckpoints(SharedLayer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.first(x)).tanh()
        for _ in range(3):
            x = self.block(x)
        return self.out(x)


def slowly(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def adamw_fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


CASES = {
    "channels_last": Case(ChannelsLast, images, nn.CrossEntropyLoss(), optimizer=adamw_fused, tolerance=1e-4),
    "odd memory": Case(OddMemory),
    "complex": Case(Complex),
    "shared layer, reentrant": Case(lambda: SharedLayer(reentrant=True)),
    "shared layer": Case(lambda: SharedLayer(reentrant=False)),
    "gradient penalty": Case(Critic, loss=None, step=with_gradient_penalty, optimizer=slowly, tolerance=1e-4),
    "norm in checkpoints, reentrant": Case(lambda: SharedLayer(reentrant=True, batch_norm=True), tolerance=1e-4),
    "norm in checkpoints": Case(lambda: SharedLayer(reentrant=False, batch_norm=True), tolerance=1e-4),
    "norm without checkpoints": Case(lambda: WithoutCheckpoints(reentrant=False, batch_norm=True)),
}
