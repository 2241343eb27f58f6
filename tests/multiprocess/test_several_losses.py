"""Losses that are means over different things, each by its own count: that of one process, however a batch is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError

pytestmark = pytest.mark.multiprocess

BATCH, STEPS = 15, 4


def rows() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(5)
    return torch.randn(60, 6, generator=made), torch.randint(0, 4, (60,), generator=made)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def losses(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Of classes, over all samples; of boxes, over those of the last class alone, of which a piece may have none."""
    outputs, has_box = model(batch[0]), batch[1] == 3
    boxes = (outputs[:, 0].square() * has_box).sum() / has_box.sum()
    return {"classes": functional.cross_entropy(outputs, batch[1]), "boxes": 5 * boxes}


def step(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": losses(model, batch)}


def counts(batch: Any) -> dict[str, Any]:
    return {"classes": len(batch[1]), "boxes": (batch[1] == 3).sum()}


def trained(rank: int, run_dir: Path, more: dict[str, Any]) -> tuple[list[Tensor], str, float]:
    torch.set_default_dtype(torch.float64)
    try:
        inputs, targets = rows()
        data = TensorDataset(inputs.double(), targets)
        trainer = mh.Trainer(
            model=network(),
            step=step,
            weight=counts,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.3),
            data=mh.Data(train=data, validation=data, batch_size=BATCH, shuffle=False),
            run_dir=run_dir,
            **more,
        )
        result = trainer.fit(f"{STEPS} steps")
        return (
            [each.detach().clone() for each in trainer.model.parameters()],
            result.weights_sha256,
            result.validation["loss"],
        )
    finally:
        torch.set_default_dtype(torch.float32)


def by_hand() -> tuple[list[Tensor], float]:
    torch.set_default_dtype(torch.float64)
    try:
        model = network()
        inputs, targets = rows()
        inputs = inputs.double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for begin in range(0, BATCH * STEPS, BATCH):
            optimizer.zero_grad()
            sum(losses(model, (inputs[begin : begin + BATCH], targets[begin : begin + BATCH])).values()).backward()  # type: ignore[union-attr]
            optimizer.step()
        with torch.no_grad():
            value = float(sum(losses(model, (inputs, targets)).values()))
        return [each.detach() for each in model.parameters()], value
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("workers", "more"), [(1, {}), (1, {"micro_batch_size": 2}), (2, {}), (3, {"micro_batch_size": 2})]
)
def test_several_losses_are_those_of_one_process(workers: int, more: dict[str, Any], tmp_path: Path) -> None:
    wanted, value = by_hand()
    for weights, _, validation in run_ranks(workers, trained, tmp_path, more):
        for one, other in zip(weights, wanted, strict=True):
            assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)
        assert validation == pytest.approx(value, rel=1e-9)


def test_several_losses_have_the_same_bits_with_virtual_workers(tmp_path: Path) -> None:
    found = {
        run_ranks(workers, trained, tmp_path / str(workers), {"virtual_workers": 3})[0][1] for workers in (1, 2, 3)
    }
    assert len(found) == 1
    weights = run_ranks(2, trained, tmp_path / "again", {"virtual_workers": 3})[0][0]
    for one, other in zip(weights, by_hand()[0], strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_names_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    data = mh.Data(train=TensorDataset(*rows()), batch_size=BATCH)
    make = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    other = lambda batch: {"classes": len(batch[1])}  # noqa: E731
    with pytest.raises(ConfigError, match="step returns the losses boxes, classes, and weight says what these count"):
        mh.Trainer(model=network, step=step, weight=other, optimizer=make, data=data, run_dir=tmp_path).fit("1 step")
