"""Compressed gradients between real processes: equal weights everywhere, near the plain ones, kept in snapshots."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import Recipe, run_recipe, step_lines, trained
from torch import nn

import manyhosts as mh
from manyhosts.cluster.place import Place
from manyhosts.communication.buckets import GradientBuckets
from manyhosts.communication.comm_queue import CommQueue
from manyhosts.communication.compression.feedback import Compressor
from manyhosts.communication.compression.table import make_compression
from manyhosts.communication.link import Link
from manyhosts.communication.probe import probe
from manyhosts.communication.world import World

pytestmark = pytest.mark.multiprocess

SMALL = {"compress_above": 64, "bucket_mb": 0.002}


def recipe(name: Any, **options: Any) -> Recipe:
    return Recipe(samples=120, batch=20, trainer={"strategy": mh.DDP(compression=name, **SMALL, **options)})


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Of all weights together, relative."""
    pairs = [(torch.tensor(one["weights"][name]), torch.tensor(other["weights"][name])) for name in one["weights"]]
    flat = [torch.cat([pair[side].reshape(-1) for pair in pairs]) for side in (0, 1)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


def send_halves(chunk: Any, link: Link) -> torch.Tensor:
    sent = chunk.values / 2
    chunk.values.copy_(link.all_reduce(sent.clone()))
    return sent


PLAIN = recipe("none")
NEAR = {
    "bf16": (recipe("bf16"), 2e-3),
    "fp16": (recipe("fp16"), 3e-4),
    "int8": (recipe("int8"), 5e-3),
    "powersgd": (recipe("powersgd"), 0.2),
    "topk": (recipe("topk", topk_fraction=0.25), 0.2),
    "topk of all": (recipe("topk", topk_fraction=1.0), 1e-5),
    "powersgd still warming up": (recipe("powersgd", compression_warmup=1000), 1e-5),
    "a function": (recipe(send_halves), 0.2),
    "int8 with fp16 autocast": (
        replace(recipe("int8"), trainer={**recipe("int8").trainer, "precision": "fp16"}), 0.05
    ),
}  # fmt: skip
GOES_ON = ["bf16", "int8", "powersgd", "topk"]


def run_recipes(rank: int, recipes: list[Recipe], folder: Path) -> list[dict[str, Any]]:
    return [run_recipe(rank, recipe, folder / str(number)) for number, recipe in enumerate(recipes)]


def directory_of(folder: Path, number: int) -> Path:
    """Where the run directory of recipe `number` is: a process's later trainers have folders of their own."""
    [found] = (folder / str(number)).rglob("summary.json")
    return found.parent


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    [answer] = trained(1, PLAIN, tmp_path_factory.mktemp("plain"))
    return answer


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[dict[str, Any]]], Path]:
    """What each recipe gave on three workers, by rank, and where."""
    folder = tmp_path_factory.mktemp("together")
    recipes = [recipe for recipe, _ in NEAR.values()]
    by_rank = run_ranks(3, run_recipes, recipes, folder)
    return {name: [answers[number] for answers in by_rank] for number, name in enumerate(NEAR)}, folder


@pytest.mark.parametrize("name", NEAR)
def test_compressed_run_ends_near_the_plain_one(name: str, plain: dict[str, Any], together: Any) -> None:
    answers = together[0][name]
    assert len({answer["result"]["weights_sha256"] for answer in answers}) == 1
    assert distance(plain, answers[0]) < NEAR[name][1]


def test_record_names_the_compression(together: Any) -> None:
    recorded = [
        json.loads((directory_of(together[1], number) / "summary.json").read_text())["compression"]
        for number in range(len(NEAR))
    ]
    assert recorded == ["bf16", "fp16", "int8", "powersgd", "topk", "topk", "powersgd", "send_halves", "int8"]


def test_run_that_goes_on_from_a_snapshot_ends_with_the_same_bits(tmp_path: Path) -> None:
    recipes = [recipe(name) for name in GOES_ON]
    whole, _ = run_ranks(2, run_recipes, recipes, tmp_path / "whole")
    run_ranks(2, run_recipes, [replace(recipe, duration="7 steps") for recipe in recipes], tmp_path / "parts")
    parts, _ = run_ranks(2, run_recipes, recipes, tmp_path / "parts")
    for name, one, other in zip(GOES_ON, whole, parts, strict=True):
        assert one["result"]["weights_sha256"] == other["result"]["weights_sha256"], name


def test_run_goes_on_with_another_number_of_workers(plain: dict[str, Any], tmp_path: Path) -> None:
    for workers, duration in ((3, "5 steps"), (2, "2 epochs")):
        answers = trained(workers, replace(recipe("int8"), duration=duration), tmp_path)
    assert distance(plain, answers[0]) < 5e-3


