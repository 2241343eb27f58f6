"""A mesh says how many workers stand along each axis; what it cannot be is one sentence."""

from __future__ import annotations

from typing import Any

import pytest

import manyhosts as mh
from manyhosts.config.mesh import laid_out
from manyhosts.config.overrides import apply, parse
from manyhosts.config.settings import Settings
from manyhosts.config.sharded_layers import ShardedLayers
from manyhosts.config.strategies import Single, gives_up, named
from manyhosts.errors import ConfigError
from manyhosts.planner.plan import strategy_of


@pytest.mark.parametrize(
    ("words", "workers", "strategy"),
    [
        ("strategy=ddp+tensor mesh.tensor=2", 4, mh.Tensor(size=2)),
        ("strategy=tensor+ddp mesh.tensor=2", 4, mh.Tensor(size=2)),
        ("strategy=ddp+tensor mesh.replicate=3", 6, mh.Tensor(size=2)),
        ("strategy=ddp+tensor size=2", 4, mh.Tensor(size=2)),
        ("strategy=tensor", 4, mh.Tensor(size=4)),
        ("strategy=ddp+pipeline mesh.pipeline=2 mesh.replicate=2", 4, mh.Pipeline(stages=2)),
        ("strategy=pipeline mesh.replicate=2", 6, mh.Pipeline(stages=3)),
        ("strategy=pipeline stages=2 mesh.pipeline=2", 4, mh.Pipeline(stages=2)),
        ("strategy=fsdp mesh.replicate=2 mesh.shard=2 zero=2", 4, mh.FSDP(shard=2, zero=2)),
        ("strategy=fsdp mesh.replicate=2", 6, mh.FSDP(shard=3)),
        ("strategy=fsdp shard=host", 4, mh.FSDP(shard="host")),
        ("strategy=ddp mesh.replicate=4 mesh.tensor=1", 4, mh.DDP()),
        ("strategy=fsdp+tensor mesh.shard=2 mesh.tensor=2", 4, ShardedLayers(shard=2, size=2)),
        ("strategy=tensor+fsdp mesh.tensor=2 zero=1", 8, ShardedLayers(shard=4, size=2, zero=1)),
        ("strategy=fsdp+tensor mesh.tensor=2 mesh.replicate=2", 8, ShardedLayers(shard=2, size=2)),
        ("strategy=fsdp+tensor shard=2", 6, ShardedLayers(shard=2, size=3)),
        ("strategy=diloco", 4, mh.DiLoCo()),
        ("strategy=fsdp+diloco mesh.replicate=2 mesh.shard=2 sync_every=4", 4, mh.DiLoCo(shard=2, sync_every=4)),
        ("strategy=diloco+fsdp mesh.replicate=3 zero=1", 6, mh.DiLoCo(shard=2, zero=1)),
        ("strategy=fsdp+local-sgd shard=2", 4, mh.LocalSGD(shard=2)),
        ("strategy=local-sgd mesh.shard=2 units=Block", 4, mh.LocalSGD(shard=2, units="Block")),
        ("strategy=fsdp+diloco mesh.shard=1", 4, mh.DiLoCo()),
    ],
)
def test_a_mesh_gives_a_strategy_its_sizes(words: str, workers: int, strategy: Any) -> None:
    assert _laid_out(words, workers) == strategy


def _laid_out(words: str, workers: int) -> Any:
    settings = apply({"batch_size": 8, "strategy": Single()}, parse(words.split()))
    return laid_out(settings.strategy, settings.mesh, workers)


