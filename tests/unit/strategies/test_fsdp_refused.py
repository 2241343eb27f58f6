"""What a model may not hold when it is cut into parts, told before anything is sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.config.fully_sharded import FSDP
from manyhosts.config.pipelined import Pipeline
from manyhosts.config.tensor_cut import Tensor
from manyhosts.errors import ConfigError
from manyhosts.model.model_checks import check_optimizer, check_tensors
from manyhosts.strategies.fsdp.refused import Replaced, check_placeable
from manyhosts.strategies.pipeline.strategy import Pipelined
from manyhosts.strategies.strategy import Strategy
from manyhosts.strategies.tensor.strategy import TensorParallel


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
    "buffer": (
        lambda model: model[0].register_buffer("seen", model[0].weight.detach()[1:]),
        "the buffer '0.seen' lies in the memory of the parameter '0.weight'",
    ),
    "column": (
        lambda model: model.register_parameter("column", nn.Parameter(model[2].weight.detach().t()[1:])),
        "the parameter '2.weight' lies in the memory of the parameter 'column'",
    ),
    "script": (lambda model: model.append(torch.jit.script(nn.Linear(1, 1))), "the module '3' is TorchScript"),
    "dtypes": (lambda model: model[2].double(), "'1.weight' and '2.weight' .* is of float32, the other of float64"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(kind: str) -> None:
    change, sentence = REFUSED[kind]
    model = deep(change)
    with pytest.raises(ConfigError, match=sentence):
        check_placeable(model, {"0": model[0]}, FSDP())


def aliased(model: nn.Sequential) -> object:
    return model[0].register_buffer("seen", model[0].weight.detach())


@pytest.mark.parametrize(
    ("make", "change", "sentence"),
    [
        (lambda: TensorParallel(Tensor(), World(Place())), REFUSED["hook"][0], "'0.weight' has a hook"),
        (lambda: TensorParallel(Tensor(), World(Place())), aliased, "'0.seen' lies in the memory of"),
        (lambda: Pipelined(Pipeline(), World(Place())), aliased, "'0.seen' lies in the memory of"),
    ],
)
def test_other_strategies_that_keep_parts_refuse_it_too(
    make: Callable[[], Strategy], change: Callable[[nn.Sequential], object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make().place(deep(change))


def test_tensors_side_by_side_in_one_memory_can_be_cut() -> None:
    model, memory = deep(lambda _: None), torch.randn(12)
    model.register_parameter("left", nn.Parameter(memory.view(3, 4)[:, :2]))
    model.register_parameter("right", nn.Parameter(memory.view(3, 4)[:, 2:]))
    model[0].weight = model[1].weight
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
    check_optimizer(adafactor, world, holds_full_model=True)
    check_optimizer(torch.optim.AdamW(nn.Linear(3, 3).parameters()), world, holds_full_model=False)
    with pytest.raises(ConfigError, match="Adafactor looks at full rows and columns"):
        check_optimizer(adafactor, world, holds_full_model=False)


def test_buffer_of_inference_mode_is_refused_where_it_would_be_watched() -> None:
    model = deep(lambda _: None)
    with torch.inference_mode():
        model.register_buffer("table", torch.ones(3))
    with pytest.raises(ConfigError, match=r"table was made within torch\.inference_mode"):
        check_tensors(model)


def test_embedding_whose_gradient_is_divided_by_what_a_forward_pass_sees_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(3, 2, scale_grad_by_freq=True), nn.Linear(2, 1))
    with pytest.raises(ConfigError, match="the embedding '0' has scale_grad_by_freq"):
        check_tensors(model)
