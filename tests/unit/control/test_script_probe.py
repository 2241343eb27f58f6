"""What a worker sees of a training loop that it knows nothing about."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from manyhosts.control.agent.script_probe import LOOKS, ScriptProbe


class Heard:
    """Takes reports, as the reporter does."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.accounts: list[dict[str, Any]] = []
        self.closed = False

    def note_step(self, step: int) -> None:
        self.noted = step

    def send(self, kind: str, **fields: Any) -> None:
        if kind == "step":
            self.steps.append(fields["step"])
        else:
            assert kind == "script_probe"
            self.accounts.append(fields)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def heard() -> Heard:
    return Heard()


def watch(heard: Heard, workers: int) -> ScriptProbe:
    """A worker's script probe, with everything watched that its script may use."""
    made = ScriptProbe(heard, workers)  # type: ignore[arg-type]
    made.watch_steps(sys.modules["torch.optim.optimizer"])
    if made.looks_closely:
        made.watch_batches(sys.modules["torch.utils.data.dataloader"])
    return made


@pytest.fixture
def steps(heard: Heard) -> Iterator[ScriptProbe]:
    made = watch(heard, workers=1)
    yield made
    made.withdraw()


def account_of(rank: int, batches: list[torch.Tensor], *, seed: int = 0) -> dict[str, Any]:
    """What one of two workers tells of a short training on `batches`."""
    heard = Heard()
    script_probe = watch(heard, workers=2)
    train(batches, seed)
    script_probe.report_end()
    script_probe.withdraw()
    assert heard.closed
    return heard.accounts[0]


def train(batches: list[torch.Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(batches, batch_size=None):  # type: ignore[arg-type]
        layer(batch).sum().backward()
        optimizer.step()


def optimizer() -> torch.optim.Optimizer:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    return torch.optim.SGD(layer.parameters(), lr=0.1)


def test_steps_are_counted_and_reported_now_and_then(steps: ScriptProbe, heard: Heard) -> None:
    one = optimizer()
    for _ in range(200):
        one.step()
    assert steps.done == 200
    assert heard.steps[0] == 1
    assert len(heard.steps) < 20


def test_two_optimizers_that_take_turns_make_one_step_together(steps: ScriptProbe) -> None:
    generator, discriminator = optimizer(), optimizer()
    for _ in range(5):
        discriminator.step()
        generator.step()
    assert steps.done == 5


def test_optimizer_that_wraps_another_counts_once(steps: ScriptProbe) -> None:
    inner = optimizer()

    class Outer(torch.optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]
            inner.step()

    outer = Outer(inner.param_groups, {})
    for _ in range(4):
        outer.step()
    assert steps.done == 4


def test_optimizer_that_takes_over_is_counted_on(steps: ScriptProbe) -> None:
    first, second = optimizer(), optimizer()
    for one in (first, second):
        for _ in range(10):
            one.step()
    assert steps.done >= 19, "progress must be seen after a change"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compiled_step_is_counted_as_well(steps: ScriptProbe) -> None:
    step = torch.compile(optimizer().step, backend="eager")
    for _ in range(3):
        step()
    assert steps.done == 3


def test_step_that_the_gradient_scaler_skips_is_none(steps: ScriptProbe) -> None:
    one = optimizer()
    scaler = torch.amp.GradScaler("cpu")
    for value in (1.0, float("inf")):
        one.zero_grad()
        scaler.scale(one.param_groups[0]["params"][0].sum() * value).backward()
        scaler.step(one)
        scaler.update()
    assert steps.done == 1


def test_nothing_is_counted_any_more_after_the_end(steps: ScriptProbe, heard: Heard) -> None:
    one = optimizer()
    one.step()
    steps.withdraw()
    one.step()
    steps.report_end()
    assert (steps.done, heard.steps, heard.accounts) == (1, [1], [])


def test_account_of_the_first_steps_comes_once_they_are_made(heard: Heard) -> None:
    script_probe = watch(heard, workers=2)
    one = optimizer()
    for _ in range(LOOKS - 1):
        one.step()
    assert heard.accounts == []
    for _ in range(5):
        one.step()
    [account] = heard.accounts
    assert (account["steps"], account["ended"], account["world"], account["workers"]) == (LOOKS, False, 0, 2)
    script_probe.report_end()
    assert heard.accounts[-1]["ended"]
    script_probe.withdraw()


def test_equal_workers_give_equal_accounts_and_others_do_not() -> None:
    batches = [torch.ones(3, 2) * number for number in range(4)]
    first, same = account_of(0, batches), account_of(1, batches)
    assert first == same
    assert first["weights"] is not None
    assert sorted(first["samples"]) == ["batch 0", "batch 1", "batch 2"]
    other_seed, other_samples = account_of(1, batches, seed=1), account_of(1, batches[::-1])
    assert other_seed["weights"] != first["weights"]
    assert other_seed["samples"] == first["samples"]
    assert other_samples["samples"] != first["samples"]
    assert other_samples["weights"] == first["weights"]


def test_script_that_ends_before_the_third_step_is_told_of_as_well() -> None:
    account = account_of(0, [torch.ones(3, 2)])
    assert (account["steps"], account["ended"]) == (1, True)
    assert list(account["samples"]) == ["batch 0"]


def test_being_watched_changes_no_number_and_leaves_nothing_behind(heard: Heard) -> None:
    loader, maker = torch.utils.data.dataloader._BaseDataLoaderIter.__next__, torch.optim.Optimizer.__init__
    hooks = len(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks)
    account_of(0, [torch.ones(3, 2)] * 4, seed=5)
    watched = torch.rand(3)
    train([torch.ones(3, 2)] * 4, seed=5)
    assert torch.equal(watched, torch.rand(3)), "no random number was taken"
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is loader
    assert torch.optim.Optimizer.__init__ is maker
    assert len(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks) == hooks


def test_batch_that_cannot_be_read_is_not_held_against_anybody(heard: Heard) -> None:
    class Strange:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> object:
            return {"deep": [object()] * 3}

    script_probe = watch(heard, workers=2)
    one = optimizer()
    for _ in torch.utils.data.DataLoader(Strange(), batch_size=None):  # type: ignore[arg-type]
        one.step()
    assert heard.accounts[0]["samples"] is None
    script_probe.withdraw()


@pytest.mark.parametrize("made", [False, True])
def test_optimizer_that_was_made_is_remembered_without_a_step(heard: Heard, made: bool) -> None:
    script_probe = watch(heard, workers=1)
    if made:
        optimizer()
    script_probe.report_end()
    assert (heard.accounts[0]["optimizer"], heard.accounts[0]["steps"]) == (made, 0)
    script_probe.withdraw()
