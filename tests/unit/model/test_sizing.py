"""What passes and updates take is found on tensors without memory, and is what real ones take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from held_memory import HeldMemory
from torch import Tensor, nn

from manyhosts.model.parameter_groups import parameters_of
from manyhosts.model.sizing import PassBytes, Unknown, gradients_let_go, optimizer_bytes, pass_bytes
from manyhosts.strategies.blocks import repeated_blocks

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(24), nn.Linear(24, 96), nn.Linear(96, 24)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = inputs + self.down(nn.functional.gelu(self.up(self.norm(inputs))))
        return out


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24), *[Block() for _ in range(4)], nn.Dropout(0.1), nn.Linear(24, 500))


BATCH = [torch.randn(16, 8), torch.randint(0, 500, (16,))]


def values(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1])}


def blocks(model: nn.Module) -> list[nn.Module]:
    return [block for _, block in repeated_blocks(model)]


def none(model: nn.Module) -> list[nn.Module]:
    return []


def found(
    model: nn.Module,
    values: Callable[[nn.Module, Any], dict[str, Tensor]] = values,
    *,
    chosen: Callable[[nn.Module], list[nn.Module]] = none,
) -> PassBytes:
    return pass_bytes(model, values, BATCH, CPU, again=blocks, chosen=chosen)


def test_passes_take_what_they_take_of_real_memory() -> None:
    model = make()
    with HeldMemory() as held:
        held.see([*model.parameters(), *model.buffers(), *BATCH])
        before = held.bytes()
        loss = values(model, BATCH)["loss"]
        kept = held.bytes() - before
        held.begin()
        with gradients_let_go(model):
            loss.backward()
        most = held.most - before
    assert found(model).activations == pytest.approx(kept, rel=0.02)
    assert found(model).activations + found(model).backward == pytest.approx(most, rel=0.05)


def test_nothing_is_changed_and_nothing_needs_values() -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    real = found(model)
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.device("meta"):
        assert found(make()) == real


def test_blocks_that_are_computed_again_keep_their_input_alone() -> None:
    passes = found(make())
    assert passes.checkpointed is not None
    # One block at a time is there whole; a block keeps 16 rows of 24, 96 and 96 numbers, and its input.
    assert passes.activations - passes.checkpointed == pytest.approx(3 * 16 * 4 * (24 + 96 + 96), rel=0.15)
    always = found(make(), chosen=blocks)
    assert (always.activations, always.checkpointed) == (passes.checkpointed, None)


def test_model_without_blocks_has_none_to_compute_again() -> None:
    assert found(nn.Linear(8, 500)).checkpointed is None


def test_pass_that_asks_for_a_value_is_told() -> None:
    def asks(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        loss = values(model, batch)["loss"]
        return {"loss": loss * 2 if loss.item() > 1 else loss}

    with pytest.raises(Unknown, match=r"item|data-dependent|DataDependent"):
        found(make(), asks)


@pytest.mark.parametrize(
    ("make_optimizer", "numbers"),
    [
        (lambda params: torch.optim.AdamW(params, lr=0.1), 2),
        (lambda params: torch.optim.SGD(params, lr=0.1), 0),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 1),
    ],
)
def test_optimizer_keeps_what_it_keeps_of_real_parameters(make_optimizer: Any, numbers: int) -> None:
    model = make()
    total = sum(each.nbytes for each in model.parameters())
    sizes = optimizer_bytes(make_optimizer, parameters_of(model))
    assert sizes.kept == pytest.approx(numbers * total, abs=8 * 4 * len(list(model.parameters())))
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer = make_optimizer(model.parameters())
    optimizer.step()
    with HeldMemory() as held:
        held.see([value for state in optimizer.state.values() for value in state.values()])
        held.see([each for parameter in model.parameters() for each in (parameter, parameter.grad)])
        before = held.bytes()
        optimizer.step()
    assert sizes.passing == pytest.approx(held.most - before, abs=2000)


def test_frozen_parameters_are_not_given_to_the_optimizer() -> None:
    model = make()
    model[0].requires_grad_(False)
    known: list[int] = []

    def count(params: Any) -> torch.optim.Optimizer:
        known.append(len(list(params)))
        return torch.optim.AdamW(params, lr=0.1)

    optimizer_bytes(count, parameters_of(model))
    assert known == [len(list(model.parameters())) - 2]


def test_optimizer_of_other_parameters_is_told() -> None:
    other = make()
    with pytest.raises(Unknown, match="other parameters"):
        optimizer_bytes(lambda _: torch.optim.SGD(other.parameters(), lr=0.1), parameters_of(make()))
