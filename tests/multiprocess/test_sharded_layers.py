"""Layers cut over workers whose parts others keep in parts: norms, weights and evaluation of one process; snapshots."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import summary
from launching import run
from measured_training import MEASURED, group
from ranks import run_ranks
from runs import step_lines
from sharded import Case, assert_passed_on, assert_same, script, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.communication import volume
from manyhosts.config.sharded_layers import ShardedLayers
from manyhosts.measure.in_worker import cutting
from manyhosts.planner.compute import micro_batches
from manyhosts.planner.measured import Bucket
from manyhosts.planner.strategies.sharded_layers import ShardedLayersModel, as_one_reader
from manyhosts.strategies.units import unit_bytes

pytestmark = pytest.mark.multiprocess

PARTS = {"shard": 2, "tensor": 2}
CASES = {
    "one micro-batch": Case(),
    "clipped, an uneven rest": Case(samples=25, trainer={"clip_gradients": 0.1, "micro_batch_size": 2}),
    "AdamW, micro-batches of five": Case(optimizer="AdamW", trainer={"micro_batch_size": 5}),
    "batches of one": Case(samples=5, batch=2, trainer={"micro_batch_size": 1}),
    "batch norm": Case(block={"norm": nn.BatchNorm1d}),
    "loss with parameters": Case(centred=True, trainer={"micro_batch_size": 4}),
}
OF_TWO = {
    "dropout": Case(block={"dropout": 0.3}, trainer={"micro_batch_size": 4}),
    "bf16": Case(block={"dropout": 0.1}, trainer={"precision": "bf16", "micro_batch_size": 4}),
    "fp16": Case(trainer={"precision": "fp16", "micro_batch_size": 4}),
}
"""As two workers with the uncut model: pieces and what is drawn are those of two that read different samples."""


def test_parts_of_cut_layers_train_as_one_process(tmp_path: Path) -> None:
    of_two = {name: replace(case, strategy="ddp") for name, case in OF_TWO.items()}
    alone = trained(1, CASES, tmp_path / "alone") | trained(2, of_two, tmp_path / "two")
    cases = {name: replace(case, strategy="fsdp+tensor", options=PARTS) for name, case in {**CASES, **OF_TWO}.items()}
    for name, found in trained(4, cases, tmp_path / "parts").items():
        assert len(found.norms) == 5, name
        assert_same(alone[name], found, relative=5e-2 if name in ("bf16", "fp16") else 1e-5)


@pytest.mark.parametrize("options", [{"shard": 1, "tensor": 2}, {"shard": 2, "tensor": 1}])
def test_one_worker_along_an_axis_trains_as_one_process(tmp_path: Path, options: dict[str, int]) -> None:
    case = Case(samples=25, trainer={"clip_gradients": 0.1, "micro_batch_size": 2})
    alone = trained(1, {"": case}, tmp_path / "alone")[""]
    assert_same(alone, trained(2, {"": replace(case, strategy="fsdp+tensor", options=options)}, tmp_path / "two")[""])


@pytest.mark.slow
def test_two_copies_of_them_train_as_one_process(tmp_path: Path) -> None:
    case = Case(samples=25, trainer={"clip_gradients": 0.1, "micro_batch_size": 2})
    alone = trained(1, {"": case}, tmp_path / "alone")[""]
    copies = replace(case, strategy="fsdp+tensor", options={"replicate": 2, **PARTS})
    assert_same(alone, trained(8, {"": copies}, tmp_path / "copies")[""])


def test_a_snapshot_passes_between_this_and_other_layouts(tmp_path: Path) -> None:
    case = Case(strategy="fsdp+tensor", options=PARTS, optimizer="AdamW", trainer={"micro_batch_size": 4})
    layouts = [
        (2, replace(case, strategy="fsdp", options={})),
        (4, case),
        (2, replace(case, strategy="tensor", options={})),
        (4, case),
        (2, replace(case, strategy="ddp", options={})),
    ]
    assert_passed_on(layouts, tmp_path / "run")


@pytest.mark.slow
def test_a_killed_worker_costs_no_bit(tmp_path: Path) -> None:
    once = "if not os.path.exists('killed'): open('killed', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    hashes = set()
    for name, trouble in {"undisturbed": "pass", "killed": once}.items():
        (tmp_path / name).mkdir()
        words = ("strategy=fsdp+tensor", "mesh.tensor=2", "mesh.shard=2", "threads=1")
        options = [word for each in words for word in ("--set", each)]
        ended = run(tmp_path / name, script(trouble, "ddp"), "--workers", "4", "--restarts", "1", *options)
        assert ended.code == 0, ended.err
        assert summary(ended.run_dir)["restarts"] == int(name == "killed")
        assert summary(ended.run_dir)["strategy"] == "fsdp+tensor"
        hashes.add(summary(ended.run_dir)["weights_sha256"])
    assert len(hashes) == 1


WIDTH, SAMPLES = 64, 8


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        added: Tensor = given + self.down(torch.tanh(self.up(given)))
        return added


def pairs() -> nn.Module:
    return nn.Sequential(*(Pair() for _ in range(4)))


def counted(rank: int, folder: Path) -> tuple[int, int, int]:
    """Bytes of what the optimizer has of parameters and keeps of them on this worker, and of what a step sends."""
    held: list[torch.optim.Optimizer] = []

    def optimizer(params: Any) -> torch.optim.Optimizer:
        held.append(torch.optim.AdamW(params, lr=1e-3))
        return held[0]

    given = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    data = mh.Data(train=TensorDataset(given, given.roll(1, 1)), batch_size=SAMPLES)
    mesh = mh.Mesh(shard=2, tensor=2)
    trainer = mh.Trainer(model=pairs, loss=nn.MSELoss(), optimizer=optimizer, data=data, strategy=mesh, run_dir=folder)
    trainer.fit("3 steps")
    own = [each.to_local() for group in held[0].param_groups for each in group["params"]]
    kept = [each.to_local() for state in held[0].state.values() for each in state.values() if hasattr(each, "to_local")]
    parameters, states = (sum(each.nbytes for each in tensors) for tensors in (own, kept))
    return parameters, states, step_lines(folder)[-1]["bytes_sent"]


def test_a_plan_knows_what_a_worker_holds_and_sends_along_each_axis(tmp_path: Path) -> None:
    model = pairs()
    total = sum(each.nbytes for each in model.parameters())
    layers = cutting._layers(model, torch.randn(SAMPLES, WIDTH), nullcontext, SAMPLES)
    assert layers is not None
    measured = replace(
        MEASURED,
        parameter_bytes=total,
        gradient_bytes=total,
        optimizer_bytes=2 * total,
        buckets=(Bucket(bytes=total, ready=1.0),),
        unit_bytes=unit_bytes(model, total=total),
        cut_layers=layers,
        global_batch=SAMPLES,
    )
    planned = ShardedLayersModel(ShardedLayers(size=2)).memory(measured, group(1, 4))
    own = as_one_reader(measured, group(1, 4), 2)
    [samples] = micro_batches(own, 2)
    # Units are gathered in the forward and in the backward pass, and their gradients summed; each is half another's.
    shard = 2 * sum(own.unit_bytes) // 2 + volume.all_to_all_bytes(own.gradient_bytes, 2)
    tensor = volume.all_reduce_bytes(round(samples * layers.exchanged_bytes), 2)
    for parameters, states, sent in run_ranks(4, counted, tmp_path / "run"):
        assert parameters == planned.parameters == total // 4
        assert states == planned.optimizer
        assert sent == pytest.approx(shard + tensor, rel=0.01)
        assert sent - shard == pytest.approx(tensor, rel=0.15), "the first layer's input wants no gradient"
