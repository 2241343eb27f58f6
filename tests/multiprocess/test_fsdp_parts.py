"""What a worker of `fsdp` holds and sends, and what it is told where the workers' models come apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sharded import WIDTH, WORDS, Block, Model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.config.fully_sharded import FSDP
from manyhosts.config.strategies import DDP
from manyhosts.data import randomness
from manyhosts.errors import ConfigError
from manyhosts.strategies.ddp import DataParallel
from manyhosts.strategies.fsdp.exchange import rounded
from manyhosts.strategies.fsdp.strategy import FullySharded
from manyhosts.strategies.materialise import materialise, places_of
from manyhosts.strategies.strategy import Piece
from manyhosts.strategies.uncut_model import SingleProcess

pytestmark = pytest.mark.multiprocess
WAYS: dict[str, dict[str, Any]] = {
    "zero 3": {"zero": 3}, "zero 2": {"zero": 2}, "zero 1": {"zero": 1}, "two copies": {"shard": 2},
    "sums in bf16": {"zero": 2, "reduce": "bf16"}, "two copies, sums in bf16": {"shard": 2, "reduce": "bf16"},
}  # fmt: skip


class Deep(nn.Module):
    """Large enough that what cannot be cut evenly is next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(4))
        self.seen: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
            gathered = [each for each in self.parameters() if not isinstance(each, DTensor)]
            self.seen.append(sum(each.nbytes for each in gathered))
        return inputs


def loss_of(module: nn.Module, piece: Piece) -> Mapping[str, Tensor]:
    return {"loss": module(piece.batch).square().mean()}


def pieces_of(rank: int, size: int, count: int) -> list[Piece]:
    inputs = torch.randn(2, 64, generator=torch.Generator().manual_seed(rank))
    return [Piece(lambda: inputs, 2, 1 / size / count, (0, rank, number)) for number in range(count)]


def step(rank: int, size: int, options: Mapping[str, Any] | None, micro_batches: int) -> dict[str, int]:
    """One step of AdamW: bytes that this worker holds after it, that it has seen whole in it, and that it has sent."""
    world = World(Place.from_environment())
    strategy: Any = DataParallel(DDP(), world) if options is None else FullySharded(FSDP(**options), world)
    placed = strategy.place(Deep())
    sent = world.bytes_sent
    optimizer = torch.optim.AdamW(placed.parameters(), lr=0.01)
    strategy.forward_backward(placed, pieces_of(rank, size, micro_batches), loss_of, lambda loss: loss, [0.0])
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    gradients = [each.grad for each in placed.parameters()]
    held = sum(strategy.holding.local(each).nbytes for each in [*placed.parameters(), *gradients, *state])
    return {"held": held, "whole": max(placed.seen), "sent": world.bytes_sent - sent}


def steps(rank: int, size: int, micro_batches: int) -> dict[str, dict[str, int]]:
    ways = {name: way for name, way in WAYS.items() if size % way.get("shard", 1) == 0}
    return {name: step(rank, size, way, micro_batches) for name, way in {"ddp": None, **ways}.items()}


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_a_worker_holds_its_part_and_sends_what_the_page_says(workers: int) -> None:
    micro_batches = 3
    [found, *_] = run_ranks(workers, steps, workers, micro_batches)
    parameters = sum(each.nbytes for each in Deep().parameters())
    for name, way in WAYS.items():
        if name in found:
            share = way.get("shard", workers)
            assert found[name]["held"] <= (1 / share + 0.05) * found["ddp"]["held"], name
    assert found["ddp"]["held"] > 4 * parameters
    assert found["zero 3"]["whole"] <= parameters / 4
    assert found["zero 2"]["whole"] == found["zero 1"]["whole"] == parameters
    others = (workers - 1) / workers * parameters
    times = {
        "zero 3": 3 * micro_batches,
        "zero 2": 1 + micro_batches,
        "zero 1": 2,
        "sums in bf16": 1 + micro_batches / 2,
    }
    for name, each in times.items():
        assert found[name]["sent"] == pytest.approx(each * others, rel=0.05), name
    if workers == 4:
        assert found["two copies"]["sent"] == pytest.approx((3 * micro_batches / 2 + 1 / 2) * parameters, rel=0.05)
        rounded = found["two copies, sums in bf16"]["sent"]
        assert rounded == pytest.approx((2.5 * micro_batches / 2 + 1 / 4) * parameters, rel=0.05)