@pytest.mark.parametrize(
    ("words", "workers", "what"),
    [
        ("strategy=ddp+tensor mesh.tensor=3", 4, "there are 4 workers, which a mesh with tensor=3"),
        ("strategy=ddp+tensor mesh.tensor=2 mesh.replicate=3", 4, "a mesh with replicate=3 and tensor=2"),
        ("strategy=ddp+pipeline mesh.replicate=3", 4, "a mesh with replicate=3 does"),
        ("strategy=ddp mesh.replicate=3", 6, "a mesh with replicate=3 does"),
        ("strategy=fsdp shard=3", 4, "a mesh with shard=3 does"),
        ("strategy=ddp+tensor", 4, "no one says how many workers of strategy 'ddp+tensor' make one copy of the model"),
        ("strategy=fsdp+tensor", 4, "no one says how many workers of strategy 'fsdp+tensor' make one copy"),
        ("strategy=fsdp+tensor mesh.replicate=2", 4, "no one says how many workers of strategy 'fsdp+tensor' make"),
        ("strategy=fsdp+tensor mesh.shard=2 mesh.tensor=3", 4, "a mesh with shard=2 and tensor=3 does not"),
        ("strategy=fsdp+tensor mesh.pipeline=2", 4, "strategy 'fsdp+tensor' puts no workers along that axis"),
        ("strategy=fsdp+tensor mesh.tensor=2 shard=host", 4, "shard is 'host', which strategy 'fsdp+tensor' does not"),
        ("strategy=ddp mesh.tensor=2", 4, "the mesh has tensor=2, and strategy 'ddp' puts no workers along"),
        ("strategy=fsdp mesh.shard=2 mesh.tensor=2", 4, "the mesh has tensor=2, and strategy 'fsdp' puts no"),
        ("strategy=diloco mesh.replicate=2", 4, "a mesh with replicate=2 and shard=1 does not multiply to"),
        ("strategy=fsdp+diloco", 4, "no one says how many workers of strategy 'fsdp+diloco' make one copy"),
        ("strategy=fsdp+diloco mesh.shard=3", 4, "there are 4 workers, which a mesh with shard=3 does not multiply"),
        ("strategy=fsdp+diloco mesh.shard=2 mesh.replicate=3", 4, "a mesh with replicate=3 and shard=2 does not"),
        (
            "strategy=fsdp+diloco mesh.shard=2 mesh.tensor=2",
            4,
            "strategy 'fsdp+diloco' puts no workers along that axis",
        ),
        ("strategy=diloco shard=2 inside_node=alike", 4, "workers that keep a copy of the model together cannot each"),
        ("strategy=local-sgd shard=2 mesh.shard=4", 4, "the strategy has shard=2, and the mesh has shard=4"),
        ("strategy=diloco shard=-3", 4, "shard is -3"),
        ("strategy=diloco zero=4", 4, "zero is 4, and there are three ways"),
        ("strategy=tensor size=4 mesh.tensor=2", 4, "the strategy has size=4, and the mesh has tensor=2"),
        ("strategy=fsdp shard=host mesh.replicate=2", 4, "the strategy has shard='host', and the mesh has replicate=2"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(words: str, workers: int, what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _laid_out(words, workers)
    assert what in refused.value.what


def test_one_worker_needs_no_mesh() -> None:
    assert laid_out(mh.FSDP(), mh.Mesh(shard=2), 1) == mh.FSDP()


def test_a_mesh_in_the_script_is_a_strategy_and_gives_way_to_another() -> None:
    mesh = mh.Mesh(tensor=2)
    given = {"batch_size": 8, "strategy": named(mesh), "mesh": mesh}
    settings = Settings(**given)
    assert laid_out(settings.strategy, settings.mesh, 4) == mh.Tensor(size=2)
    assert apply(given, {"mesh.replicate": "2"}).mesh == mh.Mesh(tensor=2, replicate=2)
    other = apply(given, {"strategy": "fsdp", "mesh.shard": "2"})
    assert laid_out(other.strategy, other.mesh, 4) == mh.FSDP(shard=2)
    assert named(mh.Mesh(replicate=2, shard=2)) == mh.FSDP()
    assert named(mh.Mesh(shard=2, tensor=2)) == ShardedLayers()
    assert named(mh.Mesh(replicate=2)) == mh.DDP()


@pytest.mark.parametrize("name", ["fsdp+tensor", "ddp+tensor", "ddp+pipeline", "fsdp+local-sgd", "fsdp+diloco"])
def test_a_combination_has_its_documented_name_however_it_is_written(name: str) -> None:
    turned = named("+".join(reversed(name.split("+"))))
    assert turned == named(name)
    assert turned.name in (name, name.removeprefix("ddp+"))  # ddp+tensor is tensor, with copies


@pytest.mark.parametrize("name", ["tensor+pipeline", "ddp+diloco", "fsdp+pipeline", "tensor+diloco"])
def test_a_combination_that_is_not_there_is_answered_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        named(name)
    assert "ddp+tensor, ddp+pipeline" in str(refused.value)


def test_an_axis_has_no_negative_size() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.tensor is -2"):
        parse(["mesh.tensor=-2"])


def test_a_combination_is_known_by_its_recorded_name() -> None:
    """As a proof finds what it gives up, and a plan the settings of a script."""
    asked = mh.DiLoCo(shard=2, sync_every=4)
    assert (asked.name, mh.DiLoCo().name) == ("fsdp+diloco", "diloco")
    assert strategy_of({"name": asked.name, "shard": 2, "sync_every": 4}) == asked
    assert gives_up(asked) == gives_up(mh.DiLoCo()) == ("workers", "ranks")
    with pytest.raises(ConfigError, match="no one says how many workers keep one copy"):
        named("fsdp+diloco").check_planned(None)
