"""Tensors of every layout and dtype, and gradients that come in parts: the same model on any number of workers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from unusual import CASES, in_plain_pytorch, with_us

pytestmark = pytest.mark.multiprocess

NAMES = ["channels_last", "odd memory", "complex", "shared layer, reentrant", "shared layer"]
NORMS = ["gradient penalty", "norm in checkpoints, reentrant", "norm in checkpoints", "norm without checkpoints"]


def train_all(rank: int, run_dir: Path) -> dict[tuple[str, int | None], dict[str, Tensor] | str]:
    found = {}
    for name in [*NAMES, *NORMS]:
        for parts in (None, 4):
            found[name, parts] = with_us(rank, CASES[name], run_dir / f"{name} {parts}", virtual_workers=parts)
    return found


@pytest.fixture(scope="module", params=[(1, 3), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """What each worker ends with, by the number of workers."""
    return {workers: run_ranks(workers, train_all, tmp_path_factory.mktemp("runs")) for workers in request.param}


@pytest.mark.parametrize("parts", [None, 4])
@pytest.mark.parametrize("name", NAMES)
def test_same_model_as_a_plain_loop_on_any_number_of_workers(name: str, parts: int | None, answers: Any) -> None:
    expected = in_plain_pytorch(CASES[name])
    tolerance = CASES[name].tolerance
    for ranks in answers.values():
        for each in ranks:
            assert_alike(each[name, parts], expected, tolerance=tolerance)
            assert_alike(each[name, parts], ranks[0][name, parts], tolerance=0)
            if parts is not None:
                assert_alike(each[name, parts], answers[1][0][name, parts], tolerance=0)


@pytest.mark.parametrize("parts", [None, 4])
@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_differentiated_twice_or_computed_again(name: str, parts: int | None, answers: Any) -> None:
    """A checkpoint computes the layer twice and counts its samples once; a part is a batch of its own."""
    plain = name if "checkpoints" not in name else "norm without checkpoints"
    expected = in_plain_pytorch(CASES[plain]) if parts is None else answers[1][0][plain, parts]
    for ranks in answers.values():
        for each in ranks:
            assert_alike(each[name, parts], expected, tolerance=CASES[name].tolerance)
            assert_alike(each[name, parts], ranks[0][name, parts], tolerance=0)
            if parts is not None:
                assert_alike(each[name, parts], answers[1][0][name, parts], tolerance=0)


def assert_alike(found: dict[str, Tensor] | str, expected: dict[str, Tensor], *, tolerance: float) -> None:
    assert not isinstance(found, str), found
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        about = partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=about)
