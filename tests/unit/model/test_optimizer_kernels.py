"""On a host an optimizer steps as PyTorch steps there, without a look at each parameter in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from manyhosts.model.optimizer_kernels import fuse


def trained(kind: Any, *, fused: bool, **options: Any) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = kind(model.parameters(), lr=0.1, **options)
    if fused:
        fuse(optimizer, holds_full_model=True)
    for _ in range(3):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in model.parameters()], optimizer.param_groups[0]["foreach"]


KINDS = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.NAdam, optim.Adadelta)


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_chosen_beforehand_is_the_one_that_pytorch_chooses(kind: Any) -> None:
    wanted, before = trained(kind, fused=False)
    found, after = trained(kind, fused=True)
    assert (before, after) == (None, False)
    assert all(torch.equal(mine, its) for mine, its in zip(found, wanted, strict=True))


class OfTheScript(optim.SGD):
    """It may mean something else by the option."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.SGD, {"foreach": True}),
        (optim.SGD, {"foreach": False}),
        (optim.SGD, {"differentiable": True}),
        (optim.Adam, {"fused": True}),
        (OfTheScript, {}),
    ],
)
def test_what_the_script_has_said_stays(kind: Any, options: dict[str, Any]) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2))], lr=0.1, **options)
    fuse(optimizer, holds_full_model=True)
    assert optimizer.param_groups[0]["foreach"] is options.get("foreach")
