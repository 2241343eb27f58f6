"""Which modules of a model are its blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from manyhosts.errors import ConfigError
from manyhosts.strategies.blocks import blocks_by_size, blocks_of, named_blocks, repeated_blocks


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers(inputs)
        return out


class Net(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.body = nn.ModuleDict({"h": nn.ModuleList(Block() for _ in range(count))})
        self.head = nn.Linear(8, 10)


def names(found: list[tuple[str, nn.Module]]) -> list[str]:
    return [name for name, _ in found]


def test_repeated_blocks_come_in_order_with_the_names_that_the_model_gives_them() -> None:
    model = Net()
    assert names(repeated_blocks(model)) == ["body.h.0", "body.h.1", "body.h.2"]
    modules = dict(model.named_modules())
    assert all(modules[name] is block for name, block in repeated_blocks(model))
    assert blocks_of(model) == repeated_blocks(model)


class Held(nn.Module):
    """Holds blocks and has no forward pass."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        for number, block in enumerate(blocks):
            self.add_module(f"block{number}", block)


class Stack(nn.ModuleList):
    """A list that is called."""

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self:
            inputs = block(inputs)
        return inputs


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (lambda: nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2)), ["0.0", "0.1", "1.0", "1.1"]),
        (lambda: nn.ModuleList(nn.ModuleList([Block()]) for _ in range(2)), ["0.0", "1.0"]),
        (lambda: nn.ModuleList(nn.ModuleDict({"a": Block(), "b": nn.Linear(8, 8)}) for _ in range(2)), ["0.a", "1.a"]),
        (lambda: nn.ModuleList([Stack([Block()]), Stack([Block()])]), ["0", "1"]),
        (lambda: Held(Block(), Block()), ["block0", "block1"]),
        (lambda: nn.ModuleList([Held(Block()), Held(Block())]), ["0.block0", "1.block0"]),
    ],
)
def test_what_is_only_held_is_no_block_and_what_it_holds_is(rows: Callable[[], nn.Module], expected: list[str]) -> None:
    model = nn.Module()
    model.rows = rows()
    assert names(repeated_blocks(model)) == [f"rows.{name}" for name in expected]


def test_one_module_that_is_used_several_times_is_not_several_blocks() -> None:
    block = Block()
    assert repeated_blocks(nn.Sequential(block, block)) == []


def test_blocks_of_which_some_are_computed_again_are_of_one_class() -> None:
    model = Net()
    found = names(repeated_blocks(model))
    model.body["h"][0].__class__ = type("Block", (Block,), {"plain": Block})
    assert names(repeated_blocks(model)) == found


def test_layers_alone_are_no_repeated_blocks() -> None:
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []


def test_model_without_repeated_blocks_is_cut_by_size() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.ReLU(), nn.Linear(64, 64))),
        nn.Linear(64, 32),
        nn.BatchNorm1d(32),
        nn.Linear(32, 32),
    )
    assert names(blocks_by_size(model)) == ["0.0", "0.1.1", "1", "3"], "small ones are nobody's block"
    assert names(blocks_of(model)) == names(blocks_by_size(model))
    assert blocks_by_size(nn.Linear(2, 2)) == []


def test_module_that_holds_most_of_its_parameters_itself_is_not_cut() -> None:
    assert names(blocks_by_size(nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 1)))) == ["0", "1"]


def test_blocks_are_named_by_their_place_or_their_class() -> None:
    model = Net()
    assert names(named_blocks(model, ["body.h.*"], where="units")) == ["body.h.0", "body.h.1", "body.h.2"]
    assert names(named_blocks(model, ["head", "Embedding"], where="units")) == ["embed", "head"]
    assert names(blocks_of(model, ["body.h.[01].layers"])) == ["body.h.0.layers", "body.h.1.layers"]


def test_name_of_no_module_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="names no module") as refused:
        named_blocks(Net(), ["body.g"], where="FSDP(units=…)")
    assert "did you mean 'body.h'?" in str(refused.value)
    assert "FSDP(units=…)" in str(refused.value)