def rounded_away(rank: int, size: int, options: Mapping[str, Any]) -> tuple[float, float]:
    """How far sums in bf16 are from what paper gives, and from exact sums; as shares of the largest number."""
    world = World(Place.from_environment())
    torch.manual_seed(0)
    strategy, model = FullySharded(FSDP(reduce="bf16", **options), world), Deep()
    whole = [each.detach().clone() for each in model.parameters()]
    placed = strategy.place(model)
    strategy.forward_backward(placed, pieces_of(rank, size, 1), loss_of, lambda loss: loss, [0.0])
    found = [strategy.holding.full(each.grad) for each in placed.parameters()]
    own = [gradients(whole, pieces_of(other, size, 1), size) for other in range(size)]
    share = options.get("shard", size)
    paper, exact = [], []
    for parts in zip(*own, strict=True):
        copies = [sum(bf16(each) for each in parts[first : first + share]) for first in range(0, size, share)]
        paper.append(copies[0] if len(copies) == 1 else bf16(sum(bf16(each) for each in copies)))
        exact.append(sum(parts))
    largest = max(float(each.abs().max()) for each in exact)
    return tuple(  # type: ignore[return-value]  # of two
        max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) / largest
        for wanted in (paper, exact)
    )


def bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16).float()


def gradients(weights: Sequence[Tensor], pieces: Sequence[Piece], size: int) -> list[Tensor]:
    model = Deep()
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    (loss_of(model, pieces[0])["loss"] / size).backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize(
    ("workers", "options"),
    [(3, {"zero": 3}), (4, {"shard": 2}), pytest.param(3, {"zero": 1}, marks=pytest.mark.slow)],
    ids=str,
)
def test_gradients_that_travel_in_bf16_are_rounded_and_added_in_fp32(workers: int, options: dict[str, Any]) -> None:
    answers = run_ranks(workers, rounded_away, workers, options)
    assert answers == [answers[0]] * workers
    from_paper, from_exact = answers[0]
    assert from_paper < 1e-6
    assert 1e-4 < from_exact < 2**-8


def test_what_overflows_is_seen_after_it_has_travelled_in_bf16() -> None:
    """As a loss in fp16 needs it, whose scale falls then."""
    sent = rounded(torch.tensor([float("inf"), float("nan"), 1.0, 65504.0 * 65536]))
    assert sent.isfinite().tolist() == [False, False, True, True]
    assert rounded(torch.ones(2, dtype=torch.complex64)).dtype == torch.complex64


class Choosing(Model):
    """On each worker another way through the blocks."""

    way: Sequence[int] = ()

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for number in self.way:
            hidden = self.blocks[number](hidden)
        out: Tensor = self.last(hidden)
        return out


class Reaching(Model):
    """Takes a weight out of a block."""

    def forward(self, words: Tensor) -> Tensor:
        block: Any = self.blocks[0]
        hidden: Tensor = nn.functional.linear(self.words(words), block.up.weight)
        return hidden


def refusal(rank: int, kind: type[Model], ways: Sequence[Sequence[int]], shard: int | None = None) -> str:
    """What a model is answered, once it has been computed for up to three steps."""
    world, words = World(Place.from_environment()), torch.arange(4)
    model = kind()
    if isinstance(model, Choosing):
        model.way = ways[rank]
    strategy = FullySharded(FSDP(shard=shard), world)
    placed = strategy.place(model)
    piece = Piece(lambda: words, 4, 0.5, (0, rank, 0))
    try:
        for _ in range(3):
            strategy.forward_backward(placed, [piece], loss_of, lambda loss: loss, [0.0])
    except ConfigError as error:
        said = error.what
    else:
        said = ""
    wait_for_all(world)
    return said


def wait_for_all(world: World) -> None:
    """Return when all workers are here, though exchanges are left over that break when one of them ends."""
    store = dist.distributed_c10d._get_default_store()
    if store.add("here", 1) == world.size:
        store.set("all", "here")
    store.wait(["all"])
    if not world.is_rank_0:
        store.set(f"{world.rank} is gone", "1")
    else:  # who keeps the store
        store.wait([f"{rank} is gone" for rank in range(1, world.size)])


