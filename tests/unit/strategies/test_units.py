"""Units of a model that is to be cut: found, named, or refused in a sentence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from manyhosts.config.fully_sharded import FSDP
from manyhosts.errors import ConfigError
from manyhosts.strategies.units import find_units, unit_bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers(inputs)
        return out


class Deep(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.blocks = nn.ModuleList([*(Block() for _ in range(blocks)), nn.Identity()])


def test_repeated_blocks_are_the_units_and_not_what_repeats_inside_them() -> None:
    assert list(find_units(Deep(), ())) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_model_without_repeats_is_cut_by_size() -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.ReLU(), nn.LayerNorm(5), nn.Linear(50, 40))
    assert list(find_units(model, ())) == ["0", "3"]


@pytest.mark.parametrize("patterns", [["blocks.*"], ["Block"], ["blocks.0", "blocks.[12]"]])
def test_units_are_named_by_path_or_class(patterns: list[str]) -> None:
    assert list(find_units(Deep(), patterns)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_unit_that_shares_a_parameter_with_another_is_left_to_the_rest() -> None:
    model = Deep()
    model.blocks[1].layers[0].weight = model.blocks[0].layers[0].weight  # type: ignore[index,union-attr]
    assert list(find_units(model, ())) == ["blocks.2"]
    with pytest.raises(ConfigError, match=r"'blocks\.0' has the parameter .*, which a module outside it has, too"):
        find_units(model, ["blocks.*"])


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        (["layers.*"], r"'layers\.\*' names no module of the model"),
        (["blocks"], "is a ModuleList, which is never called itself"),
        (["Identity"], "have no parameters"),
    ],
)
def test_names_that_make_no_unit_are_refused(patterns: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        find_units(Deep(), patterns)


def test_lists_of_parameters_are_left_to_the_rest() -> None:
    model = nn.Module()
    model.matrices = nn.ParameterList(torch.ones(9, 9) for _ in range(2))
    model.first, model.second = nn.Linear(9, 9), nn.Linear(9, 9)
    assert list(find_units(model, ())) == ["first", "second"]


def nested(width: int = 2, depth: int = 2) -> nn.ModuleList:
    return nn.ModuleList(nn.ModuleList(Block() for _ in range(width)) for _ in range(depth))


def test_blocks_of_lists_in_lists_are_units_and_the_lists_are_none() -> None:
    model = nn.Module()
    model.stages = nested()
    assert list(find_units(model, ())) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert unit_bytes(model, total=4 * 160) == (160, 160, 160, 160, 0)


def test_a_model_that_is_one_module_or_lists_of_parameters_is_all_rest() -> None:
    lists = nn.Module()
    lists.matrices = nn.ParameterList(torch.ones(9, 9) for _ in range(2))
    for model, size in ((nn.Linear(4, 4), 80), (lists, 648)):
        assert find_units(model, ()) == {}
        assert unit_bytes(model, total=size) == (size,)


def test_a_model_of_single_numbers_has_no_parts() -> None:
    model = nn.Module()
    model.one = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="every parameter of the model, a Module, is a single number"):
        find_units(model, ())
    assert unit_bytes(model, total=4) == ()


def test_a_named_list_of_parameters_is_refused_with_what_can_be_done() -> None:
    model = nn.Module()
    model.matrices = nn.ParameterList(torch.ones(9, 9) for _ in range(2))
    with pytest.raises(ConfigError, match="is a ParameterList, which is never called") as refused:
        find_units(model, ["matrices"])
    assert "what no unit holds is one of its own" in str(refused.value)


def test_units_may_be_given_as_classes() -> None:
    for given in ([nn.Linear], nn.Linear, {nn.Linear}, ["Linear"]):
        assert FSDP(units=given).patterns == ("Linear",)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="units holds a Linear, and a unit is named"):
        FSDP(units=[nn.Linear(2, 2)])  # type: ignore[list-item]
