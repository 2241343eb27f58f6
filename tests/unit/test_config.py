"""Settings are checked where they are made, and say what to do instead."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manyhosts.config.fully_sharded import FSDP
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


@pytest.mark.parametrize(
    ("make", "what", "fix"),
    [
        (lambda: settings(snapshots={"every": "5 steps"}), "snapshots is of the type dict", "give it mh.Snapshots(…)"),
        (lambda: settings(early_stopping=3), "early_stopping is 3", "give it mh.EarlyStopping(…) or None"),
        (lambda: settings(batch_size="32"), "batch_size is '32'", "give it an integer or None"),
        (lambda: settings(batch_size=True), "batch_size is True", "give it an integer or None"),
        (lambda: settings(clip_gradients="1"), "clip_gradients is '1'", "give it a number or None"),
        (lambda: settings(shuffle="no"), "shuffle is 'no'", "give it True or False"),
        (lambda: settings(validate_every=5), "validate_every is 5", 'a duration such as "500 steps"'),
        (lambda: settings(strategy=DDP), "strategy is the class DDP", 'write strategy="ddp"'),
        (lambda: Snapshots(keep="3"), "snapshots.keep is '3'", "give it an integer"),  # type: ignore[arg-type]
        (lambda: FSDP(units=3), "FSDP.units is 3", "give it a text or a list of texts"),  # type: ignore[arg-type]
        (lambda: DDP(compression=3), "DDP.compression is 3", "give it a text or a function"),  # type: ignore[arg-type]
    ],
)
def test_value_of_another_kind_is_named_with_what_the_setting_takes(
    make: Callable[[], object], what: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert refused.value.what == what
    assert fix in refused.value.fix


def test_numbers_of_numpy_are_numbers() -> None:
    given: Any = {
        "batch_size": np.int64(32),
        "clip_gradients": np.float32(0.5),
        "seed": np.random.default_rng(0).integers(10),
        "loader_workers": np.int64(2),
        "activation_checkpointing": np.float64(0.5),
        "shuffle": np.bool_(False),
    }
    made = settings(**given, early_stopping=EarlyStopping(patience=np.int64(3)))  # type: ignore[arg-type]
    assert {name: type(getattr(made, name)) for name in given} == {
        **dict.fromkeys(("batch_size", "seed", "loader_workers"), int),
        **dict.fromkeys(("clip_gradients", "activation_checkpointing"), float),
        "shuffle": bool,
    }
    assert json.loads(json.dumps(dataclasses.asdict(made)))["early_stopping"]["patience"] == 3


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
