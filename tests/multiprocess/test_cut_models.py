"""A model that no worker holds whole trains, is evaluated, kept and resumed as one process would do it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_by_hand import ByHand, known
from ranks import run_ranks
from runs import images_and_labels
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.cluster.place import Place
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.world import World
from manyhosts.errors import TrainingError
from manyhosts.events import Event, StepDone
from manyhosts.loss.precision import Precision
from manyhosts.snapshot.fingerprint import tensors_sha256
from manyhosts.training.consistency.same_weights import compare_weights

pytestmark = pytest.mark.multiprocess
SAMPLES, BATCH = 61, 25


class Network(nn.Module):
    """Sides that nothing divides; where wanted, buffers."""

    def __init__(self, *, batch_norm: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Linear(64, 13)
        self.norm = nn.BatchNorm1d(13) if batch_norm else nn.Identity()
        self.last = nn.Linear(13, 10)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(images.flatten(1)))))


def trainer_for(run_dir: Path, heard: list[Event], *, loss: Any = None, **more: Any) -> mh.Trainer:
    return mh.Trainer(
        model=Network(batch_norm="micro_batch_size" not in more),
        loss=loss or nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9),
        data=mh.Data(
            train=TensorDataset(*images_and_labels(SAMPLES)),
            validation=TensorDataset(*images_and_labels(19, first=100)),
            test=TensorDataset(*images_and_labels(7, first=200)),
            batch_size=BATCH,
            evaluation_batch_size=4,
        ),
        validate_every="2 steps",
        snapshots=mh.Snapshots(every="2 steps"),
        run_dir=run_dir,
        listeners=[heard.append],
        seed=5,
        clip_gradients=1.0,
        **more,
    )


def fitted(rank: int, run_dir: Path, duration: str, more: dict[str, Any]) -> dict[str, Any]:
    known()
    heard: list[Event] = []
    trainer = trainer_for(run_dir, heard, **more)
    result = trainer.fit(duration)
    saved = run_dir / "last.safetensors"
    trainer.save(saved, weights="last")
    found = {
        "hash": result.weights_sha256,
        "of_file": tensors_sha256(load_file(saved)),
        "validation": result.validation,
        "best": (result.best, result.best_step),
        "test": trainer.test(weights="best"),
        "answers": trainer.predict(images(), weights="last").sum().item(),
        "steps": [(each.loss, each.gradient_norm) for each in heard if isinstance(each, StepDone)],
    }
    if rank:
        found.pop("steps")  # the leader alone hears them
    return found


def images() -> TensorDataset:
    return TensorDataset(images_and_labels(9, first=300)[0])


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(torch.tensor(found).double(), torch.tensor(wanted).double(), rtol=2e-5, atol=2e-6)


def compare(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    for each in found:
        assert each["hash"] == each["of_file"] == found[0]["hash"]
        close(each["validation"]["loss"], wanted["validation"]["loss"])
        close(each["test"]["loss"], wanted["test"]["loss"])
        close(each["answers"], wanted["answers"])
        assert each["best"][1] == wanted["best"][1]
    close(found[0]["steps"], wanted["steps"])


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="batch norm"),
        pytest.param({"micro_batch_size": 3}, id="micro-batches", marks=pytest.mark.slow),
    ],
)
def test_cut_model_goes_on_with_any_number_of_workers_as_one_process_does(tmp_path: Path, more: dict[str, Any]) -> None:
    [half] = run_ranks(1, fitted, tmp_path / "half", "4 steps", more)
    three = run_ranks(3, fitted, tmp_path / "cut", "4 steps", {**more, "strategy": ByHand(shard=3)})
    compare(three, half)
    shutil.copytree(tmp_path / "cut", tmp_path / "same")
    again = run_ranks(2, fitted, tmp_path / "same", "4 steps", {**more, "strategy": ByHand(shard=2)})
    assert {each["hash"] for each in again} == {three[0]["hash"]}, "what was loaded is not what was saved"
    [whole] = run_ranks(1, fitted, tmp_path / "half", "7 steps", more)
    on = run_ranks(4, fitted, tmp_path / "same", "7 steps", {**more, "strategy": ByHand(shard=2)})
    compare(on, whole)
    [alone] = run_ranks(1, fitted, tmp_path / "same", "7 steps", {**more, "strategy": "single"})
    assert alone["hash"] == on[0]["hash"], "what two copies of two parts saved is not what they held"
    if not more:
        file = tmp_path / "cut" / "last.safetensors"
        assert set(run_ranks(2, begun_from, tmp_path / "begun", file)) == {three[0]["hash"]}


def begun_from(rank: int, run_dir: Path, weights: Path) -> str:
    known()
    trainer = trainer_for(run_dir, [], strategy=ByHand(shard=2), init_from=weights)
    trainer.save(run_dir / "again.safetensors")
    return tensors_sha256(load_file(run_dir / "again.safetensors"))


def failing(rank: int, run_dir: Path) -> None:
    known()
    seen = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal seen
        seen += outputs.requires_grad
        if rank == 1 and seen == 4:
            raise ValueError("these targets are no good")
        return nn.functional.cross_entropy(outputs, targets)

    trainer_for(run_dir, [], strategy=ByHand(shard=2), loss=loss, weight="samples").fit("6 steps")


def test_error_of_one_worker_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="these targets are no good") as caught:
        run_ranks(2, failing, tmp_path)
    assert "rank 1 of 2 failed" in str(caught.value)
    assert str(caught.value).count("ValueError: these targets are no good") == 1


def in_groups(rank: int) -> dict[str, Any]:
    world = World(Place.from_environment())
    mesh = Mesh(world, shard=2)
    found: dict[str, Any] = {}
    for axes in (("replicate",), ("shard",), ("replicate", "shard"), ("tensor",)):
        members = mesh.along(*axes)
        assert mesh.along(*axes).process_group is members.process_group
        before = world.bytes_sent
        found["+".join(axes)] = [
            members.all_reduce(torch.tensor([float(rank)])).item(),
            [int(each) for each in members.stack(torch.tensor(rank))],
            [each.tolist() for each in members.gather(torch.arange(rank))],
            members.broadcast(torch.tensor([rank]), source=members.size - 1).item(),
            members.any(rank == 0),
        ]
        assert (world.bytes_sent > before) == (members.size > 1)
    over = mesh.device_mesh("replicate", "shard")
    found["mesh"] = [over.mesh.tolist(), list(over.get_coordinate() or ())]
    known()
    trainer = trainer_for(Path("/nowhere"), [], strategy=ByHand(shard=2))
    components = trainer.components
    compare_weights(components, "now")
    found["norm of nothing"] = components.strategy.norm(components.trained).item()
    if rank == 3:
        with torch.no_grad():
            components.strategy.holding.local(next(components.model.parameters()))[0, 0] += 1
    try:
        compare_weights(components, "now")
    except TrainingError as error:
        found["error"] = error.what
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    precision = Precision("fp16", world.device, together=world)
    precision.scale(torch.ones(()))
    parameter.grad = torch.full((2,), torch.inf if rank == 2 else 1.0)
    precision.stepper(optimizer).step()
    found["overflow"] = [parameter.tolist(), precision.state_dict()["scale"]]
    return found


def test_groups_of_a_mesh_exchange_within_themselves_and_notice_what_differs() -> None:
    found = run_ranks(4, in_groups)
    for rank, each in enumerate(found):
        along = {
            "replicate": [rank % 2, rank % 2 + 2],
            "shard": [rank // 2 * 2, rank // 2 * 2 + 1],
            "replicate+shard": [0, 1, 2, 3],
            "tensor": [rank],
        }
        for axes, ranks in along.items():
            rows = [list(range(other)) for other in ranks]
            assert each[axes] == [sum(ranks), ranks, rows, ranks[-1], 0 in ranks], (rank, axes)
        assert each["mesh"] == [[[0, 1], [2, 3]], [rank // 2, rank % 2]]
        assert each["norm of nothing"] == 0.0
        assert each["error"] == "the workers do not hold the same model: copies of one part of first.weight differ"
        assert each["overflow"] == [[1.0, 1.0], 2.0**15], "a step is left out by all where one worker overflowed"
