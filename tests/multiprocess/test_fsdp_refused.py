"""Models that would train wrongly in parts, without an error of PyTorch: refused in the first step, by all workers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional

from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.config.fully_sharded import FSDP
from manyhosts.errors import ConfigError
from manyhosts.strategies.fsdp.strategy import FullySharded
from manyhosts.strategies.strategy import Piece
from manyhosts.strategies.uncut_model import SingleProcess

pytestmark = pytest.mark.multiprocess
WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = hidden + self.down(self.up(hidden).tanh())
        return added


class Noting(Block):
    """Puts a second loss into a list that it is given."""

    def forward(self, hidden: Tensor, losses: list[Tensor] | None = None) -> Tensor:
        given = super().forward(hidden)
        if losses is not None:
            losses.append(given.square().mean())
        return given


class Aside(Block):
    """Leaves a second loss in an attribute."""

    def forward(self, hidden: Tensor) -> Tensor:
        given = super().forward(hidden)
        self.aside = self.down(self.up(hidden)).square().mean()
        return given


class Clamping(Block):
    """Keeps its weights small by itself."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(hidden)


class ClampingData(Block):
    """The same, past autograd and its count of versions."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.up.weight.data.clamp_(-0.1, 0.1)
        return super().forward(hidden)


class Deep(nn.Module):
    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Listing(Deep):
    block = Noting

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, losses = self.first(inputs), [torch.zeros(())]
        for block in self.blocks:
            hidden = block(hidden, losses)
        total: Tensor = hidden + torch.stack(losses).sum()
        return total


class Leaving(Deep):
    block = Aside

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = super().forward(inputs)
        total: Tensor = hidden + sum(block.aside for block in self.blocks if isinstance(block, Aside))
        return total


class Small(Deep):
    block = Clamping


class Scaling(Block):
    """Computes with other weights than its own for a call."""

    def forward(self, hidden: Tensor) -> Tensor:
        scaled = {name: each * 1.1 for name, each in self.up.named_parameters()}
        given: Tensor = hidden + self.down(torch.func.functional_call(self.up, scaled, (hidden,)).tanh())
        return given


class Functional(Deep):
    """Calls a unit with other weights than its own."""

    def forward(self, inputs: Tensor) -> Tensor:
        scaled = {name: each * 1.1 for name, each in self.blocks[0].named_parameters()}
        hidden: Tensor = torch.func.functional_call(self.blocks[0], scaled, (self.first(inputs),))
        return hidden


class SmallData(Deep):
    block = ClampingData


class Keeping(Deep):
    """Has a function that holds a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.again = partial(functional.linear, weight=self.first.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.again(super().forward(inputs))
        return hidden


class ScalingInside(Deep):
    """Units that compute with other weights than their own, and are called with these."""

    block = Scaling


class Decaying(Deep):
    """The sum of its squares is in the loss."""


class Last(nn.Module):
    """Convolutions in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()) for _ in range(3))
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


class Hooked(nn.Module):
    """A unit whose gradients a hook changes, and tensors that no module calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.matrices = nn.ParameterList(torch.eye(WIDTH) * (2 + each) for each in range(2))
        self.blocks[1].register_full_backward_hook(lambda module, into, out: tuple(each * 0.5 for each in into))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        for matrix in self.matrices:
            hidden = hidden @ matrix
        return hidden


def loss_of(module: nn.Module, piece: Piece) -> Mapping[str, Tensor]:
    loss = module(piece.batch).square().mean()
    if isinstance(module, Decaying):
        loss = loss + 0.1 * sum(each.square().sum() for each in module.parameters())
    return {"loss": loss}


def pieces_of(rank: int, size: int, shape: tuple[int, ...]) -> list[Piece]:
    def inputs(number: int) -> Tensor:
        return torch.randn(2, *shape, generator=torch.Generator().manual_seed(number))

    return [Piece(partial(inputs, each), 2, 0.5, (0, each, 0)) for each in range(rank, 2, size)]


def trained(rank: int, size: int, kinds: list[type[nn.Module]], options: Mapping[str, Any]) -> list[str | list[float]]:
    """What each of `kinds` comes to in two steps: the norms of its gradients, or the sentence that refuses it."""
    world, found = World(Place.from_environment()), []
    for kind in kinds:
        torch.manual_seed(0)
        strategy: Any = SingleProcess(world) if size == 1 else FullySharded(FSDP(**options), world)
        placed, norms = strategy.place(kind()), []
        pieces = pieces_of(rank, size, (3, 4, 4) if kind is Last else (WIDTH,))
        try:
            for _ in range(2):
                strategy.forward_backward(placed, pieces, loss_of, lambda loss: loss, [0.0])
                norms.append(strategy.norm(placed).item())
        except ConfigError as error:
            found.append(error.what)
        else:
            found.append(norms)
    return found


def test_what_would_be_wrong_in_silence_is_refused_by_all_workers() -> None:
    kinds: list[type[nn.Module]] = [Listing, Keeping, Decaying, Leaving, Small, SmallData, Functional]
    for found in run_ranks(2, trained, 2, kinds, {}):
        assert "the unit 'blocks.0' writes into a list" in found[0]
        assert "computes with the parameter 'first.weight'" in found[1]
        assert "a parameter was used outside the forward pass" in found[2]
        for said in found[4:6]:
            assert "the parameter 'blocks.0.up.weight' is written into" in said
        assert "computed and not returned, such as an attribute" in found[3]
        assert "the parameter 'blocks.0.up.weight' was replaced for a call" in found[6]


@pytest.mark.parametrize("kind", [Last, Hooked, ScalingInside])
def test_what_is_unusual_and_right_equals_one_process(kind: type[nn.Module]) -> None:
    """Convolutions in another memory format; hooks of a unit; a list of parameters; weights made of own."""
    [[alone]] = run_ranks(1, trained, 1, [kind], {})
    assert len(alone) == 2
    for [found] in run_ranks(2, trained, 2, [kind], {"zero": 2}):
        assert found == pytest.approx(alone, rel=1e-5)
