"""Settings are checked where they are made, and say what to do instead."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from manyhosts.config.settings import Settings
from manyhosts.config.snapshots import Snapshots
from manyhosts.config.stopping import EarlyStopping
from manyhosts.config.strategies import BY_NAME, DDP, Single, named
from manyhosts.errors import ConfigError


def settings(**changes: Any) -> Settings:
    return Settings(**({"batch_size": 32} | changes))


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": -1}, "batch_size"),
        ({"batch_size": None, "batch_size_per_worker": 0}, "batch_size_per_worker"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"evaluation_batch_size": 0}, "evaluation_batch_size"),
        ({"virtual_workers": 0}, "virtual_workers"),
        ({"loader_workers": -1}, "loader_workers"),
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"clip_gradients": -1.0}, "clip_gradients"),
        ({"precision": "fp8"}, "precision"),
        ({"batch_norm": "everywhere"}, "batch_norm"),
        ({"backend": "smoke signals"}, "backend"),
        ({"backend": "smddp"}, "backend"),
        ({"lr_scaling": "cubic", "batch_size": None, "batch_size_per_worker": 8}, "lr_scaling"),
        ({"lr_scaling": "sqrt"}, "lr_scaling"),
        ({"duration": "soon"}, "fit(…)"),
        ({"validate_every": "0 epochs"}, "validate_every"),
        ({"warmup": "5 bananas"}, "warmup"),
        ({"warmup": "5 min"}, "warmup"),
        ({"batch_size_per_worker": 8}, "mh.Data(…)"),
        ({"batch_size": None}, "mh.Data(batch_size=…)"),
    ],
    ids=lambda value: str(value),
)
def test_setting_that_cannot_work_is_refused(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(**changes)
    assert refused.value.where == where
    assert refused.value.fix


def test_settings_are_plain_and_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings().seed = 3  # type: ignore[misc]  # what the test is about


def test_batch_may_grow_with_the_workers_and_the_learning_rate_with_it() -> None:
    grown = settings(batch_size=None, batch_size_per_worker=8, lr_scaling="sqrt", warmup="5 epochs")
    assert (grown.batch_size, grown.batch_size_per_worker) == (None, 8)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Snapshots(every="often"), "snapshots.every"),
        (lambda: Snapshots(keep=0), "snapshots.keep"),
        (lambda: EarlyStopping("accuracy", mode="best"), "early_stopping.mode"),
        (lambda: EarlyStopping(patience=0), "early_stopping.patience"),
        (lambda: EarlyStopping(min_delta=-0.1), "early_stopping.min_delta"),
        (lambda: DDP(bucket_mb=0), "DDP(bucket_mb=…)"),
    ],
)
def test_section_checks_itself(make: Any, where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert refused.value.where == where


@pytest.mark.parametrize(
    ("mode", "value", "best", "better"),
    [
        ("max", 0.9, None, True),
        ("max", 0.9, 0.8, True),
        ("max", 0.8, 0.8, False),
        ("max", 0.85, 0.8, False),
        ("min", 0.7, 0.8, True),
        ("min", 0.75, 0.8, False),
        ("min", 0.9, 0.8, False),
    ],
)
def test_better_means_by_more_than_min_delta(mode: Any, value: float, best: float | None, better: bool) -> None:
    assert EarlyStopping("x", mode=mode, min_delta=0.06).better(value, best) is better


@pytest.mark.parametrize("mode", ["max", "min"])
def test_equal_is_not_better(mode: Any) -> None:
    assert not EarlyStopping("x", mode=mode).better(0.8, 0.8)


@pytest.mark.parametrize("name", BY_NAME)
def test_strategy_is_known_by_its_name(name: str) -> None:
    assert named(name) == BY_NAME[name]()
    assert named(name).name == name


def test_strategy_given_as_a_value_passes_through() -> None:
    assert named(DDP(bucket_mb=1)) == DDP(bucket_mb=1)
    assert named(Single()) == Single()


def test_unknown_strategy_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as refused:
        named("dpp")
    assert refused.value.fix.startswith("did you mean 'ddp'?")
