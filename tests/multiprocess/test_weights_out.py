"""A run's weights come out of it, on any number of workers, with the names that the model has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import run
from ranks import run_ranks
from runs import images_and_labels, network
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError

pytestmark = pytest.mark.multiprocess


class Tied(nn.Module):
    """Two layers that share their weights, behind a buffer that repeats one number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.second(self.first(images.flatten(1)) * self.scale)[:, :10]


def trained(folder: Path) -> tuple[mh.Trainer, Path]:
    data = TensorDataset(*images_and_labels(60))
    trainer = mh.Trainer(
        model=Tied,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=data, validation=data, batch_size=20),
        early_stopping=mh.EarlyStopping("loss", mode="max", patience=9),  # so that the best is not the last
        run_dir=folder / "run",
    )
    trainer.fit("3 epochs")
    return trainer, folder / "run"


def save_all(rank: int, folder: Path) -> dict[str, bool]:
    trainer, run_dir = trained(folder)
    trainer.save(folder / "best.safetensors")
    trainer.save(folder / "last.pt", weights="last")
    now = trainer.model.state_dict()
    best, last = load_file(folder / "best.safetensors"), torch.load(folder / "last.pt", weights_only=True)
    kept = mh.load(run_dir)
    with pytest.raises(ConfigError, match="cannot tell what to write"):
        trainer.save(folder / "model.bin")
    with pytest.raises(ConfigError, match=r"cannot write|could not write"):
        trainer.save(folder / "best.safetensors" / "below-a-file.pt")
    return {
        "files": all(
            torch.equal(mh.load(folder / name)[key], value)
            for name, saved in (("best.safetensors", best), ("last.pt", last))
            for key, value in saved.items()
        ),
        "names": list(best) and set(best) == set(last) == set(kept) == set(now),
        "last": all(torch.equal(last[name], now[name]) for name in now),
        "best": all(torch.equal(best[name], kept[name]) for name in now),
        "differ": not torch.equal(best["first.weight"], last["first.weight"]),
        "newest": all(torch.equal(mh.load(run_dir, weights="last")[name], now[name]) for name in now),
        "main": trainer.is_main == (rank == 0),
        "fits": str(Tied().load_state_dict(kept)) == "<All keys matched successfully>",
    }


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_weights_are_saved_once_and_loaded_again(workers: int, tmp_path: Path) -> None:
    for found in run_ranks(workers, save_all, tmp_path):
        assert all(found.values()), found
    assert not list(tmp_path.glob(".*half")), "a file was left half-written"


def test_damaged_newest_snapshot_is_named_and_the_one_before_it_taken(tmp_path: Path) -> None:
    data = TensorDataset(*images_and_labels(60))
    trainer = mh.Trainer(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=data, batch_size=20),
        snapshots=mh.Snapshots(every="2 steps"),
        run_dir=tmp_path,
    )
    trainer.fit("4 steps")
    [file] = (tmp_path / "snapshots" / "step-00000004").glob("tensors-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="step-00000004 is left out"):
        weights = mh.load(tmp_path)
    assert weights.keys() == trainer.model.state_dict().keys()
    with pytest.raises(ConfigError, match="no such folder"):
        mh.load(tmp_path / "nowhere")
    (tmp_path / "notes.pt").write_text("no weights")
    with pytest.raises(ConfigError, match="cannot read the weights"):
        mh.load(tmp_path / "notes.pt")


def test_script_prints_once_on_any_number_of_workers(tmp_path: Path) -> None:
    source = """
        import manyhosts as mh
        mh.print("once", 1, sep="-")
"""
    ended = run(tmp_path, source, "--workers", "2")
    assert ended.code == 0, ended.err
    assert ended.out.count("once-1") == 1
