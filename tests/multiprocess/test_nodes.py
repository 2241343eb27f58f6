"""Two nodes of two workers each: what is exact inside a node, and who drifts from whom."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import Recipe, make_trainer, run_recipe, trained
from torch import nn

import manyhosts as mh
from manyhosts.cluster.place import Place
from manyhosts.communication.comm_queue import CommQueue
from manyhosts.communication.compression.exchange import Chunk
from manyhosts.communication.compression.table import make_compression
from manyhosts.communication.link import Link
from manyhosts.communication.world import World

pytestmark = pytest.mark.multiprocess

PLAIN = Recipe(samples=122, batch=20)  # in the last step of an epoch the second node has no sample
EVEN = Recipe(samples=120, batch=20)
SMALL = {"compress_above": 64, "bucket_mb": 0.002}


def on_two_nodes(rank: int) -> None:
    """What a launcher tells the workers of two hosts."""
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2), GROUP_RANK=str(rank // 2))


def run_on_two_nodes(rank: int, recipes: list[Recipe], folder: Path) -> list[dict[str, Any]]:
    on_two_nodes(rank)
    return [run_recipe(rank, recipe, folder / str(number)) for number, recipe in enumerate(recipes)]


def run_all(rank: int, recipes: list[Recipe], folder: Path) -> list[dict[str, Any]]:
    return [run_recipe(rank, recipe, folder / str(number)) for number, recipe in enumerate(recipes)]


def given(strategy: Any, recipe: Recipe = EVEN) -> Recipe:
    return replace(recipe, trainer={"strategy": strategy})


def flat(answer: dict[str, Any]) -> torch.Tensor:
    return torch.cat([torch.tensor(value).reshape(-1) for value in answer["weights"].values()])


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return float((flat(one) - flat(other)).norm() / flat(one).norm())


def send_everything(chunk: Chunk, link: Link) -> None:
    link.all_reduce(chunk.values)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """On two nodes of two workers, by name: what each worker gave."""
    strategies = {
        "everything": mh.DDP(compression=send_everything, **SMALL),
        "int8": mh.DDP(compression="int8", **SMALL),
        "topk": mh.DDP(compression="topk", topk_fraction=0.3, **SMALL),
        "local-sgd": mh.LocalSGD(sync_every=5),
        "diloco": mh.DiLoCo(sync_every=4, fragments=2, outer_compression="none"),
    }
    recipes = [given(strategy) for strategy in strategies.values()]
    by_rank = run_ranks(4, run_on_two_nodes, recipes, tmp_path_factory.mktemp("nodes"))
    return {name: [answers[number] for answers in by_rank] for number, name in enumerate(strategies)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    [answer] = trained(1, EVEN, tmp_path_factory.mktemp("plain"))
    return answer


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Local SGD and DiLoCo where each node is one worker, with the samples of both."""
    local = mh.LocalSGD(sync_every=5)
    outer = mh.DiLoCo(sync_every=4, fragments=2, outer_compression="none")
    return run_ranks(2, run_all, [given(local), given(outer)], tmp_path_factory.mktemp("two"))[0]


@pytest.mark.parametrize(("name", "limit"), [("everything", 1e-5), ("int8", 5e-3), ("topk", 0.2)])
def test_gradients_compressed_between_nodes_end_near_the_plain_run(
    name: str, limit: float, runs: dict[str, Any], plain: dict[str, Any]
) -> None:
    assert len({answer["result"]["weights_sha256"] for answer in runs[name]}) == 1
    assert distance(plain, runs[name][0]) < limit


@pytest.mark.parametrize(("number", "name"), [(0, "local-sgd"), (1, "diloco")])
def test_node_steps_alone_as_one_worker_with_all_its_samples_would(
    number: int, name: str, runs: dict[str, Any], two_workers: list[dict[str, Any]], plain: dict[str, Any]
) -> None:
    assert distance(two_workers[number], runs[name][0]) < 1e-5
    assert distance(plain, runs[name][0]) > 1e-3


