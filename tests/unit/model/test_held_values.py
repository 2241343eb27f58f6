"""What is kept in plain Python is seen to change, and is put back in place, with what was in it."""

from __future__ import annotations

import enum
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from manyhosts.model.held_values import HeldValues, changed_attributes, differing

KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, [2]], lambda value: value[1].append(3)),
    "long list": (lambda: list(range(2000)), lambda value: value.append(1)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda value: value.append(3)),
    "dict": (lambda: {"a": 1, "b": 2}, lambda value: (value.pop("a"), value.update(b=3, c=4))),
    "ordered": (lambda: OrderedDict(a=1), lambda value: value.update(b=2)),
    "counter": (lambda: Counter(a=2), lambda value: value.update(a=1)),
    "set": (lambda: {1, 2}, lambda value: value.add(3)),
    "tuple of lists": (lambda: ([1], 2), lambda value: value[0].append(2)),
    "object": (lambda: SimpleNamespace(number=1, inner=[1]), lambda value: value.inner.append(2)),
    "tensor": (lambda: torch.zeros(3), lambda value: value.add_(1)),
    "array": (lambda: np.zeros(3), lambda value: value.__iadd__(1)),
    "torch's generator": (torch.Generator, lambda value: torch.rand(1, generator=value)),
    "NumPy's generator": (lambda: np.random.default_rng(0), lambda value: value.random()),
    "NumPy's old generator": (lambda: np.random.Generator(np.random.MT19937(0)), lambda value: value.random()),
    "Python's generator": (lambda: random.Random(0), lambda value: value.random()),
}


class Keeps(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@pytest.mark.parametrize("name", KEPT)
def test_change_is_seen_and_put_back_in_place(name: str) -> None:
    make, change = KEPT[name]
    model = Keeps(make())
    places, value = HeldValues(model), model.value
    before = places.now()
    assert not differing(before, places.now())
    change(model.value)
    assert differing(before, places.now()) == ["value"]
    assert "value, a plain attribute" in changed_attributes(before, places.now())
    places.put_back(before)
    assert model.value is value
    assert not differing(before, places.now())
    if name not in ("tensor", "array") and "generator" not in name:
        assert model.value == make()


def test_number_that_is_set_again_is_put_back() -> None:
    model = Keeps(1)
    places = HeldValues(model)
    before = places.now()
    model.value = 2
    places.put_back(before)
    assert model.value == 1
    assert not changed_attributes(before, places.now())


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_weight_that_a_hook_of_torch_computes_before_each_forward_is_no_change() -> None:
    layers = [
        nn.utils.weight_norm(nn.Linear(3, 3)),
        nn.utils.spectral_norm(nn.Linear(3, 3)),
        prune.l1_unstructured(nn.Linear(3, 3), "weight", 2),
        nn.Linear(3, 3),
    ]
    module = nn.Sequential(*layers)
    module[3].counter = 0
    before = HeldValues(module).now()
    for each in module.parameters():
        each.data.add_(1)
    module(torch.ones(2, 3))
    module[3].counter += 1
    assert differing(before, HeldValues(module).now()) == ["3.counter"]


class Split(enum.IntEnum):
    TRAIN = 1


class Rate:
    value = 1.0


def test_class_of_the_scripts_is_put_back_and_members_of_an_enum_are_let_be() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        Rate.value *= 0.5
        return (outputs - targets).square().mean() * int(Split.TRAIN)

    held = HeldValues(nn.Linear(2, 1), loss)
    before = held.now()
    loss(torch.ones(1), torch.ones(1))
    assert differing(before, held.now()) == ["Rate"]
    held.put_back(before)
    assert Rate.value == 1.0
    assert not differing(before, held.now())
