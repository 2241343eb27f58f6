"""Workers that share no disk keep snapshots all the same: the leader has them, and brings them to the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from manyhands.cluster.place import Place
from manyhands.communication.world import World
from manyhands.records.manifest import Facts
from manyhands.snapshot.store import Store

pytestmark = pytest.mark.multiprocess
STATE = {"weights": torch.arange(6.0), "plain": {"step": 3}}
FACTS = Facts(step=3, epoch=0, position={}, strategy="single", model={})


def store_of(rank: int, folder: Path) -> Store:
    place = replace(Place.from_environment(), node_rank=rank, local_rank=0)
    return Store(folder / f"disk{rank}", keep=2, world=World(place), apart=True)


def save_and_load(rank: int, folder: Path) -> dict[str, Any]:
    """Save on disks apart; then another run of the same workers, whose other disks are empty, goes on from it."""
    store = store_of(rank, folder)
    store.save(STATE, FACTS, own={"number": 10 + rank, "noise": torch.full((rank + 1,), float(rank))})
    store.wait()
    written = sorted(path.name for path in (folder / f"disk{rank}").rglob("*"))
    store._world.barrier()
    loaded = store.latest()
    again = Store(folder / f"disk{rank}", keep=2).latest()
    return {
        "written": written,
        "weights": loaded.state["weights"].tolist(),
        "owns": [(own["number"], own["noise"].tolist()) for own in loaded.owns],
        "whole alone": again is not None and again.state["plain"] == {"step": 3},
    }


def test_leader_writes_all_and_every_worker_reads_it(tmp_path: Path) -> None:
    leader, other = run_ranks(2, save_and_load, tmp_path)
    assert "tensors-00000-of-00001.safetensors" in leader["written"]
    assert other["written"] == []
    for found in (leader, other):
        assert found["weights"] == [0, 1, 2, 3, 4, 5]
        assert found["owns"] == [(10, [0.0]), (11, [1.0, 1.0])]
        assert found["whole alone"]
