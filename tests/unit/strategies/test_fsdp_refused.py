"""What a model may not hold when it is cut into parts, told before anything is sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.config.fully_sharded import FSDP
from manyhosts.errors import ConfigError
from manyhosts.strategies.fsdp.refused import Replaced, check_placeable
from manyhosts.training.setup.model_checks import check_optimizer


def deep(change: Callable[[nn.Sequential], object]) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    change(model)
    return model


def add(name: str, parameter: nn.Parameter) -> Callable[[nn.Sequential], object]:
    return lambda model: model.register_parameter(name, parameter)


REFUSED: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "empty": (add("nothing", nn.Parameter(torch.empty(0, 3))), "'nothing' has no elements"),
    "hook": (lambda model: model[0].weight.register_hook(lambda gradient: gradient * 0.5), "'0.weight' has a hook"),
    "late hook": (
        lambda model: model[1].weight.register_post_accumulate_grad_hook(lambda _: None), "'1.weight' has a hook"
    ),
    "dtypes": (lambda model: model[2].double(), "'1.weight' and '2.weight' .* is of float32, the other of float64"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(kind: str) -> None:
    change, sentence = REFUSED[kind]
    model = deep(change)
    with pytest.raises(ConfigError, match=sentence):
        check_placeable(model, {"0": model[0]}, FSDP())


def test_dtypes_may_differ_from_unit_to_unit_and_where_nothing_is_trained() -> None:
    for change in (
        lambda model: model[0].double(),
        lambda model: model[2].double().requires_grad_(False),
    ):
        model = deep(change)
        check_placeable(model, {"0": model[0]}, FSDP())


def test_a_parameter_that_was_kept_elsewhere_is_told_when_it_gets_a_gradient() -> None:
    model = deep(lambda _: None)
    kept, replaced = model[0].weight, Replaced(model)
    for layer in model:
        for name, each in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(each.detach().clone()))
    replaced.check()
    model(torch.ones(2, 3)).sum().backward()
    replaced.check()
    kept.sum().backward()
    with pytest.raises(ConfigError, match=r"'0\.weight'.*before it was cut into parts"):
        replaced.check()


def test_an_optimizer_that_looks_at_whole_matrices_is_refused_where_workers_hold_parts() -> None:
    world, adafactor = World(Place()), torch.optim.Adafactor(nn.Linear(3, 3).parameters())
    check_optimizer(adafactor, world, holds_whole_model=True)
    check_optimizer(torch.optim.AdamW(nn.Linear(3, 3).parameters()), world, holds_whole_model=False)
    with pytest.raises(ConfigError, match="Adafactor looks at whole rows and columns"):
        check_optimizer(adafactor, world, holds_whole_model=False)
