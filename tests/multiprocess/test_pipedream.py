"""A pipeline that is not emptied between updates, against a plain simulation of its delays, and as runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import step_lines
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhosts as mh

pytestmark = pytest.mark.multiprocess
WIDTH, SAMPLES, BATCH, PIECE, STEPS = 6, 107, 42, 4, 5  # a batch is ten micro-batches of 4 and one of 2
LAYERS = 5


@dataclass(frozen=True)
class Case:
    """One training, in plain values that travel to other processes."""

    versions: str
    accumulate: int
    optimizer: str = "SGD"

    def of(self, params: Any) -> torch.optim.Optimizer:
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(params, lr=0.02)
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)


CASES = {
    "two": Case("two", 3),
    "two, AdamW": Case("two", 4, "AdamW"),
    "all": Case("all", 1),
    "all, AdamW": Case("all", 2, "AdamW"),
    "one": Case("one", 3),
    "one, AdamW": Case("one", 4, "AdamW"),
}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(*[part for each in linear for part in (each, nn.Tanh())])


def data() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=made)
    return inputs, torch.sin(inputs.cumsum(1))


class Stale(torch.autograd.Function):
    """A linear layer whose backward pass finds other weights than its forward pass."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor, later: Tensor) -> Tensor:
        ctx.save_for_backward(given, later)
        return functional.linear(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        [gradient], (given, later) = gradients, ctx.saved_tensors
        return gradient @ later, gradient.t() @ given, gradient.sum(0), None


def simulated(case: Case, stages: int) -> dict[str, Tensor]:
    """The weights that the published rules give, in one process, from a list of all that there were in a step.

    What a stage's forward pass of a micro-batch finds: all updates of the backward passes before it, of which there
    are as many as micro-batches before it, less those under way behind the stage (`all`, `one`); or the updates up to
    the group before last (`two`).
    """
    model, (inputs, targets) = network(), data()
    optimizer = case.of(model.parameters())
    for batch in batches():
        history = [{name: each.detach().clone() for name, each in model.named_parameters()}]
        optimizer.zero_grad()
        for number, rows in enumerate(pieces := batch.split(PIECE)):
            group = number // case.accumulate
            hidden, leaves = inputs[rows], {}
            for layer in range(0, 2 * LAYERS, 2):
                behind = stages - 1 - max(s for s in range(stages) if s * 2 * LAYERS // stages <= layer)
                seen = max(number - behind, 0) // case.accumulate
                seen = max(group - 1, 0) if case.versions == "two" else seen
                weight, bias = (
                    leaves.setdefault(f"{layer}.{kind}", history[seen][f"{layer}.{kind}"].clone().requires_grad_())
                    for kind in ("weight", "bias")
                )
                if case.versions == "one":
                    hidden = Stale.apply(hidden, weight, bias, history[group][f"{layer}.weight"])
                else:
                    hidden = functional.linear(hidden, weight, bias)
                hidden = hidden.tanh()
            loss = functional.mse_loss(hidden, targets[rows]) * (len(rows) / len(batch))
            of_group = pieces[group * case.accumulate : (group + 1) * case.accumulate]
            (loss * (1 / sum(len(each) / len(batch) for each in of_group))).backward()
            for name, parameter in model.named_parameters():
                found = leaves[name].grad
                parameter.grad = found if parameter.grad is None else parameter.grad + found
            if (number + 1) % case.accumulate == 0 or number + 1 == len(pieces):
                optimizer.step()
                optimizer.zero_grad()
                history.append({name: each.detach().clone() for name, each in model.named_parameters()})
    return {name: each.detach() for name, each in model.named_parameters()}


def batches() -> Iterator[Tensor]:
    """The samples of each step, in the order of the dataset."""
    epoch = torch.arange(SAMPLES).split(BATCH)
    for step in range(STEPS):
        yield epoch[step % len(epoch)]


def trainer_of(case: Case, folder: Path, model: nn.Module, **further: Any) -> mh.Trainer:
    train = TensorDataset(*data())
    return mh.Trainer(
        model=model,
        loss=nn.MSELoss(),
        optimizer=case.of,
        data=mh.Data(train=train, validation=train, batch_size=BATCH, shuffle=False),
        strategy=mh.PipeDream(versions=case.versions, accumulate=case.accumulate, cuts="layers"),  # type: ignore[arg-type]
        **{"micro_batch_size": PIECE, "run_dir": folder, **further},
    )


def fit(rank: int, cases: Mapping[str, Case], folder: Path) -> dict[str, str]:
    found = {}
    for name, case in cases.items():
        found[name] = trainer_of(case, folder / name, network()).fit(f"{STEPS} steps").weights_sha256
    return found


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_have_the_weights_that_a_plain_simulation_of_their_delays_has(stages: int, tmp_path: Path) -> None:
    answers = run_ranks(stages, fit, CASES, tmp_path)
    assert all(answer == answers[0] for answer in answers)
    for name, case in CASES.items():
        expected, found = simulated(case, stages), mh.load(tmp_path / name, weights="last")
        for key, value in expected.items():
            if case.versions == "one":
                torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6, msg=f"{name}: {key}")
            else:
                assert torch.equal(found[key], value), f"{name}: {key}"
        lines = [line["values"] for line in step_lines(tmp_path / name)]
        behind = stages - 1
        most = {"two": 2, "all": 1 + -(-behind // case.accumulate), "one": 1}[case.versions]
        stale = {"two": 1, "all": most - 1, "one": min(1, behind)}[case.versions]
        assert all(line["versions_max"] == most and line["staleness_max"] == stale for line in lines), name
