"""What moves a learning-rate schedule on, and what is said where it takes the rate to next to nothing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import images_and_labels, network
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError
from manyhosts.events import Note, StepDone

BATCH, SAMPLES, EPOCHS = 10, 25, 3  # three steps an epoch


def rates(
    folder: Path, *, fit: str = f"{EPOCHS} epochs", validation: Any = None, **more: Any
) -> tuple[list[float], list[str]]:
    """The learning rate of each step, and the notes."""
    heard: list[Any] = []
    more = {"loss": nn.CrossEntropyLoss(), **more}
    trainer = mh.Trainer(
        model=network,
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        data=mh.Data(train=TensorDataset(*images_and_labels(SAMPLES)), validation=validation, batch_size=BATCH),
        listeners=[heard.append],
        run_dir=folder,
        **more,
    )
    trainer.fit(fit)
    reported = [event for event in heard if isinstance(event, StepDone)]
    return [event.lr for event in reported], [event.text for event in heard if isinstance(event, Note)]


def tenth(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)


def test_schedule_follows_epochs_or_steps(tmp_path: Path) -> None:
    by_epoch, _ = rates(tmp_path / "epoch", schedule=tenth, schedule_every="epoch")
    assert by_epoch == pytest.approx([1.0] * 3 + [0.1] * 3 + [0.01] * 3)
    by_step, _ = rates(tmp_path / "step", schedule=tenth)
    assert by_step == pytest.approx([0.1**step for step in range(9)])


def test_schedule_by_epochs_goes_on_in_the_middle_of_one(tmp_path: Path) -> None:
    whole, _ = rates(tmp_path / "whole", schedule=tenth, schedule_every="epoch")
    first, _ = rates(tmp_path / "cut", schedule=tenth, schedule_every="epoch", fit="4 steps")
    rest, _ = rates(tmp_path / "cut", schedule=tenth, schedule_every="epoch")
    assert first + rest == whole


def test_rate_that_vanishes_is_noticed_once(tmp_path: Path) -> None:
    _, notes = rates(tmp_path / "falls", schedule=tenth)
    [said] = [note for note in notes if "learning rate has fallen" in note]
    assert 'schedule_every="epoch"' in said


def test_schedules_that_end_at_nothing_or_begin_there_are_not(tmp_path: Path) -> None:
    def linear(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 3, (9 - step) / 6, 1.0))

    for name, more in {"linear": {"schedule": linear}, "epoch": {"schedule": tenth, "schedule_every": "epoch"}}.items():
        _, notes = rates(tmp_path / name, **more)
        assert not [note for note in notes if "learning rate has fallen" in note], name


def test_rate_that_validations_have_reduced_is_not(tmp_path: Path) -> None:
    reported, notes = rates(
        tmp_path,
        schedule=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=1e-4, patience=0, threshold=100.0
        ),
        validation=TensorDataset(*images_and_labels(SAMPLES)),
        validate_every="1 step",
        early_stopping=mh.EarlyStopping("loss", mode="min", patience=99),
    )
    assert reported[5] < 1e-6
    assert not [note for note in notes if "learning rate has fallen" in note]


def test_resume_by_the_other_count_is_refused(tmp_path: Path) -> None:
    rates(tmp_path, schedule=tenth, schedule_every="epoch", fit="4 steps")
    with pytest.raises(ConfigError, match="schedule_every is step, and the run began with epoch"):
        rates(tmp_path, schedule=tenth)


def test_unknown_period_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="schedule_every is 'batch'"):
        rates(tmp_path, schedule_every="batch")


@pytest.mark.filterwarnings("error")
def test_warning_filters_are_touched_at_the_first_step_of_a_schedule_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filtered: list[str] = []
    filterwarnings = warnings.filterwarnings

    def noted(action: Any, message: str = "", *args: Any, **more: Any) -> None:
        filtered.append(message)
        filterwarnings(action, message, *args, **more)

    monkeypatch.setattr(warnings, "filterwarnings", noted)

    def skips_first(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * float("nan") if len(calls) == 1 else loss

    calls: list[int] = []
    given = {"loss": None, "step": skips_first, "on_bad_step": "skip"}
    found, _ = rates(tmp_path, fit="6 steps", schedule=tenth, **given)
    assert found == pytest.approx([0.1**step for step in range(6)]), "it moves on in the step that is left out, too"
    assert sum("lr_scheduler.step" in message for message in filtered) == 1
