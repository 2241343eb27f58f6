"""A model in parts on a device that does later what it is asked for: the bits of a CPU, and nothing waits in a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from ranks import run_ranks
from sharded import Case, assert_same, fit, make_trainer, outcome, samples
from stand_in import norm_in_one_order, streams, tensor
from torch.utils.data import TensorDataset

from manyhosts.training.loop import counting
from manyhosts.training.telemetry import pace

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("stand-in")]

MICRO = {"micro_batch_size": 3, "clip_gradients": 0.1}
CASES = {
    **{f"zero {zero}": Case(options={"zero": zero}, trainer=MICRO) for zero in (1, 2, 3)},
    "copies": Case(options={"shard": 1}),
    "sums in bf16": Case(options={"reduce": "bf16"}),
    "copies in bf16": Case(options={"shard": 1, "reduce": "bf16"}),
    "loss with parameters": Case(centred=True),
}
"""What gives the bits of a CPU: the kernels of its optimizer are the same."""
CLOSE = {
    "AdamW": Case(optimizer="AdamW"),
    "fp16": Case(optimizer="AdamW", trainer={"precision": "fp16", "clip_gradients": 1e9}),
}
"""What a GPU steps by one fused kernel, and a CPU does not."""


QUICK = ("zero 3", "copies in bf16", "loss with parameters")


def on_cpu(rank: int, folder: Path, names: Sequence[str]) -> Any:
    with norm_in_one_order():
        return fit(rank, {name: {**CASES, **CLOSE}[name] for name in names}, folder)


def on_device(rank: int, folder: Path, names: Sequence[str], early: bool) -> Any:
    tensor.install()
    streams.early = early
    found = on_cpu(rank, folder, names)
    streams.early = False
    return found


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([name for name in CASES if name not in QUICK], marks=pytest.mark.slow)], ids=len
)
def test_parts_on_a_device_give_the_bits_of_a_cpu(names: Sequence[str], tmp_path: Path) -> None:
    """Where what travels beside the computation lags behind it."""
    cpu, late = tmp_path / "cpu", tmp_path / "late"
    [expected, _] = run_ranks(2, on_cpu, cpu, names)
    [found, other] = run_ranks(2, on_device, late, names, False)
    assert found == other
    for name in names:
        one, two = outcome(cpu / name, expected[name]), outcome(late / name, found[name])
        assert (two.norms, two.losses, found[name]["sha"]) == (one.norms, one.losses, expected[name]["sha"]), name


def test_parts_whose_bytes_run_ahead_of_the_computation_give_the_bits_of_a_cpu(tmp_path: Path) -> None:
    [expected, _] = run_ranks(2, on_cpu, tmp_path / "cpu", ["zero 3"])
    [ahead, _] = run_ranks(2, on_device, tmp_path / "early", ["zero 3"], True)
    assert ahead["zero 3"]["sha"] == expected["zero 3"]["sha"]


@pytest.mark.slow  # in `make test` parts on a device that steps them one by one
def test_parts_that_a_device_steps_by_one_fused_kernel_are_near_those_of_a_cpu(tmp_path: Path) -> None:
    cpu, late = tmp_path / "cpu", tmp_path / "late"
    [expected, _] = run_ranks(2, on_cpu, cpu, ["AdamW"])
    [found, other] = run_ranks(2, on_device, late, list(CLOSE), False)
    assert found == other
    for name in CLOSE:  # nothing computes in another format on this device
        assert_same(outcome(cpu / "AdamW", expected["AdamW"]), outcome(late / name, found[name]))


def taken_up(rank: int, folder: Path) -> tuple[str, str, list[list[float]]]:
    """A run of a CPU that a device continues with; and what its model says of samples."""
    tensor.install()
    trainer = make_trainer(CASES["zero 3"], folder)
    before = trainer.fit("5 steps").weights_sha256
    after = trainer.fit("7 steps").weights_sha256
    return before, after, trainer.predict(TensorDataset(samples(5, 3).tensors[0]), weights="last").tolist()


def five_steps(rank: int, folder: Path) -> str:
    return str(fit(rank, {"run": CASES["zero 3"]}, folder)["run"]["sha"])


def seven_steps(rank: int, folder: Path) -> tuple[str, list[list[float]]]:
    trainer = make_trainer(CASES["zero 3"], folder)
    sha = trainer.fit("7 steps").weights_sha256
    return sha, trainer.predict(TensorDataset(samples(5, 3).tensors[0]), weights="last").tolist()


def test_a_device_goes_on_with_the_parts_of_a_cpu(tmp_path: Path) -> None:
    [five, _] = run_ranks(2, five_steps, tmp_path)
    [seven, _] = run_ranks(2, seven_steps, tmp_path / "whole")
    for before, after, said in run_ranks(2, taken_up, tmp_path / "run"):
        assert before == five
        assert (after, said) == seven


class Quiet:
    """Forbids the host to wait for the device, in some steps."""

    def __init__(self) -> None:
        self.forbidden = streams.no_synchronisation()

    def __call__(self, event: Any) -> None:
        """Told of every step, two steps after it was done."""
        if type(event).__name__ == "StepDone" and event.step == 3:
            self.forbidden.__enter__()
        if type(event).__name__ == "StepDone" and event.step == 9:
            self.forbidden.__exit__(None, None, None)


def without_waiting(rank: int, folder: Path) -> None:
    tensor.install()
    # What workers tell each other every few seconds is waited for, and so is a look at the loss now and then.
    with patch.object(pace, "EVERY_S", 1e9), patch.object(counting, "_SOON", ()):
        for zero in (1, 3):
            trainer = {"listeners": [Quiet()], "validate_every": "1000 steps", "micro_batch_size": 3}
            case = Case(optimizer="AdamW", options={"zero": zero}, samples=400, trainer=trainer)
            make_trainer(case, folder / str(zero)).fit("12 steps")


def test_host_never_waits_for_the_device_in_a_step_of_parts(tmp_path: Path) -> None:
    run_ranks(2, without_waiting, tmp_path)