@pytest.mark.parametrize(
    "ways",
    [
        ((0, 2), (0, 3)),
        pytest.param(((0, 2, 3), (0, 3)), marks=pytest.mark.slow),
        pytest.param(((0,), (0, 2, 3)), marks=pytest.mark.slow),
        ((0, 3, 2), (0, 2, 3)),
    ],
)
def test_workers_that_compute_other_layers_are_told_before_the_update(ways: Any) -> None:
    for said in run_ranks(2, refusal, Choosing, ways):
        assert "not all workers have used the same parts of the model" in said


@pytest.mark.parametrize(
    "ways",
    [
        ((0, 2), (0, 3)),
        pytest.param(((0,), (0, 2, 3)), marks=pytest.mark.slow),
        pytest.param(((0, 3), (0,)), marks=pytest.mark.slow),
    ],
)
def test_copies_that_compute_other_layers_are_told_before_the_update(ways: Any) -> None:
    """Those of one copy do the same, so that only the sum over the copies could show it."""
    first, second = ways
    for said in run_ranks(4, refusal, Choosing, (first, first, second, second), 2):
        assert "not all workers have used the same parts of the model" in said


def test_a_layer_that_all_leave_out_is_no_trouble_and_a_weight_taken_out_of_one_is() -> None:
    assert run_ranks(2, refusal, Choosing, ((0, 3), (0, 3))) == ["", ""]
    for said in run_ranks(2, refusal, Reaching, ()):
        assert "a parameter was used outside the forward pass of the module that holds it" in said


class Plain(nn.Module):
    """Every tensor in a module that gives it its values."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = (
            nn.Embedding(WORDS, WIDTH),
            nn.ModuleList(Block(norm=nn.BatchNorm1d) for _ in range(2)),
        )
        self.last = nn.Linear(WIDTH, WORDS)
        self.last.weight = self.words.weight


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def first_values(rank: int) -> dict[str, bool]:
    """Whether a model from the meta device is, in parts, what it is where one process makes all of it."""
    world = World(Place.from_environment())
    alone = on_meta(Plain)
    randomness.seed_all(5)
    materialise(alone.modules(), places_of(alone))
    randomness.seed_all(5)
    strategy = FullySharded(FSDP(), world)
    placed = strategy.place(on_meta(Plain))
    found = placed.state_dict()
    return {name: torch.equal(strategy.holding.full(found[name]), value) for name, value in alone.state_dict().items()}


def test_a_model_without_values_gets_the_same_in_parts_as_in_one_process() -> None:
    for found in run_ranks(2, first_values):
        assert found
        assert all(found.values()), found


def test_tensors_that_nothing_writes_are_refused() -> None:
    for make, sentence in (
        (Model, "nothing gives frozen its values: Model has no reset_parameters"),
        (Lacking, "gives bias its values: reset_parameters.. of Lacking does not write it"),
    ):
        model = on_meta(make)
        with pytest.raises(ConfigError, match=sentence):
            materialise(model.modules(), places_of(model))


class Lacking(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Views(nn.Module):
    """Units that give views, which are written into."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(64, 64)) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs[:, None]  # of a third dim: PyTorch computes it in two, and gives a view
        for block in self.blocks:
            out = block(hidden)
            out += hidden
            hidden = out
        return hidden


def norms_of_views(rank: int, size: int) -> list[float]:
    torch.manual_seed(0)
    world, model = World(Place.from_environment()), Views()
    strategy: Any = SingleProcess(world) if size == 1 else FullySharded(FSDP(), world)
    placed, found = strategy.place(model), []
    for _ in range(2):
        pieces = [piece for each in range(rank, 2, size) for piece in pieces_of(each, 2, 1)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.forward_backward(placed, pieces, loss_of, lambda loss: loss, [0.0])
        assert not caught, caught[0].message
        found.append(strategy.norm(placed).item())
    return found


def test_units_may_give_views_that_are_written_into() -> None:
    [alone] = run_ranks(1, norms_of_views, 1)
    for found in run_ranks(2, norms_of_views, 2):
        assert found == pytest.approx(alone, rel=1e-6)