def test_bytes_sent_are_those_of_the_compressed_gradient(tmp_path: Path) -> None:
    recipes = [replace(recipe(name), duration="3 steps") for name in ("none", "bf16", "int8")]
    run_ranks(2, run_recipes, recipes, tmp_path)
    none, bf16, int8 = (step_lines(directory_of(tmp_path, number))[-1]["bytes_sent"] for number in range(3))
    large = 72 + 1280
    assert none - bf16 == pytest.approx(2 * large, abs=40)
    assert none - int8 == pytest.approx(3 * large, rel=0.2)  # whole blocks of 256, and their scales


def sums_with_one_unused(rank: int, name: str) -> list[list[Any]]:
    """Two layers, of which rank 0 uses the second in no step and rank 1 in the first only."""
    world = World(Place.from_environment())
    torch.manual_seed(3)
    layers = nn.ModuleList([nn.Linear(40, 30, bias=False), nn.Linear(40, 30, bias=False), nn.Linear(40, 30)])
    config = mh.DDP(compression=name, topk_fraction=0.3)  # what one worker gave once takes three steps
    compression = make_compression(config)
    assert compression is not None
    parameters = list(layers.parameters())
    compressor = Compressor(compression, CommQueue(world), above=1, feedback=True, parameters=parameters)
    buckets = GradientBuckets(parameters, world, bucket_bytes=6000, compressor=compressor)
    found = []
    for step in range(4):
        buckets.begin()
        inputs = torch.ones(1, 40) * (rank + 1)
        loss = layers[0](inputs).sum() + (layers[1](inputs).sum() if rank == 1 and step == 0 else 0)
        buckets.arm()
        loss.backward()
        buckets.finish()
        found.append([None if parameter.grad is None else float(parameter.grad.sum()) for parameter in parameters])
    return found


def test_what_is_kept_arrives_later_though_nobody_uses_the_parameter_now() -> None:
    first, second = run_ranks(2, sums_with_one_unused, "topk")
    assert first == second
    used, once, never, _ = zip(*first, strict=True)
    assert used[0] == pytest.approx(3 * 40 * 30 * 0.3)
    assert None not in once[:3]
    assert sum(value or 0 for value in once) == pytest.approx(2 * 40 * 30)
    assert once[3] is None, "when all has arrived, an unused parameter has no gradient"
    assert never == (None, None, None, None)


def fail_in_a_lane(rank: int) -> str:
    world = World(Place.from_environment())
    comm_queue = CommQueue(world)
    comm_queue.ready()

    def job(_link: Link) -> None:
        raise ValueError("a compression that fails")

    try:
        comm_queue.wait(comm_queue.submit(job))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_failure_of_a_compression_reaches_the_training_loop() -> None:
    assert run_ranks(2, fail_in_a_lane) == ["a compression that fails"] * 2


def probed(_rank: int) -> tuple[Any, int, float]:
    world = World(Place.from_environment())
    network = probe(world, seconds=0.3)
    return (network.latency_s, network.bandwidth), world.bytes_sent, world.exposed_s


def test_probe_finds_the_same_network_on_every_worker_and_counts_as_nothing() -> None:
    first, second = run_ranks(2, probed)
    assert first == second
    (latency_s, bandwidth), sent, exposed_s = first
    assert 0 < latency_s < 10
    assert bandwidth > 0
    assert (sent, exposed_s) == (0, 0.0)


def test_auto_says_what_it_takes_and_goes_on_with_it_after_a_snapshot(tmp_path: Path) -> None:
    auto = recipe("auto", compression_errors=True)
    trained(2, replace(auto, duration="8 steps"), tmp_path)
    answers = trained(3, auto, tmp_path)
    assert len({answer["result"]["weights_sha256"] for answer in answers}) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["compression_reason"].startswith(f"compression: {summary['compression']}, the least lossy")
    assert summary["network"].keys() == {"effective_bandwidth", "probed_bandwidth", "probed_latency"}
    assert all(value > 0 for value in summary["network"].values())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    said = [line["text"] for line in lines if line["event"] == "note" and "least lossy" in line["text"]]
    assert len(said) == 1, "chosen once, and kept in the snapshot"


def test_errors_of_each_layer_are_logged_where_it_was_asked(tmp_path: Path) -> None:
    trained(2, replace(recipe("int8", compression_errors=True), duration="3 steps"), tmp_path)
    values = step_lines(tmp_path)[-1]["values"]
    assert set(values) == {"compression_error/0.weight", "compression_error/4.weight"}
    assert all(0 < value < 0.05 for value in values.values())
