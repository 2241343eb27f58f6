"""Workers that are lost while others compute on a device that does later what it is asked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import alive_workers, finish, kill_all, start, steps_done, summary, wait_for_step
from launching import wait_until
from runs import CHANCY, samples_by_step, step_lines

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("stand-in")]

STEPS = 30
RECIPE = replace(CHANCY, duration=f"{STEPS} steps", schedule=True, accuracy=False)
SCRIPT = Path(__file__).with_name("stand_in_script.py")
SAME = {
    "plain": [],
    "many sums beside the backward pass": ["bucket_mb=0.002"],
    "virtual workers": ["virtual_workers=4"],
}
"""Ways of training in which nothing belongs to one worker alone."""
OWN = {
    "bf16": ["compression=bf16", "compress_above=1"],
    "int8": ["compression=int8", "compress_above=1"],
    "powersgd": ["compression=powersgd", "compress_above=1", "powersgd_rank=1"],
    "local steps": ["strategy=local-sgd", "sync_every=7"],
    "diloco": ["strategy=diloco", "sync_every=8"],
}
"""Those in which something goes with a lost worker: what its compression kept back, or what it learned alone."""
QUICK = ("plain", "powersgd")


def ways(of: Mapping[str, Sequence[str]]) -> list[Any]:
    return [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in of]


def restarts(run_dir: Path) -> int:
    """How often the others have continued."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"event": "restart"') if path.exists() else 0


def run(folder: Path, settings: Sequence[str], kills: Sequence[tuple[int, int]] = ()) -> str:
    """What a run on two workers printed, where the worker at a place is killed behind a step.

    The next one only when the last has been replaced: with both of them goes what they have trained.
    """
    options = [word for each in settings for word in ("--set", each)]
    process = start(2, folder, RECIPE, options, pids=folder.with_suffix(".pids"), script=SCRIPT)
    try:
        for before, (place, step) in enumerate(kills):
            wait_until(lambda before=before: restarts(folder) >= before or process.poll() is not None, "it is replaced")
            wait_for_step(process, folder, max(step, steps_done(folder) + 1))
            os.kill(alive_workers(folder.with_suffix(".pids"))[place], signal.SIGKILL)
        output = finish(process)
    except BaseException:
        kill_all(process)
        raise
    assert process.returncode == 0, output
    return output


def run_with_two_kills(folder: Path, settings: Sequence[str]) -> str:
    """What it printed: two workers were lost, each cost the step under way, and the others continued."""
    output = run(folder, settings, kills=[(1, 6), (0, 16)])
    reported = summary(folder)
    assert reported["restarts"] == 2, output
    assert isinstance(reported["steps_redone"], int)
    assert reported["steps_redone"] <= 2, "only steps under way"
    assert output.count("was killed by SIGKILL") == 2
    assert "starting all workers again" not in output
    assert [line["step"] for line in step_lines(folder)] == list(range(1, STEPS + 1)), output
    hashes = [text for path in folder.with_suffix(".pids").iterdir() if (text := path.read_text())]
    assert hashes == [reported["weights_sha256"]] * 2, "of each worker that came to the end"
    return output


@pytest.mark.parametrize("way", ways(SAME))
def test_groups_are_formed_anew_on_a_gpu_and_a_lost_worker_costs_a_step_and_no_bit(way: str, tmp_path: Path) -> None:
    run(tmp_path / "whole", SAME[way])
    output = run_with_two_kills(tmp_path / "run", SAME[way])
    reported, whole = summary(tmp_path / "run"), summary(tmp_path / "whole")
    assert reported["weights_sha256"] == whole["weights_sha256"], output
    lines = step_lines(tmp_path / "run")
    assert [line["loss"] for line in lines] == [line["loss"] for line in step_lines(tmp_path / "whole")], output


@pytest.mark.parametrize("way", ways(OWN))
def test_what_a_worker_alone_holds_goes_with_it_on_a_gpu_and_no_sample(way: str, tmp_path: Path) -> None:
    output = run_with_two_kills(tmp_path / "run", OWN[way])
    found = samples_by_step(tmp_path / "run")
    epochs = -(-RECIPE.samples // RECIPE.batch)
    for first in range(1, STEPS, epochs):
        of_epoch = [sample for step in range(first, first + epochs) for sample in found[step]]
        assert sorted(of_epoch) == list(range(RECIPE.samples)), f"epoch from step {first}\n{output}"