def drift(rank: int, folder: Path) -> tuple[bytes, bytes]:
    """A worker's own model between two meetings, and after the run's end."""
    on_two_nodes(rank)
    own: list[bytes] = []
    trainer = make_trainer(given(mh.LocalSGD(sync_every=100), PLAIN), folder)
    whole = trainer.components.strategy.update

    def update(model: nn.Module, optimizer: Any) -> None:
        whole(model, optimizer)
        own.append(flat_bytes(model))

    trainer.components.strategy.update = update  # type: ignore[method-assign]
    trainer.fit("9 steps")
    return own[-1], flat_bytes(trainer.model)


def flat_bytes(model: nn.Module) -> bytes:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy().tobytes()


def test_nodes_drift_apart_and_their_workers_do_not(tmp_path: Path) -> None:
    between, ended = zip(*run_ranks(4, drift, tmp_path), strict=True)
    assert between[0] == between[1] != between[2] == between[3]
    assert len(set(ended)) == 1, "a run ends with one model"


def meet_in_every_step(rank: int, folder: Path) -> torch.Tensor:
    if int(os.environ["WORLD_SIZE"]) > 1:
        on_two_nodes(rank)
    trainer = make_trainer(given(mh.LocalSGD(sync_every=1), PLAIN), folder)
    for group in trainer.components.optimizer.param_groups:
        group["momentum"] = 0.0
    trainer.fit("9 steps")
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.model.parameters()])


def test_nodes_that_meet_in_every_step_equal_one_process_however_the_batch_is_cut(tmp_path: Path) -> None:
    [alone] = run_ranks(1, meet_in_every_step, tmp_path / "alone")
    for found in run_ranks(4, meet_in_every_step, tmp_path / "nodes"):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # the same of single workers: test_local_steps, test_compression
def test_run_that_goes_on_from_a_snapshot_between_two_meetings_ends_with_the_same_bits(tmp_path: Path) -> None:
    strategies = (
        mh.LocalSGD(sync_every=5), mh.DiLoCo(sync_every=4, fragments=2), mh.DDP(compression="int8", **SMALL)
    )  # fmt: skip
    recipes = [given(strategy, PLAIN) for strategy in strategies]
    whole = run_ranks(4, run_on_two_nodes, recipes, tmp_path / "whole")
    run_ranks(4, run_on_two_nodes, [replace(recipe, duration="9 steps") for recipe in recipes], tmp_path / "parts")
    parts = run_ranks(4, run_on_two_nodes, recipes, tmp_path / "parts")
    for number, strategy in enumerate(strategies):
        hashes = {answers[number]["result"]["weights_sha256"] for answers in [*whole, *parts]}
        assert len(hashes) == 1, strategy.name


def test_workers_that_come_to_share_a_node_go_on_from_the_mean(tmp_path: Path) -> None:
    recipe = given(mh.LocalSGD(sync_every=100), PLAIN)
    trained(4, replace(recipe, duration="8 steps"), tmp_path)  # one node of four, each with a model of its own
    between, _ = zip(*run_ranks(4, drift, tmp_path), strict=True)
    assert between[0] == between[1] != between[2] == between[3]


def exchange(rank: int, inside_node: str) -> tuple[int, torch.Tensor]:
    """Bytes that count, and the sum, of one chunk."""
    on_two_nodes(rank)
    world = World(Place.from_environment())
    comm_queue = CommQueue(world, by_node=inside_node == "exact")
    comm_queue.ready()
    compression = make_compression(mh.DDP(compression="bf16", inside_node=inside_node))  # type: ignore[arg-type]
    assert compression is not None
    values = torch.full((4096,), float(rank + 1))
    chunk = Chunk(values, [values.shape], [0])

    def job(link: Link) -> None:
        compression(chunk, link)

    comm_queue.wait(comm_queue.submit(job))
    return comm_queue.links[0].bytes_sent, values


def test_what_a_node_sends_goes_between_nodes_once() -> None:
    exact, alike = run_ranks(4, exchange, "exact"), run_ranks(4, exchange, "alike")
    for sent, values in exact:
        assert sent == 2 * 2 * 4096 // 2 // 2, "half of the node's sum, there and back, in two bytes each"
        assert torch.equal(values, torch.full((4096,), 10.0))
    assert all(sent == 3 * exact[0][0] for sent, _ in alike)
