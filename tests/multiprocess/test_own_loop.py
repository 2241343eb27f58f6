"""A loop of one's own: equal to a plain one, the same bits on any number of workers, no work lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import summary
from launching import MANYHOSTS, alive, environment, family, wait_until
from runs import step_lines
from torch.optim import lr_scheduler as schedules
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.config import overrides
from manyhosts.errors import ConfigError

pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).with_name("own_loop_script.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
PARTS, STEPS = "4", 15  # two epochs of 7 steps, and one


def command(folder: Path, workers: int, script: Path, *words: str, options: tuple[str, ...] = ()) -> list[str]:
    start = ["run", "--workers", str(workers), "--run-dir", str(folder / "run"), *options, str(script), *words]
    return [*MANYHOSTS, *start]


def trained(
    folder: Path, workers: int, *words: str, script: Path = SCRIPT, options: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The run's summary, with its steps' losses and what it has kept."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {**environment(), "KEPT": str(folder / "kept.pt"), "OMP_NUM_THREADS": "1"}
    words = command(folder, workers, script, *words, options=options)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return outcome(folder)


def outcome(folder: Path) -> dict[str, Any]:
    lines = step_lines(folder / "run")
    kept = torch.load(folder / "kept.pt") if (folder / "kept.pt").exists() else None
    return {**summary(folder / "run"), "losses": [line["loss"] for line in lines], "lines": lines, "kept": kept}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert [line["step"] for line in found["lines"]] == list(range(1, STEPS + 1))
    assert found["losses"] == expected["losses"]
    assert [line["lr"] for line in found["lines"]] == [line["lr"] for line in expected["lines"]]
    assert str(found["kept"]) == str(expected["kept"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(tmp_path_factory.mktemp("one"), 1, f"{STEPS} steps", PARTS, "no")


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])  # 3: with killed workers, below
def test_bits_are_those_of_one_worker(tmp_path: Path, undisturbed: dict[str, Any], workers: int) -> None:
    assert undisturbed["kept"]["state"]["steps"] == STEPS
    rows = sum(part["seen"]["rows"] for part in undisturbed["kept"]["parts"].values())
    assert rows == 2 * (2 * 53 + 8), "both functions that keep something saw each sample of each step"
    assert_same(trained(tmp_path, workers, f"{STEPS} steps", PARTS, "no"), undisturbed)


@pytest.mark.parametrize(
    "place",
    ["5:between", pytest.param("6:begin", marks=pytest.mark.slow), "6:end"],
)
def test_killed_worker_costs_one_step_wherever_in_it_dies(
    tmp_path: Path, undisturbed: dict[str, Any], place: str
) -> None:
    goes_on = place == "6:end"  # that what it had after the loss is in its snapshots, too
    found = trained(tmp_path, 3, "9 steps" if goes_on else f"{STEPS} steps", PARTS, place)
    assert found["restarts"] == 1
    assert found["steps_redone"] == 1
    assert_same(trained(tmp_path, 3, f"{STEPS} steps", PARTS, "no") if goes_on else found, undisturbed)


def killed_with_all_it_started(folder: Path, snapshot: int, *words: str, script: Path = SCRIPT) -> None:
    """Run it with two workers until there is that snapshot, and kill every process of it."""
    env = {**environment(), "KEPT": str(folder / "kept.pt"), "OMP_NUM_THREADS": "1"}
    start = command(folder, 2, script, *words)
    process = subprocess.Popen(start, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0)
    expected = folder / "run" / "snapshots" / f"step-{snapshot:08d}"
    wait_until(lambda: process.poll() is not None or expected.exists(), "a snapshot")
    everything = family(process)
    for each in everything:
        os.kill(each.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not alive(everything), "nothing outlives it")


def with_a_schedule(folder: Path, kind: Any, schedule: Any, lr: float = 0.5) -> mh.Run:
    return mh.Run(
        models=lambda: torch.nn.Linear(3, 1),
        optimizers=lambda params: kind(params, lr),
        schedulers=schedule,
        data=mh.Data(train=TensorDataset(torch.arange(36.0).view(12, 3) / 36), batch_size=4),
        run_dir=folder,
    )


def step(run: mh.Run) -> None:
    run.backward(lambda batch: run.models["model"](batch[0]).square().mean())
    run.update()


def rates(folder: Path) -> list[float]:
    return [line["lr"] for line in step_lines(folder)]


def falling(optimizer: torch.optim.Optimizer) -> schedules.LRScheduler:
    return schedules.LambdaLR(optimizer, lambda step: 0.9**step)


def halved(optimizer: torch.optim.Optimizer) -> schedules.LRScheduler:
    return schedules.StepLR(optimizer, 2, 0.5)


@pytest.mark.parametrize("schedule", [falling, halved])
def test_rate_or_schedule_that_a_resume_changes_is_as_if_it_had_been_so_from_the_beginning(
    tmp_path: Path, schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_a_schedule(tmp_path / "a", torch.optim.SGD, schedule).fit(step, "3 steps")
    with_a_schedule(tmp_path / "a", torch.optim.SGD, schedule, lr=0.1).fit(step, "6 steps")
    with_a_schedule(tmp_path / "b", torch.optim.SGD, schedule, lr=0.1).fit(step, "6 steps")
    assert rates(tmp_path / "a")[3:] == pytest.approx(rates(tmp_path / "b")[3:], rel=1e-12)
    other = falling if schedule is halved else halved
    with_a_schedule(tmp_path / "b", torch.optim.SGD, other, lr=0.1).fit(step, "9 steps")
    with_a_schedule(tmp_path / "c", torch.optim.SGD, other, lr=0.1).fit(step, "9 steps")
    assert rates(tmp_path / "b")[6:] == pytest.approx(rates(tmp_path / "c")[6:], rel=1e-12)
    monkeypatch.setenv(overrides.VARIABLE, json.dumps({"lr": "0.1"}))
    with_a_schedule(tmp_path / "d", torch.optim.SGD, other).fit(step, "9 steps")
    assert rates(tmp_path / "d") == rates(tmp_path / "c")


def test_schedule_without_a_count_of_its_own_is_resumed_where_its_updates_have_brought_it(tmp_path: Path) -> None:
    def chained(optimizer: torch.optim.Optimizer) -> schedules.LRScheduler:
        return schedules.ChainedScheduler([schedules.ExponentialLR(optimizer, 0.9)], optimizer=optimizer)

    def twice(run: mh.Run) -> None:
        step(run)
        step(run)

    with_a_schedule(tmp_path / "a", torch.optim.SGD, chained).fit(twice, "3 steps")
    with_a_schedule(tmp_path / "a", torch.optim.SGD, chained, lr=0.1).fit(twice, "6 steps")
    with_a_schedule(tmp_path / "b", torch.optim.SGD, chained, lr=0.1).fit(twice, "6 steps")
    assert rates(tmp_path / "a")[3:] == pytest.approx(rates(tmp_path / "b")[3:], rel=1e-12)


def test_what_a_schedule_keeps_in_the_optimizers_groups_is_compared_too(tmp_path: Path) -> None:
    def up_to(rate: float) -> Any:
        return lambda optimizer: schedules.OneCycleLR(optimizer, rate, total_steps=20)

    with_a_schedule(tmp_path / "a", torch.optim.SGD, up_to(0.3)).fit(step, "3 steps")
    with_a_schedule(tmp_path / "a", torch.optim.SGD, up_to(0.1)).fit(step, "6 steps")
    with_a_schedule(tmp_path / "b", torch.optim.SGD, up_to(0.1)).fit(step, "6 steps")
    assert rates(tmp_path / "a")[3:] == pytest.approx(rates(tmp_path / "b")[3:], rel=1e-12)


def test_other_kind_of_optimizer_is_refused_by_a_resume(tmp_path: Path) -> None:
    with_a_schedule(tmp_path, torch.optim.SGD, halved).fit(step, "3 steps")
    with pytest.raises(ConfigError, match="optimizer is Adam, and the run began with SGD"):
        with_a_schedule(tmp_path, torch.optim.Adam, halved).fit(step, "6 steps")


@pytest.mark.parametrize("every", ["7 steps", pytest.param("3 steps", marks=pytest.mark.slow)])
def test_run_that_was_killed_resumes_on_other_workers_to_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, Any], every: str
) -> None:
    """With a snapshot at the end of an epoch, and in the middle of one."""
    killed_with_all_it_started(tmp_path, 7 if every == "7 steps" else 6, f"{STEPS} steps", PARTS, "8:wait", every)
    assert_same(trained(tmp_path, 3, f"{STEPS} steps", PARTS, "no", every), undisturbed)


def test_diffusion_loop_has_the_same_bits_with_one_of_two_killed_and_with_all_killed(tmp_path: Path) -> None:
    """A U-Net, an average of its weights, time steps and noise that the step draws."""
    script, words = SCRIPT.with_name("diffusion_script.py"), f"{STEPS} steps"
    expected = trained(tmp_path / "1", 1, words, "no", script=script)
    assert len(set(expected["losses"])) == STEPS
    assert_same(trained(tmp_path / "2", 2, words, "no", script=script), expected)
    found = trained(tmp_path / "killed", 2, words, "7", script=script)
    assert_same(found, expected)
    assert (found["restarts"], found["steps_redone"]) == (1, 1)
    (tmp_path / "all").mkdir()
    killed_with_all_it_started(tmp_path / "all", 6, words, "8:wait", script=script)
    assert_same(trained(tmp_path / "all", 2, words, "no", script=script), expected)


def plain(steps: int, batch: int = 8) -> dict[str, torch.Tensor]:
    """The same training as a plain loop over the same samples, without noise, parts and any word of ours."""
    from own_loop_reference import reference

    return reference(steps, batch)


@pytest.mark.parametrize(("workers", "micro"), [(1, None), (1, 3), (2, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_equals_a_plain_loop_however_batches_are_cut(tmp_path: Path, workers: int, micro: int | None) -> None:
    """A mean over rows of other lengths: the counts of all micro-batches are divided by once."""
    options = () if micro is None else ("--set", f"micro_batch_size={micro}")
    found = trained(tmp_path, workers, "8 steps", "0", "no", options=options)
    weights = mh.load(tmp_path / "run")
    expected = plain(8)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
    assert found["steps"] == 8


@pytest.mark.parametrize("example", ["dcgan", "reinforce", "contrastive", "own_loop"])
def test_example_has_the_same_bits_on_three_workers_as_on_one(tmp_path: Path, example: str) -> None:
    script = EXAMPLES / f"{example}.py"
    options = ("--set", "duration=6 steps")
    alone = trained(tmp_path / "1", 1, script=script, options=options)
    among = trained(tmp_path / "3", 3, script=script, options=options)
    assert alone["weights_sha256"] == among["weights_sha256"]
    assert alone["losses"] == among["losses"]
    assert len(alone["losses"]) == 6
