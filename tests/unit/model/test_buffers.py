"""Buffers that are in no state_dict, that are expanded, or that a forward pass replaces."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from unusual import Case, OddMemory, state_of, trainer_for

from manyhosts.model.buffers import BufferCopies, put_transient, transient


class Scaled(nn.Module):
    """A layer whose output depends on a buffer that is in no state_dict."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("scale", torch.full((2,), scale), persistent=False)
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 1.01
        return self.layer(x) * self.scale


def test_transient_buffers_are_known_by_name_and_replaced_where_they_do_not_fit() -> None:
    one, other = Scaled(1.0), Scaled(2.0)
    one.cache = torch.ones(3, dtype=torch.int64)
    given = transient(one)
    assert sorted(given) == ["cache", "scale"]
    kept = other.scale
    put_transient(other, {**given, "gone.long.ago": torch.ones(1)})
    assert other.scale is kept
    assert other.scale.tolist() == [1, 1]
    assert other.cache.tolist() == [1, 1, 1]
    assert other.cache is not one.cache


def test_step_that_is_done_again_finds_the_buffers_of_before_it() -> None:
    model = nn.Sequential(Scaled(1.0), OddMemory(), nn.BatchNorm1d(2))
    copies, before, tensors = BufferCopies(model), state_of(model), list(model.buffers())
    copies.keep()
    model[0].scale = model[0].scale * 3
    model[1].mask.logical_not_()
    model[1].expanded.narrow(0, 0, 1).add_(1)
    model[2](torch.randn(4, 2))
    copies.put_back()
    assert all(one is other for one, other in zip(model.buffers(), tensors, strict=True))
    for name, value in state_of(model).items():
        assert torch.equal(value, before[name]), name


def test_run_that_goes_on_has_the_buffers_of_before_whether_persistent_or_expanded(tmp_path: Path) -> None:
    class Both(OddMemory):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled(float(torch.rand(())))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.scaled(x)

    torch.manual_seed(0)
    whole = trainer_for(Case(Both), tmp_path / "whole")
    whole.fit("6 steps")
    torch.manual_seed(0)
    trainer_for(Case(Both), tmp_path / "cut").fit("3 steps")
    torch.manual_seed(1)
    rest = trainer_for(Case(Both), tmp_path / "cut")
    rest.fit("6 steps")
    for name, value in state_of(whole.model).items():
        assert torch.equal(state_of(rest.model)[name], value), name
