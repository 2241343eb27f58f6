"""The number of workers is not a hyperparameter: the same samples, the same parameters, the same validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Recipe, samples_by_step, step_lines, trained

pytestmark = pytest.mark.multiprocess


def assert_close(one: dict[str, Any], other: dict[str, Any], *, rtol: float, atol: float) -> None:
    for name, value in one["weights"].items():
        torch.testing.assert_close(
            torch.tensor(other["weights"][name]),
            torch.tensor(value),
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[int, list[int]]]:
    run_dir = tmp_path_factory.mktemp("alone")
    [answer] = trained(1, Recipe(), run_dir)
    return {**answer, "norms": norms(run_dir)}, samples_by_step(run_dir)


def norms(run_dir: Path) -> dict[int, float]:
    """Step → the norm of its gradient, where it was told."""
    return {line["step"]: norm for line in step_lines(run_dir) if (norm := line["gradient_norm"]) is not None}


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.slow), 3, 4])
def test_workers_together_equal_one_process(workers: int, alone: Any, tmp_path: Path) -> None:
    answer, samples = alone
    answers = trained(workers, Recipe(), tmp_path)
    for other in answers:
        assert_close(answer, other, rtol=1e-5, atol=1e-7)
        assert other["result"]["validation"]["loss"] == pytest.approx(answer["result"]["validation"]["loss"], rel=1e-6)
        assert other["result"]["validation"]["accuracy"] == answer["result"]["validation"]["accuracy"]
    assert len({other["result"]["weights_sha256"] for other in answers}) == 1
    assert samples_by_step(tmp_path) == samples
    assert norms(tmp_path) == pytest.approx(answer["norms"], rel=1e-4)
    assert 1 in answer["norms"]


def test_every_sample_is_taken_once_per_epoch(alone: Any) -> None:
    _, samples = alone
    assert [len(indices) for indices in samples.values()] == [50, 50, 50, 50, 3] * 2
    for first in (1, 6):
        taken = sorted(index for step in range(first, first + 5) for index in samples[step])
        assert taken == list(range(203))
    assert samples[1] != samples[6], "each epoch has its own order"


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_batch_norm_over_the_global_batch_equals_one_process(workers: int, tmp_path: Path) -> None:
    recipe = Recipe(batch_norm=True)
    [answer] = trained(1, recipe, tmp_path / "alone")
    for other in trained(workers, recipe, tmp_path / "together"):
        assert_close(answer, other, rtol=1e-4, atol=1e-5)


def test_local_batch_norm_is_another_model_and_the_run_says_so(tmp_path: Path) -> None:
    [answer] = trained(1, Recipe(batch_norm=True), tmp_path / "alone")
    [other, _] = trained(2, Recipe(batch_norm=True, trainer={"batch_norm": "local"}), tmp_path / "together")
    with pytest.raises(AssertionError):
        assert_close(answer, other, rtol=1e-4, atol=1e-5)
    assert "each worker's own samples" in (tmp_path / "together" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("batch_norm", [False, True])
def test_accumulation_on_two_workers_equals_one_process(batch_norm: bool, tmp_path: Path) -> None:
    """With BatchNorm only the number of forward passes is compared: its batch is the micro-batch of all workers."""
    recipe = Recipe(samples=100, trainer={"micro_batch_size": 7}, batch_norm=batch_norm)
    [answer] = trained(1, recipe, tmp_path / "alone")
    together = trained(2, recipe, tmp_path / "together")
    assert together[0]["result"]["weights_sha256"] == together[1]["result"]["weights_sha256"]
    if not batch_norm:
        assert_close(answer, together[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("micro_batch_size", [64, 37])
def test_accumulated_gradients_equal_those_of_the_whole_batch(micro_batch_size: int, tmp_path: Path) -> None:
    whole = Recipe(samples=600, batch=256, trainer={"micro_batch_size": 256})
    cut = Recipe(samples=600, batch=256, trainer={"micro_batch_size": micro_batch_size})
    [answer] = trained(1, whole, tmp_path / "whole")
    [other] = trained(1, cut, tmp_path / "cut")
    assert_close(answer, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_numbers_train_alike_on_two_workers(precision: str, tmp_path: Path) -> None:
    recipe = Recipe(samples=100, trainer={"precision": precision, "clip_gradients": 1.0})
    [answer] = trained(1, recipe, tmp_path / "alone")
    for other in trained(2, recipe, tmp_path / "together"):
        assert_close(answer, other, rtol=0.05, atol=0.01)
        assert other["result"]["validation"]["loss"] == pytest.approx(answer["result"]["validation"]["loss"], rel=0.05)


def test_clipping_uses_the_norm_over_all_workers(tmp_path: Path) -> None:
    recipe = Recipe(samples=100, trainer={"clip_gradients": 0.1})
    [answer] = trained(1, recipe, tmp_path / "alone")
    for other in trained(3, recipe, tmp_path / "together"):
        assert_close(answer, other, rtol=1e-5, atol=1e-7)
