"""What travels when a gradient is pushed: equal on the other side, the touched rows alone, and with fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import manyhosts as mh
from manyhosts.communication.gathering import joined, parted
from manyhosts.errors import ConfigError, TrainingError
from manyhosts.strategies.asynchronous.served import Gradients, Served

ROWS, WIDTH = 4000, 16
SHAPES = len(joined([torch.empty(0)] * 3)) + 1
"""Bytes that say what travels of a parameter, and how."""


def embedding(*, sparse: bool, rows: list[int] | None = None) -> nn.Embedding:
    layer = nn.Embedding(ROWS, WIDTH, sparse=sparse)
    if rows is not None:
        layer(torch.tensor(rows)).square().sum().backward()
    return layer


@pytest.mark.parametrize("sparse", [True, False])
def test_of_an_embedding_the_touched_rows_travel_and_no_other(sparse: bool) -> None:
    layer = embedding(sparse=sparse, rows=[7, 7, 3999, 12])
    gradients = Gradients(mh.ParameterServer(), {})
    payload = gradients.packed({"weight": layer.weight}, exact=False)
    assert len(payload) == SHAPES + 3 * (8 + 4 * WIDTH)
    [found] = gradients.unpacked(payload, [layer.weight])
    assert found is not None
    assert found.is_sparse == sparse
    assert torch.equal(found.to_dense(), layer.weight.grad.to_dense())  # type: ignore[union-attr]


@given(data=st.data(), kind=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_what_is_unpacked_is_what_was_packed(data: st.DataObject, kind: torch.dtype) -> None:
    named, seed = {}, data.draw(st.integers(0, 99))
    draw = torch.Generator().manual_seed(seed)
    for number, shape in enumerate(
        data.draw(st.lists(st.sampled_from([(), (0,), (3,), (8, 2), (5, 2, 3)]), max_size=4))
    ):
        parameter = nn.Parameter(torch.zeros(shape, dtype=kind))
        if data.draw(st.booleans()):
            share = data.draw(st.sampled_from([0.0, 0.2, 1.0]))
            kept = torch.rand((*shape[:1], *(1,) * len(shape[1:])), generator=draw) < share
            parameter.grad = torch.randn(shape, generator=draw).to(kind) * kept
        named[str(number)] = parameter
    gradients = Gradients(mh.ParameterServer(), {})
    found = gradients.unpacked(gradients.packed(named, exact=False), list(named.values()))
    for one, parameter in zip(found, named.values(), strict=True):
        assert (one is None) == (parameter.grad is None)
        assert one is None or (torch.equal(one, parameter.grad) and one.dtype == kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(("compression", "share"), [("bf16", 0.5), ("fp16", 0.5), ("int8", 0.25)])
@pytest.mark.parametrize("sparse", [True, False])
def test_nothing_that_a_compression_drops_is_lost(compression: str, share: float, sparse: bool) -> None:
    """What has arrived of all pushes and what is kept add up to all gradients."""
    gradients = Gradients(mh.ParameterServer(compression=compression), {})
    layer, named, wanted = embedding(sparse=sparse), {}, torch.zeros(ROWS, WIDTH)
    named["weight"], arrived = layer.weight, torch.zeros(ROWS, WIDTH)
    for rows in ([1, 2, 3, 5], [2, 3], [3, 900, 5]) if sparse else ([*range(0, ROWS, 1)], [2, 3]):
        layer.zero_grad()
        layer(torch.tensor(rows)).cos().sum().backward()
        wanted += layer.weight.grad.to_dense()  # type: ignore[union-attr]
        payload = gradients.packed(named, exact=False)
        if len(rows) == ROWS:
            assert len(payload) < (share + 0.02) * ROWS * WIDTH * 4
        [found] = gradients.unpacked(payload, [layer.weight])
        arrived += found.to_dense()  # type: ignore[union-attr]
    kept = gradients.kept["weight"]
    assert kept.abs().max() > 0, "or the sum below would say nothing"
    torch.testing.assert_close(arrived + kept, wanted, rtol=0, atol=1e-6)


def test_small_tensors_and_what_travels_nowhere_are_exact() -> None:
    gradients, layer = Gradients(mh.ParameterServer(compression="int8"), {}), nn.Linear(100, 100)
    layer(torch.randn(3, 100)).square().sum().backward()
    named = dict(layer.named_parameters())
    pushed = gradients.unpacked(gradients.packed(named, exact=False), list(layer.parameters()))
    assert torch.equal(pushed[1], layer.bias.grad)  # type: ignore[arg-type]
    assert not torch.equal(pushed[0], layer.weight.grad)  # type: ignore[arg-type]
    own = gradients.unpacked(gradients.packed(named, exact=True), list(layer.parameters()))
    assert torch.equal(own[0], layer.weight.grad)  # type: ignore[arg-type]


def test_what_a_step_keeps_back_is_apart_from_what_was_kept_before_it() -> None:
    """So a step that breaks off, and is done again, takes none of it along."""
    layer = embedding(sparse=False, rows=[*range(ROWS)])
    before = {"weight": torch.full((ROWS, WIDTH), 0.001)}
    gradients = Gradients(mh.ParameterServer(compression="bf16"), before)
    first = gradients.packed({"weight": layer.weight}, exact=False)
    assert not torch.equal(gradients.kept["weight"], before["weight"])
    assert torch.equal(before["weight"], torch.full((ROWS, WIDTH), 0.001))
    again = Gradients(mh.ParameterServer(compression="bf16"), before).packed({"weight": layer.weight}, exact=False)
    assert torch.equal(first, again)


@pytest.mark.parametrize("name", ["powersgd", "topk", "bf61"])
def test_a_compression_that_takes_all_workers_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="from one worker to one other"):
        mh.ParameterServer(compression=name)


def pulled(served: Served) -> tuple[int, Tensor]:
    version, payload = served.pull()
    return version, *parted(payload)


@pytest.mark.parametrize(("looks_ahead", "momentum"), [(True, 0.5), (True, 0.0), (False, 0.5)])
def test_a_pull_is_given_what_the_pushes_under_way_are_expected_to_make(looks_ahead: bool, momentum: float) -> None:
    """Where the optimizer keeps something of its updates; else one says nothing of the next."""
    parameter, gradients = nn.Parameter(torch.zeros(3)), Gradients(mh.ParameterServer(), {})
    served = Served(
        [parameter], torch.optim.SGD([parameter], lr=1.0, momentum=momentum), gradients, looks_ahead=looks_ahead
    )

    def push(version: int, by: float) -> int:
        parameter.grad = torch.full((3,), -by)
        return served.push(version, gradients.packed({"it": parameter}, exact=True))

    first = [pulled(served) for _ in range(4)]
    assert all(not values.any() for _, values in first), "no update was made that could be made again"
    assert [push(0, 0.5), push(0, 0.25)] == [0, 1]
    newest = 0.5 + 0.25 + momentum * 0.5
    assert torch.equal(served.values[0], torch.full((3,), newest)), "what is kept is what the gradients made of it"
    _, values = pulled(served)  # with two pushes under way, and a last update of 0.5
    assert torch.equal(values, torch.full((3,), newest + 2 * 0.5 if looks_ahead and momentum else newest))
    assert [push(0, 1.0), push(0, 0.0), push(2, 0.0)] == [2, 3, 2]
    _, values = pulled(served)
    assert torch.equal(values, served.values[0]), "none is under way, so these are the newest"


def settings_of(strategy: Any) -> dict[str, Any]:
    return {name: getattr(strategy, name) for name in ("compression", "error_feedback", "compress_above")}


def test_what_is_pushed_has_the_settings_of_other_strategies() -> None:
    assert settings_of(mh.ParameterServer()) == settings_of(mh.DDP())


class Counts(torch.optim.SGD):
    """Keeps a number for all parameters together."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("kind", [torch.optim.SGD, Counts])
def test_a_server_steps_the_groups_that_it_keeps_some_of_and_refuses_what_is_kept_in_them(kind: Any) -> None:
    one, other = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = kind([{"params": [one], "lr": 1.0}, {"params": [other], "lr": 0.1}], lr=1.0)
    served = Served([other], optimizer, None, looks_ahead=False)
    if kind is Counts:
        with pytest.raises(TrainingError, match="Counts keeps 'lr' for all parameters together"):
            served.update([torch.ones(3)])
        return
    served.update([torch.ones(3)])
    torch.testing.assert_close(served.values[0], torch.full((3,), -0.1))
