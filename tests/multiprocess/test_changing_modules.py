"""Buffers that a forward pass changes, and parameters unfrozen in the middle: right, or refused on all ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from unusual import BATCH, STEPS, Case, rows, state_of, with_us

pytestmark = pytest.mark.multiprocess


class Changing(nn.Module):
    """Keeps something of what it has seen."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.passes = how, nn.Linear(6, 2), 0
        self.register_buffer("seen", torch.zeros(6), persistent=how != "not persistent")
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        mean = x.detach().mean(0)
        if self.how == "in place" or (self.how == "every third pass" and self.passes % 3 == 0):
            self.seen.lerp_(mean, 0.1)
        elif self.how in ("replaced", "not persistent"):
            self.seen = 0.9 * self.seen + 0.1 * mean
        elif self.how == "by .data":
            self.seen.data = 0.9 * self.seen + 0.1 * mean
        elif self.how == "written to .data":
            self.seen.data.lerp_(mean, 0.1)
        elif self.how == "counted":
            self.count += 1
        elif self.how == "cached" and len(x) > len(self.cache):
            self.cache = torch.arange(float(len(x)))
        return self.layer(x + self.seen)


class Spectral(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), nn.Tanh(), nn.Linear(4, 2))


class Instance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.InstanceNorm1d(2, track_running_stats=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x.view(-1, 2, 3)).flatten(1))


SAMPLE_WISE = ["in place", "replaced", "every third pass", "not persistent", "by .data", "written to .data"]
CASES = {name: Case(partial(Changing, name)) for name in [*SAMPLE_WISE, "counted", "cached"]}
CASES |= {"spectral": Case(Spectral), "instance": Case(Instance)}
MIXES = "so the model looks at the other samples of a batch"
"""What a look says of one that uses in a pass what it has made of all samples of it."""
RIGHT_ANYWHERE = ["cached"]
RIGHT_WITH_PLAIN_DDP = ["counted", "spectral", "cached"]


def train_all(rank: int, run_dir: Path) -> dict[tuple[str, int | None], dict[str, Tensor] | str]:
    found = {}
    for name, case in CASES.items():
        for parts in (None, 4):
            found[name, parts] = with_us(rank, case, run_dir / f"{name} {parts}", virtual_workers=parts)
    for only in (False, True):
        for parts in (None, 4):
            found[f"unfrozen {only}", parts] = unfreeze(rank, run_dir / f"unfrozen {only} {parts}", parts, only=only)
    return found


def unfreeze(rank: int, run_dir: Path, parts: int | None, *, only: bool) -> dict[str, Tensor] | str:
    """Train a model whose first layer is frozen until the third step is done, on the leader or on all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    case = Case(lambda: model, optimizer=lambda _: thawing(model, thaws=not only or rank == 0))
    return with_us(rank, case, run_dir, virtual_workers=parts)


def thawing(model: nn.Sequential, *, thaws: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = []

    def thaw(*_: Any) -> None:
        steps.append(1)
        if thaws and len(steps) == 3:
            model[0].requires_grad_()
        if thaws and len(steps) == 4:
            model[2].bias.requires_grad_()

    optimizer.register_step_post_hook(thaw)
    return optimizer


def thawed_in_plain_pytorch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    optimizer, data = thawing(model, thaws=True), rows().tensors
    for step in range(STEPS):
        begin = step % 3 * BATCH
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data[0][begin : begin + BATCH]), data[1][begin : begin + BATCH]).backward()
        optimizer.step()
    return state_of(model)


@pytest.fixture(scope="module", params=[(1, 3), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """What each worker ends with, by the number of workers."""
    return {workers: run_ranks(workers, train_all, tmp_path_factory.mktemp("runs")) for workers in request.param}


@pytest.mark.parametrize("name", CASES)
def test_what_each_worker_changes_by_its_own_samples_is_refused_by_name_on_all(name: str, answers: Any) -> None:
    for workers, ranks in answers.items():
        found = [each[name, None] for each in ranks]
        if workers > 1 and name not in RIGHT_WITH_PLAIN_DDP:
            buffer = "norm.running_mean" if name == "instance" else "seen"
            assert len(set(found)) == 1, found
            assert any(each in found[0] for each in (f"changes the buffer '{buffer}'", MIXES)), found[0]
        else:
            for each in found:
                assert_equal(each, answers[1][0][name, None], but=["cache"], tolerance=1e-5)
                assert_equal(each, found[0], but=["cache"])


@pytest.mark.parametrize("name", CASES)
def test_virtual_workers_refuse_every_change_in_the_first_step(name: str, answers: Any) -> None:
    for ranks in answers.values():
        found = [each[name, 4] for each in ranks]
        if name in RIGHT_ANYWHERE:
            for each in found:
                assert_equal(each, answers[1][0][name, 4], but=["cache"])
        else:
            assert len(set(found)) == 1, found
            said = (
                "whose bits would depend on who computes what",
                "'passes' is kept from one batch to the next",
                MIXES,
            )
            assert any(each in found[0] for each in said), found[0]


@pytest.mark.parametrize("parts", [None, 4])
def test_parameters_unfrozen_in_the_middle_are_trained_by_all(parts: int | None, answers: Any) -> None:
    for ranks in answers.values():
        for each in ranks:
            assert_equal(each["unfrozen False", parts], thawed_in_plain_pytorch(), tolerance=1e-4)
            assert_equal(each["unfrozen False", parts], ranks[0]["unfrozen False", parts])
            if parts is not None:
                assert_equal(each["unfrozen False", parts], answers[1][0]["unfrozen False", parts])


@pytest.mark.parametrize("parts", [None, 4])
def test_parameters_unfrozen_on_one_worker_only_are_refused_on_all(parts: int | None, answers: Any) -> None:
    for workers, ranks in answers.items():
        if workers > 1:
            found = {each["unfrozen True", parts] for each in ranks}
            assert len(found) == 1
            assert f"the parameter '0.weight' is to be trained on 1 of {workers} workers" in found.pop()


def assert_equal(found: Any, expected: Any, *, but: list[str] | None = None, tolerance: float = 0) -> None:
    assert not isinstance(found, str), found
    for name, value in expected.items():
        if name not in (but or []):
            about = partial("{}: {}".format, name)
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=about)
