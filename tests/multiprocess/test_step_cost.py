"""What a step of data parallelism asks of the network: the gradients' exchanges, and none beside them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import manyhosts as mh
from manyhosts.cluster.place import Place
from manyhosts.communication.collectives import Work
from manyhosts.communication.world import World
from manyhosts.strategies.ddp import DataParallel
from manyhosts.strategies.strategy import Piece

pytestmark = pytest.mark.multiprocess
STEPS, NUMBERS = 4, 3
WEIGHTS = (0.5, 0.3, 0.2)


class CountingWorld(World):
    """A world that knows how many sums it has begun."""

    sums = 0

    def start_all_reduce(self, tensor: Tensor) -> Work:
        self.sums += 1
        return super().start_all_reduce(tensor)


def losses_of_steps(rank: int, dtype: torch.dtype, options: dict[str, Any]) -> list[tuple[int, int, list[float]]]:
    """Of each step: how many sums it began, how many buckets there are, and what its workers found together."""
    world = CountingWorld(Place.from_environment())
    torch.manual_seed(5)
    strategy = DataParallel(mh.DDP(bucket_mb=0.001, **options), world)
    model = strategy.place(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 1)).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # Between two numbers of the narrow dtypes, so that a sum in one of them would not be this one.
    losses = iter([(rank + 1) / 3 + step * 1e-9 for step in range(STEPS)])

    def compute(net: nn.Module, piece: Piece) -> dict[str, Tensor]:
        zero = net(piece.batch).sum() * 0
        return {"loss": zero.double() + next(losses), "rows": zero + 3}

    found = []
    for _ in range(STEPS):
        begun = world.sums
        piece = Piece(lambda: torch.ones(2, 30, dtype=dtype), 2, WEIGHTS[rank], (0,))
        outcome = strategy.forward_backward(model, [piece], compute, lambda loss: loss, [float(rank)])
        strategy.update(model, optimizer)
        assert strategy.buckets is not None
        values = [float(outcome.values["loss"]), float(outcome.values["rows"]), float(outcome.control_flags[0])]
        found.append((world.sums - begun, len(strategy.buckets.buckets), values))
    return found


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {}), (torch.float32, {"compression": "fp16", "compress_above": 100})],
    ids=["wide gradients", "narrow gradients", "compressed gradients"],
)
def test_loss_of_a_step_travels_with_the_gradients_and_arrives_exactly(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    answers = run_ranks(NUMBERS, losses_of_steps, dtype, options)
    assert answers[0] == answers[1] == answers[2]
    for step, (sums, buckets, (loss, rows, rider)) in enumerate(answers[0]):
        assert sums == buckets > 1, "every bucket is a sum, and there is no other"
        parts = [weight * ((rank + 1) / 3 + step * 1e-9) for rank, weight in enumerate(WEIGHTS)]
        assert loss == parts[0] + parts[1] + parts[2]
        assert rows == pytest.approx(3, rel=1e-15)
        assert rider == 0 + 1 + 2


def gradients_with_one_unused(rank: int) -> tuple[list[Any], list[Any]]:
    """The gradients where rank 0 uses the first two layers and rank 1 the second, in the order found and before it."""
    world = World(Place.from_environment())
    torch.manual_seed(3)
    layers = nn.ModuleList([nn.Linear(20, 10) for _ in range(4)])
    strategy = DataParallel(mh.DDP(bucket_mb=0.001), world)
    model = strategy.place(layers)

    def compute(net: Any, piece: Piece) -> dict[str, Tensor]:
        used = (net[0](piece.batch).sum() if rank == 0 else 0) + net[1](piece.batch).sum()
        return {"loss": used + (net[2](piece.batch).sum() if piece.samples == 1 and rank == 1 else 0)}

    found = []
    for _ in range(2):
        # The third layer has a gradient of the first piece, and none in the pass whose gradients leave as they come.
        pieces = [
            Piece(partial(torch.full, (samples, 20), rank + 1.0), samples, 0.25 * samples, (0,))
            for samples in (1, 1, 2)
        ]
        strategy.forward_backward(model, pieces[rank:], compute, lambda loss: loss, [])
        found.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
    return found[0], found[1]


def test_gradients_of_layers_that_some_workers_use_are_summed_and_of_unused_ones_are_none() -> None:
    (first, again), (other, _) = run_ranks(2, gradients_with_one_unused)
    assert first == other == again
    weight = [parameter and parameter[0][0] for parameter in first[::2]]
    # Rank 0: a quarter, a quarter and half, of inputs 1, two rows in the last; rank 1: a quarter and half, of inputs 2.
    assert weight[0] == 0.25 + 0.25 + 0.5 * 2
    assert weight[1] == 0.25 + 0.25 + 0.5 * 2 + 2 * (0.25 + 0.5 * 2)
    assert weight[2] == 2 * 0.25
    assert weight[3] is None
