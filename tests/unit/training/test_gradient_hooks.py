"""Hooks and backward passes of the script's own that see a piece of a batch: refused where it matters, else right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import events
from torch import Tensor, nn
from unusual import BATCH, Case, state_of, trainer_for

from manyhosts.errors import ConfigError


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def of_parameters(act: Callable[[Tensor], Any], *, after: bool) -> nn.Module:
    model = plain()
    for each in model.parameters():
        if after:
            each.register_post_accumulate_grad_hook(lambda own: acted(act, own.grad))
        else:
            each.register_hook(lambda gradient: act(gradient.clone()))
    return model


def acted(act: Callable[[Tensor], Any], gradient: Any) -> None:
    act(gradient)


def of_module(act: Callable[[Tensor], Any], *, before: bool) -> nn.Module:
    model = plain()
    if before:
        model[2].register_full_backward_pre_hook(lambda _, given: tuple(act(each.clone()) for each in given))
    else:
        model[2].register_full_backward_hook(lambda _, found, given: tuple(act(each.clone()) for each in found))
    return model


class OfActivation(nn.Module):
    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.act, self.first, self.last = act, nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.act(gradient.clone()))
        return self.last(x.tanh())


class Changed(torch.autograd.Function):
    act: Callable[[Tensor], Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[Tensor], Any]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.act(gradients[0].clone()), None


class OfFunction(OfActivation):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(Changed.apply(self.first(x), self.act).tanh())  # type: ignore[no-untyped-call]


def halved(gradient: Tensor) -> Tensor:
    return gradient.mul_(0.5)


def unit(gradient: Tensor) -> Tensor:
    return gradient.div_(gradient.norm())


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp_(-0.01, 0.01)


PLACES: dict[str, Callable[[Callable[[Tensor], Any]], nn.Module]] = {
    "parameters": partial(of_parameters, after=False),
    "parameters, after": partial(of_parameters, after=True),
    "module": partial(of_module, before=False),
    "module, before": partial(of_module, before=True),
    "activation": OfActivation,
    "function": OfFunction,
}


def trained(act: Callable[[Tensor], Any], place: str, run_dir: Path, **more: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = trainer_for(Case(lambda: PLACES[place](act)), run_dir, **more)
    made.fit("2 steps")
    return state_of(made.model)


@pytest.mark.parametrize("place", PLACES)
def test_hook_that_depends_on_the_piece_is_refused_where_a_batch_is_cut(place: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"the gradient of '.*' over some samples is not the mean of those over parts"
    ):
        trained(unit, place, tmp_path, micro_batch_size=BATCH // 2)


@pytest.mark.parametrize("place", [place for place in PLACES if place != "parameters, after"])
def test_hook_that_is_linear_trains_as_in_one_piece(place: str, tmp_path: Path) -> None:
    whole = trained(halved, place, tmp_path / "whole")
    for name, value in trained(halved, place, tmp_path / "cut", micro_batch_size=BATCH // 2).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6)
    assert place != "parameters" or any(
        "hooks on the gradient" in each["text"] for each in events(tmp_path / "cut", "note")
    )


def test_hook_after_each_piece_is_told(tmp_path: Path) -> None:
    """It acts on what is summed so far, so that even a factor is applied once for each piece."""
    for act in (halved, clamped):
        with pytest.raises(ConfigError, match="the gradient of"):
            trained(act, "parameters, after", tmp_path / act.__name__, micro_batch_size=BATCH // 2)


def test_in_one_piece_hooks_are_those_of_pytorch(tmp_path: Path) -> None:
    for place in PLACES:
        trained(unit, place, tmp_path / place)
