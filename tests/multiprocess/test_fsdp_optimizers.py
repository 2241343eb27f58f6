"""Optimizers step a model in parts as they step a whole one, or say why not: those of PyTorch, and a script's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn, optim

from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.config.fully_sharded import FSDP
from manyhosts.errors import ConfigError
from manyhosts.strategies.fsdp.strategy import FullySharded
from manyhosts.strategies.strategy import Piece
from manyhosts.strategies.uncut_model import SingleProcess

pytestmark = pytest.mark.multiprocess
WIDTH, INNER = 6, 13
"""No number of workers divides the inner one."""


class Block(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=bias), nn.Linear(INNER, WIDTH, bias=bias)
        self.gain = nn.Parameter(torch.tensor(1.1)) if bias else 1.0  # every worker has all of it

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = hidden + self.down(self.up(hidden * self.gain).tanh())
        return added


def deep(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH, bias=bias)
    return nn.Sequential(first, *(Block(bias=bias) for _ in range(3)), nn.Linear(WIDTH, 2, bias=bias))


Change = Callable[[Tensor, Tensor], Any]


class Own(optim.Optimizer):
    """A script's: what it does to each parameter with its gradient is `change`."""

    def __init__(self, params: Any, change: Change) -> None:
        super().__init__(params, {"lr": 0.05})
        self.change = change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without overloads
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.change(each, each.grad)


def by_norms(parameter: Tensor, gradient: Tensor) -> None:
    """As LAMB."""
    whole, step = parameter.norm(), gradient.norm()
    ratio = torch.where((whole > 0) & (step > 0), whole / step, torch.ones_like(whole))
    parameter.add_(gradient * ratio, alpha=-0.05)


def by_read_norms(parameter: Tensor, gradient: Tensor) -> None:
    """As LARS: the norms are numbers of Python's, on which the script decides."""
    whole, step = parameter.norm().item(), float(gradient.norm())
    ratio = whole / step if whole > 0 and step > 0 else 1.0
    parameter.data.add_(gradient.data, alpha=-0.01 * ratio)


def by_condition(parameter: Tensor, gradient: Tensor) -> None:
    parameter.sub_(0.1 * gradient if gradient.abs().sum() > 0.3 else gradient)


def centred(parameter: Tensor, gradient: Tensor) -> None:
    parameter.sub_(0.05 * (gradient - gradient.mean(0, keepdim=True)))


def with_products(parameter: Tensor, gradient: Tensor) -> None:
    parameter.sub_(0.05 * ((gradient @ gradient.T) @ gradient if gradient.dim() == 2 else gradient))


