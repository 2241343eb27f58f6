"""Workers that each hold something of their own continue without one that is killed; what went with it is told."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from commands import alive_workers, finish, kill_all, start, steps_done, summary, wait_for_step
from runs import Recipe, events, restarts, samples_by_step, step_lines

pytestmark = pytest.mark.multiprocess
STEPS = 60
RECIPE = Recipe(
    samples=150, batch=16, duration=f"{STEPS} steps", dropout=0.3, augment=True, schedule=True, accuracy=False
)
SLOW = pytest.mark.slow
WAYS = {
    "int8": ["compression=int8", "compress_above=1"],
    "powersgd": ["compression=powersgd", "compress_above=1", "powersgd_rank=1"],
    "local-sgd": ["strategy=local-sgd", "sync_every=7"],
    "diloco": ["strategy=diloco", "sync_every=8"],
    "diloco at once": ["strategy=diloco", "sync_every=6", "overlap_steps=0", "fragments=2", "outer_compression=none"],
    "servers": ["strategy=parameter-server", "micro_batch_size=4"],
    "servers under a bound": ["strategy=parameter-server", "micro_batch_size=4", "staleness=1", "servers=1"],
    "servers in step": ["strategy=parameter-server", "staleness=0"],
    "hogwild": ["strategy=hogwild", "micro_batch_size=4"],
}


def settings(*words: str) -> list[str]:
    return [word for each in words for word in ("--set", each)]


def run_with_kills(folder: Path, recipe: Recipe, workers: int, kills: int, options: list[str]) -> str:
    """Kill a worker that chance names at a moment that chance names, so often; each time all continue."""
    seed = random.SystemRandom().randrange(1 << 32)
    draw = random.Random(seed)
    process = start(workers, folder / "run", recipe, options, pids=folder / "pids")
    try:
        for number in range(kills):
            done, last = steps_done(folder / "run"), (STEPS - 20) * (number + 1) // kills
            wait_for_step(process, folder / "run", draw.randint(min(done + 1, last), last))
            os.kill(draw.choice(alive_workers(folder / "pids")), signal.SIGKILL)
            wait_for_step(process, folder / "run", steps_done(folder / "run") + 1)
        output = finish(process)
    except BaseException:
        kill_all(process)
        raise
    assert process.returncode == 0, f"seed {seed}\n{output}"
    return f"seed {seed}\n{output}"


def assert_nothing_of_the_samples_is_lost(run_dir: Path, output: str, kills: int) -> None:
    reported = summary(run_dir)
    assert reported["status"] == "completed", output
    assert reported["restarts"] == kills, output
    assert isinstance(reported["steps_redone"], int)
    assert reported["steps_redone"] <= kills, "only the step under way"
    assert "starting all workers again" not in output
    assert [line["step"] for line in step_lines(run_dir)] == list(range(1, STEPS + 1)), output
    for step, found in samples_by_step(run_dir).items():
        assert len(found) == len(set(found)), f"step {step}"
    epochs = -(-150 // 16)
    for first in range(1, STEPS, epochs):
        of_epoch = [sample for step in range(first, first + epochs) for sample in samples_by_step(run_dir)[step]]
        assert sorted(of_epoch) == list(range(150)), f"epoch from step {first}\n{output}"
    best = min(line["values"]["loss"] for line in events(run_dir, "validation"))
    assert best < 2, f"an untrained model has 2.3, and one that nothing happens to 0.8\n{output}"


@pytest.mark.parametrize("way", [way if way == "diloco" else pytest.param(way, marks=SLOW) for way in WAYS])
def test_killed_workers_cost_a_step_and_no_sample_where_each_holds_something_of_its_own(
    way: str, tmp_path: Path
) -> None:
    kills = 2
    recipe = replace(RECIPE, momentum=0.0) if way == "hogwild" else RECIPE
    output = run_with_kills(tmp_path, recipe, 3, kills, settings(*WAYS[way]))
    assert_nothing_of_the_samples_is_lost(tmp_path / "run", output, kills)


MOMENTS = {
    "before its gradient leaves": ("int8", "manyhosts.communication.buckets:GradientBuckets.arm:12:before"),
    "when its sums are there and those of others perhaps": (
        "powersgd",
        "manyhosts.communication.compression.feedback:Compressor.settle:12:before",
    ),
    "with the word that all have their sums on its way": (
        "int8",
        "manyhosts.strategies.tally:StepMetrics.start_sum:12:after",
    ),
    "when the communication queues are made": ("int8", "manyhosts.communication.comm_queue:find_levels:1:before"),
    "with the mean on its way": ("local-sgd", "manyhosts.communication.world:World.wait:17:before"),
    "with the word that all have their gradients on its way": (
        "local-sgd",
        "manyhosts.strategies.tally:StepMetrics.start_sum:12:after",
    ),
    "before it takes an outer step": ("diloco", "manyhosts.strategies.diloco:OuterSteps._arrive:3:before"),
    "after it has taken an outer step": ("diloco", "manyhosts.strategies.diloco:OuterSteps._take:5:after"),
    "when servers give what they have stepped": (
        "servers in step",
        "manyhosts.strategies.asynchronous.parameter_server:Servers.take_up:12:before",
    ),
    "with a micro-batch that no server has the gradient of": (
        "servers",
        "manyhosts.strategies.asynchronous.requests:Requests.ask:120:before",
    ),
    "in an outer step that all wait for": ("diloco at once", "manyhosts.strategies.diloco:OuterSteps._take:4:before"),
}
QUICK = (
    "with the word that all have their sums on its way",
    "before it takes an outer step",
)


@pytest.mark.parametrize(
    "moment", [moment if moment in QUICK else pytest.param(moment, marks=SLOW) for moment in MOMENTS]
)
def test_worker_that_dies_at_the_worst_moment_leaves_the_others_equal(moment: str, tmp_path: Path) -> None:
    way, place = MOMENTS[moment]
    recipe = replace(RECIPE, duration="30 steps")
    process = start(3, tmp_path / "run", recipe, settings(*WAYS[way]), pids=tmp_path / "pids", dies_at=place)
    output = finish(process)
    assert process.returncode == 0, output
    [reported] = restarts(tmp_path / "run")
    assert reported["reason"].startswith("rank 1"), output
    assert reported["steps_redone"] <= 1, output
    assert [line["step"] for line in step_lines(tmp_path / "run")] == list(range(1, 31)), output
    assert [len(found) for found in samples_by_step(tmp_path / "run").values()] == 3 * ([16] * 9 + [6]), output
    hashes = [path.read_text() for path in (tmp_path / "pids").iterdir() if path.read_text()]
    assert len(hashes) == 3, "one of each worker that came to the end"
    assert len(set(hashes)) == 1, output
