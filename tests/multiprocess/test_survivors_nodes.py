"""Nodes that step alone, and lose one worker or all: their workers stay equal, and what went with a host is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import finish, kill_all, start, steps_done, summary, wait_for_step
from launching import agents, family, wait_until
from ranks import run_ranks
from runs import Recipe, make_trainer, restarts, samples_by_step, step_lines

import manyhosts as mh

pytestmark = pytest.mark.multiprocess
SLOW = pytest.mark.slow
STEPS = 30
RECIPE = Recipe(samples=150, batch=16, duration=f"{STEPS} steps", dropout=0.3, augment=True, schedule=True)
WAYS = {
    "local-sgd": ["strategy=local-sgd", "sync_every=7"],
    "local-sgd, rarely": ["strategy=local-sgd", "sync_every=25"],
    "local-sgd, every step": ["strategy=local-sgd", "sync_every=1"],
    "diloco": ["strategy=diloco", "sync_every=8"],
    "diloco at once": ["strategy=diloco", "sync_every=6", "overlap_steps=0", "fragments=2", "outer_compression=none"],
    "diloco, warmed up": ["strategy=diloco", "sync_every=8", "sync_warmup=15"],
}
SCRIPT = Path(__file__).with_name("nodes_script.py")


def begin(
    folder: Path, way: str, recipe: Recipe = RECIPE, *, dies_at: str = "", nodes: str = "2", workers: int = 2
) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    options = ["--nodes", nodes, *(word for each in WAYS[way] for word in ("--set", each))]
    return start(workers, folder / "run", recipe, options, pids=folder / "pids", script=SCRIPT, dies_at=dies_at)


def ended(process: subprocess.Popen[str], folder: Path, *, deaths: int) -> str:
    """The output of a run that went well to its end: every step once, every sample once, all workers with one model."""
    output = finish(process)
    assert process.returncode == 0, output
    reported = summary(folder / "run")
    assert reported["status"] == "completed", output
    assert isinstance(reported["restarts"], int)
    assert isinstance(reported["steps_redone"], int)
    assert min(deaths, 1) <= reported["restarts"] <= deaths, "two that die at once are one"
    assert reported["steps_redone"] <= deaths, "only the step under way"
    assert "starting all workers again" not in output
    assert [line["step"] for line in step_lines(folder / "run")] == list(range(1, STEPS + 1)), output
    found = samples_by_step(folder / "run")
    for first in range(1, STEPS, 10):
        of_epoch = [sample for step in range(first, first + 10) for sample in found[step]]
        assert sorted(of_epoch) == list(range(150)), f"epoch from step {first}\n{output}"
    ends = weights(folder)
    assert all(torch.equal(ends[0], end) for end in ends), output
    return output


def weights(folder: Path) -> list[torch.Tensor]:
    """Of each worker that came to the end."""
    return [torch.load(path) for path in sorted((folder / "pids").glob("weights-*"))]


def alone(reported: Mapping[str, object]) -> bool:
    """Whether a host took with it what it alone had learned. A best model that is being written is another loss."""
    return "learned alone" in str(reported["lost"])


def by_step_and_node(folder: Path) -> Mapping[int, Mapping[int, list[str]]]:
    """The hashes of model and optimizer after each step, as it was done last, of the workers of each node."""
    found: dict[int, dict[int, dict[int, list[str]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for path in (folder / "pids").glob("equal-*"):
        for line in path.read_text().splitlines():
            step, group, node, bits = json.loads(line)
            found[step][group][node].append(bits)
    return {step: groups[max(groups)] for step, groups in found.items()}


def assert_nodes_are_equal(folder: Path, *, drift: bool = True) -> None:
    """In every step both workers of each node hold the same, and other nodes something else."""
    steps = by_step_and_node(folder)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for step, nodes in steps.items():
        # Some may have done a step before the others left; the rest of these does not do it again.
        assert all(len(set(held)) == 1 for held in nodes.values()), f"step {step}: {nodes}"
    assert sum(len(held) == 2 for nodes in steps.values() for held in nodes.values()) >= 2 * STEPS - 4
    if drift:
        assert any(len({held[0] for held in nodes.values()}) == 2 for nodes in steps.values())


FINAL_WORD = "manyhosts.strategies.tally:StepMetrics.start_sum:12:after"
MOMENTS = {
    "before its gradient leaves": ("local-sgd", "1=manyhosts.communication.buckets:GradientBuckets.arm:12:before"),
    "when its node's sums are there": ("diloco", "1=manyhosts.communication.buckets:GradientBuckets.finish:12:after"),
    "when it has the mean": ("local-sgd", "1=manyhosts.strategies.local_stepping:weighted_mean:2:after"),
    "when the groups of communication queues are made": (
        "diloco",
        "1=manyhosts.communication.world:World.new_group:3:before",
    ),
    "one of another node while nodes are made again": (
        "local-sgd",
        f"1={FINAL_WORD} 2=manyhosts.strategies.local_updates:LocalGradient.regroup:2:before",
    ),
    "the one that is to give its optimizer": (
        "local-sgd",
        f"1={FINAL_WORD} 0=manyhosts.training.state.registry:share_optimizers:1:before",
    ),
    "a host, and one of the other when that is all but made good": (
        "local-sgd",
        f"2={FINAL_WORD} 3={FINAL_WORD} 0=manyhosts.strategies.local_updates:LocalGradient.regroup:2:before",
    ),
    "both of a node, one after the other": ("diloco", f"2={FINAL_WORD} 3={FINAL_WORD.replace('12', '13')}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_worker_that_dies_at_the_worst_moment_leaves_nodes_equal(moment: str, tmp_path: Path) -> None:
    way, places = MOMENTS[moment]
    deaths = len(places.split())
    output = ended(begin(tmp_path, way, dies_at=places), tmp_path, deaths=deaths)
    assert "was killed by SIGKILL" in output, "once for all, where one of them died before it was told"
    assert sum(map(alone, restarts(tmp_path / "run"))) == ("a host" in moment), output
    assert_nodes_are_equal(tmp_path)


@pytest.mark.parametrize("way", [way if way == "diloco" else pytest.param(way, marks=SLOW) for way in WAYS])
def test_node_that_loses_a_worker_goes_on_with_a_new_one_and_nothing_is_lost(way: str, tmp_path: Path) -> None:
    ended(begin(tmp_path, way, dies_at=f"3={FINAL_WORD}"), tmp_path, deaths=1)
    [reported] = restarts(tmp_path / "run")
    assert reported["reason"].startswith("rank 3"), reported
    assert not alone(reported), "the other worker of its host holds the same"
    assert_nodes_are_equal(tmp_path)


def undisturbed(rank: int, folder: Path) -> torch.Tensor:
    """What a run gives to which nothing happens."""
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2), GROUP_RANK=str(rank // 2))
    trainer = make_trainer(replace(RECIPE, trainer={"strategy": mh.LocalSGD(sync_every=1)}), folder)
    trainer.fit(RECIPE.duration)
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.model.parameters()])


def test_where_nodes_meet_in_every_step_a_lost_worker_changes_nothing(tmp_path: Path) -> None:
    """Its momentum comes from the other worker of its host, so nothing at all is lost."""
    way = "local-sgd, every step"
    ended(begin(tmp_path / "broken", way, dies_at=f"3={FINAL_WORD}"), tmp_path / "broken", deaths=1)
    assert_nodes_are_equal(tmp_path / "broken")
    [whole, *_] = run_ranks(4, undisturbed, tmp_path / "whole")
    torch.testing.assert_close(weights(tmp_path / "broken")[0], whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["local-sgd, rarely", pytest.param("diloco", marks=SLOW)])
def test_host_that_is_lost_comes_back_and_what_it_had_learned_alone_is_told(way: str, tmp_path: Path) -> None:
    process = begin(tmp_path, way, replace(RECIPE, sample_s=0.01))
    try:
        wait_for_step(process, tmp_path / "run", 11)
        agents(family(process))[1].kill()
        output = ended(process, tmp_path, deaths=1)
    except BaseException:
        kill_all(process)
        raise
    [reported] = restarts(tmp_path / "run")
    assert reported["how"] == "with 4 workers, 2 of them new", output
    assert reported["lost"].startswith("what the lost host learned alone"), output
    assert_nodes_are_equal(tmp_path)


@pytest.mark.slow
def test_run_that_has_lost_a_worker_goes_on_from_its_snapshot_with_equal_nodes(tmp_path: Path) -> None:
    first = begin(tmp_path, "local-sgd", replace(RECIPE, duration="12 steps"), dies_at=f"3={FINAL_WORD}")
    assert "completed" in finish(first)
    assert len(restarts(tmp_path / "run")) == 1
    assert "completed" in finish(begin(tmp_path, "local-sgd"))
    assert len(step_lines(tmp_path / "run")) == STEPS
    assert_nodes_are_equal(tmp_path)


@pytest.mark.slow
def test_workers_of_the_host_that_is_left_step_alone_until_the_other_is_back(tmp_path: Path) -> None:
    endless = replace(RECIPE, duration="1000000 steps", sample_s=0.005, schedule=False)
    process = begin(tmp_path, "local-sgd", endless, nodes="1:2")
    run_dir = tmp_path / "run"
    try:
        wait_for_step(process, run_dir, 11)
        agents(family(process))[1].kill()
        wait_until(lambda: bool(restarts(run_dir)), "the host that is left continues")
        wait_until(lambda: "continues with 4 workers" in (run_dir / "metrics.jsonl").read_text(), "back")
        wait_for_step(process, run_dir, steps_done(run_dir) + 20)
        process.send_signal(signal.SIGTERM)
        output = finish(process)
    except BaseException:
        kill_all(process)
        raise
    [reported] = restarts(run_dir)
    assert reported["how"] == "with 2 workers", output
    assert reported["lost"].startswith("what the lost host learned alone"), output
    done = summary(run_dir)
    assert done["status"] == "interrupted", output
    steps = by_step_and_node(tmp_path)
    assert len(steps) == done["steps"]
    assert {len(held) for held in steps[len(steps)].values()} == {2}, "both hosts are there with both workers"
    for step, nodes in steps.items():
        if sorted(map(len, nodes.values())) == [2, 2]:
            assert all(len(set(held)) == 1 for held in nodes.values()), f"step {step}\n{output}"
    assert any(len(set(held)) == 2 for nodes in steps.values() for held in nodes.values()), "alone for a time"
    for step, found in samples_by_step(run_dir).items():
        assert len(found) == len(set(found)) == (6 if step % 10 == 0 else 16), f"step {step}\n{output}"
