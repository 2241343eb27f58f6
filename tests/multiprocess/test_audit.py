"""A worker that computes wrongly is found, named and left out, and the run ends as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from commands import alive_workers, finish, kill_all, start, summary, wait_for_step
from runs import CHANCY, Recipe, events, restarts, samples_by_step, step_lines, trained

from manyhosts.data.audits import AuditPlan
from manyhosts.data.order import Order, Position

pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).with_name("audit_script.py")
STEPS = 24
RECIPE = replace(CHANCY, duration=f"{STEPS} steps", schedule=True, accuracy=False, trainer={"virtual_workers": 8})


def audited(share: float, **trainer: Any) -> Recipe:
    return replace(RECIPE, trainer={**RECIPE.trainer, "audit": share, **trainer})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    trained(2, RECIPE, folder)
    return folder


def steps_that_look_at(worker: int, workers: int, share: float) -> list[int]:
    """The steps in which that worker computes a part that another one computes, too."""
    order = Order(RECIPE.samples, batch=RECIPE.batch, seed=0)
    plan, position, found = AuditPlan(share, 0, ("0",) * workers, 0), Position(), []
    for step in range(1, STEPS + 1):
        audits = plan.of(position, 8, len(order.at(position)))
        if any(worker in audit.ranks[:2] for audit in audits):
            found.append(step)
        position = order.after(position)
    return found


def with_faults(
    workers: int,
    folder: Path,
    recipe: Recipe,
    faults: Sequence[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
) -> tuple[int, str]:
    """The exit code and the output of `manyhosts run` on workers with those faults."""
    monkeypatch.setenv("FAULTS", json.dumps(faults))
    process = start(workers, folder / "run", recipe, options, script=SCRIPT)
    output = finish(process)
    return process.returncode, output


def assert_as_if_nothing_had_been(folder: Path, undisturbed: Path, output: str) -> None:
    assert summary(folder)["status"] == "completed", output
    assert summary(folder)["weights_sha256"] == summary(undisturbed)["weights_sha256"], output
    assert [line["step"] for line in step_lines(folder)] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in step_lines(folder)] == [line["loss"] for line in step_lines(undisturbed)]
    assert samples_by_step(folder) == samples_by_step(undisturbed)


def test_one_bit_of_gradient_weights_or_input_leaves_out_the_right_worker_of_four_three_and_two(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [
        {"worker": 3, "what": "input", "step": 5},
        {"worker": 0, "what": "weights", "step": 9},  # the leader
        {"worker": 2, "what": "gradient", "step": 13},  # of two left: it changes its answer when it computes it again
    ]
    code, output = with_faults(4, tmp_path, audited(1.0), faults, monkeypatch)
    assert code == 0, output
    assert_as_if_nothing_had_been(tmp_path / "run", undisturbed, output)
    reported = restarts(tmp_path / "run")
    assert [line["step"] for line in reported] == [4, 8, 12], "nothing is done again but the step under way"
    assert [line["how"] for line in reported] == ["with 3 workers", "with 2 workers", "with 1 worker"]
    ranks = [3, 0, 1]  # without the leader worker 2 is rank 1
    for line, rank, words in zip(
        reported, ranks, ["of step 5 wrongly", "other weights", "of step 13 wrongly"], strict=True
    ):
        assert line["reason"].startswith(f"rank {rank} on host "), line
        assert words in line["reason"]
    assert output.count("continued with") == 3


@pytest.mark.parametrize("what", ["gradient", "weights"])
def test_fault_between_two_audits_is_found_and_the_run_goes_back_to_before_it(
    what: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that is wrong in every step by the next audit, weights by the comparison before the next snapshot."""
    share = 0.12
    steps = steps_that_look_at(1, 3, share)
    right, found = next((one, two) for one, two in pairwise(steps) if two - one > 3)
    faults = [{"worker": 1, "what": what, "step": right + 2, "lasting": what == "gradient"}]
    recipe = audited(share, snapshots={"every": "1 step", "keep": 2})
    code, output = with_faults(3, tmp_path, recipe, faults, monkeypatch)
    assert code == 0, output
    assert_as_if_nothing_had_been(tmp_path / "run", undisturbed, output)
    left_out, back = restarts(tmp_path / "run")
    assert left_out["reason"].startswith("rank 1 on host ")
    words, noticed = "which are the same each time", found - 1
    if what == "weights":
        words, noticed = "other weights than the other workers", right + 2
    assert words in left_out["reason"]
    assert (left_out["step"], back["step"]) == (noticed, right), (
        "to a snapshot from before the fault, though only two are kept"
    )
    assert back["rewound"]
    # A snapshot that was on its way when the worker was left out may be given up; what was made before is set aside.
    given_up = [line["step"] for line in events(tmp_path / "run", "skipped")]
    made = set(range(right + 1, noticed)) - set(given_up)
    aside = list((tmp_path / "run" / "snapshots").glob("suspect-step-*"))
    assert bool(aside) == bool(made), "those with errors are set aside"


def test_host_of_the_worker_is_left_out_with_all_its_workers(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [{"worker": 3, "what": "gradient", "step": 6, "lasting": True}]
    code, output = with_faults(2, tmp_path, audited(1.0), faults, monkeypatch, "--nodes", "1:3")
    assert code == 0, output
    assert_as_if_nothing_had_been(tmp_path / "run", undisturbed, output)
    [line] = restarts(tmp_path / "run")
    assert line["how"] == "with 4 workers"
    assert line["reason"].startswith("rank 3 on host ")


def test_honest_workers_that_are_killed_and_come_back_are_never_accused(undisturbed: Path, tmp_path: Path) -> None:
    recipe = replace(audited(1.0), sample_s=0.01, data={"loader_workers": 1})
    process = start(3, tmp_path / "run", recipe, pids=tmp_path / "pids", script=SCRIPT)
    try:
        for step in (4, 11):
            wait_for_step(process, tmp_path / "run", step)
            os.kill(random.choice(alive_workers(tmp_path / "pids")[:2]), signal.SIGKILL)
        output = finish(process)
    except BaseException:
        kill_all(process)
        raise
    assert process.returncode == 0, output
    assert_as_if_nothing_had_been(tmp_path / "run", undisturbed, output)
    assert all("was killed by SIGKILL" in line["reason"] for line in restarts(tmp_path / "run"))
    assert "every bit was equal" in output