def first_row_alone(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.dim():
        parameter[0].sub_(gradient[0])


def first_row_in_two_ways(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.dim():
        parameter.narrow(0, 0, 1)[0].mul_(0.5)


def with_noise(parameter: Tensor, gradient: Tensor) -> None:
    parameter.sub_(gradient + torch.randn_like(gradient))


def with_whole_state(parameter: Tensor, gradient: Tensor) -> None:
    parameter.sub_(torch.ones(parameter.shape) + gradient)


def by_numpy(parameter: Tensor, gradient: Tensor) -> None:
    parameter.sub_(torch.from_numpy(gradient.numpy()))


def in_groups(params: Sequence[nn.Parameter]) -> optim.Optimizer:
    matrices = {"params": [each for each in params if each.dim() > 1], "weight_decay": 0.1}
    return optim.AdamW([matrices, {"params": [each for each in params if each.dim() < 2], "lr": 0.02}], lr=0.01)


def with_hook(params: Any) -> optim.Optimizer:
    """One of PyTorch's, with a script's hook that reads norms."""
    made = optim.SGD(params, lr=0.05)

    def clip_each(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for each in optimizer.param_groups[0]["params"]:
            each.grad.mul_(min(1.0, 0.01 / each.grad.norm().item()))

    made.register_step_pre_hook(clip_each)
    return made


def clipping(params: Any) -> optim.Optimizer:
    made = optim.SGD(params, lr=0.05)

    def clip(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)

    made.register_step_pre_hook(clip)
    return made


SAME: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "SGD foreach": partial(optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    "SGD maximize": partial(optim.SGD, lr=0.05, maximize=True, foreach=False),
    "Adam": partial(optim.Adam, lr=0.01),
    "Adam fused": partial(optim.Adam, lr=0.01, fused=True),
    "AdamW": partial(optim.AdamW, lr=0.01, amsgrad=True, foreach=False),
    "AdamW fused": partial(optim.AdamW, lr=0.01, fused=True),
    "AdamW foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "AdamW, lr a tensor": lambda params: optim.AdamW(params, lr=torch.tensor(0.01)),
    "groups": in_groups,
    "Adagrad": partial(optim.Adagrad, lr=0.05),
    "Adadelta": partial(optim.Adadelta, lr=0.5),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "ASGD": partial(optim.ASGD, lr=0.05),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.9),
    "Muon": partial(optim.Muon, lr=0.02),
    "hook": with_hook,
    "clipping": clipping,
    **{
        change.__name__: partial(Own, change=change)
        for change in (by_norms, by_read_norms, by_condition, centred, with_products)
    },
}
REFUSED: dict[str, tuple[Callable[..., optim.Optimizer], str]] = {
    "Rprop": (partial(optim.Rprop, lr=0.01), "Rprop does in its step what PyTorch cannot do with tensors that lie in"),
    **{
        change.__name__: (partial(Own, change=change), sentence)
        for change, sentence in {
            first_row_alone: "Own writes into a slice of a tensor of which workers hold parts",
            first_row_in_two_ways: "Own writes into a slice of a tensor of which workers hold parts",
            with_noise: "Own draws random numbers for tensors of which each worker holds a part",
            with_whole_state: "Own does in its step what PyTorch cannot do with tensors that lie in parts",
            by_numpy: "Own does in its step what PyTorch cannot do with tensors that lie in parts",
        }.items()
    },
}


def loss_of(module: nn.Module, piece: Piece) -> Mapping[str, Tensor]:
    return {"loss": (module(piece.batch) - 0.3).square().mean()}


def pieces_of(rank: int, size: int) -> list[Piece]:
    def inputs(number: int) -> Tensor:
        return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))

    return [Piece(partial(inputs, each), 3, 0.25, (0, each, 0)) for each in range(rank, 4, size)]


def stepped(rank: int, names: Sequence[str], options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The weights after four steps of each optimizer; or the sentence that refuses it."""
    world, found = World(Place.from_environment()), {}
    makers = {**SAME, **{name: make for name, (make, _) in REFUSED.items()}}
    for name in names:
        strategy: Any = SingleProcess(world) if options is None else FullySharded(FSDP(**options), world)
        placed = strategy.place(deep(bias=name != "Muon"))
        optimizer = makers[name](list(placed.parameters()))
        try:
            with patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):  # Muon rounds what it sums
                for _ in range(4):
                    strategy.forward_backward(placed, pieces_of(rank, world.size), loss_of, lambda loss: loss, [0.0])
                    strategy.update(placed, optimizer)
        except ConfigError as error:
            found[name] = error.what
        else:
            found[name] = {key: strategy.holding.full(each).tolist() for key, each in placed.named_parameters()}
    return found


@pytest.mark.parametrize(
    ("workers", "options"), [(2, {}), pytest.param(4, {"shard": 2, "zero": 1}, marks=pytest.mark.slow)]
)
def test_optimizers_step_parts_as_they_step_whole_models(workers: int, options: dict[str, Any]) -> None:
    [alone] = run_ranks(1, stepped, list(SAME), None)
    found, *others = run_ranks(workers, stepped, list(SAME), options)
    assert all(other == found for other in others)
    for name, expected in alone.items():
        for key, weight in expected.items():
            one, other = torch.tensor(weight), torch.tensor(found[name][key])
            away = (one - other).abs().max().item()
            assert away <= 1e-5 * one.abs().max().item(), f"{name}: {key} is away by {away}"


def test_optimizers_that_would_step_parts_otherwise_are_refused_in_the_first_step() -> None:
    [alone] = run_ranks(1, stepped, list(REFUSED), None)
    assert all(isinstance(weights, dict) for weights in alone.values())
    for found in run_ranks(2, stepped, list(REFUSED), {}):
        for name, (_, sentence) in REFUSED.items():
            assert sentence in found[name], name
