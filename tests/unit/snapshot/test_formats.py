"""A snapshot of every format there was is read, and a run goes on from it as one that nothing happened to.

`formats/N` is the snapshot of format N of a run of `make_trainer`, three steps long. Who raises the format adds one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.events import Note
from manyhosts.records.manifest import FORMAT_VERSION
from manyhosts.snapshot.load import load

FORMATS = Path(__file__).parent / "formats"


def make_trainer(run_dir: Path, said: list[str]) -> mh.Trainer:
    inputs = torch.linspace(-1, 1, 40).reshape(20, 2)
    return mh.Trainer(
        model=lambda: nn.Linear(2, 1),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        data=mh.Data(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=6),
        listeners=[lambda event: said.append(event.text) if isinstance(event, Note) else None],
        run_dir=run_dir,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run of eight steps."""
    trainer = make_trainer(tmp_path_factory.mktemp("whole"), [])
    trainer.fit("8 steps")
    return dict(trainer.model.state_dict())


def test_there_is_one_of_every_format() -> None:
    assert sorted(path.name for path in FORMATS.iterdir()) == [str(n) for n in range(1, FORMAT_VERSION + 1)]


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_run_goes_on_from_it(version: int, whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    loaded = load(FORMATS / str(version))
    assert (loaded.manifest.format_version, loaded.facts.step) == (version, 3)
    shutil.copytree(FORMATS / str(version), tmp_path / "snapshots" / "step-00000003")
    said: list[str] = []
    trainer = make_trainer(tmp_path, said)
    assert trainer.fit("8 steps").steps == 8
    assert (tmp_path / "snapshots" / "step-00000003").exists()
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, whole[name])  # the processor that made it may round otherwise
    assert any("nobody knows what changed" in text for text in said) == (version == 1)
    assert not any("changed since" in text for text in said)
