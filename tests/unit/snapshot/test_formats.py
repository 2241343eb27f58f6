"""A snapshot of every format there was is read, and a run continues from it as one that nothing happened to.

`formats/N` is the snapshot of format N of a run of `make_trainer`, three steps long. Who raises the format adds one.
`by_index` is one of format 3 that two workers wrote in a run of `make_adam`: parameters have numbers, in two groups.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.events import Note
from manyhosts.records.manifest import FORMAT_VERSION, read
from manyhosts.snapshot.load import load

FORMATS = Path(__file__).parent / "formats"
BY_INDEX = Path(__file__).parent / "by_index"


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


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(3, 2), nn.Linear(3, 2, bias=False), nn.Linear(2, 1)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.first(inputs) + self.second(inputs).tanh())


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output * self.scale - target) ** 2).mean()


def make_adam(run_dir: Path) -> mh.Trainer:
    def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        some = list(params)
        return torch.optim.Adam([{"params": some[3:], "lr": 0.05}, {"params": some[:3]}], lr=0.02, amsgrad=True)

    inputs = torch.linspace(-1, 1, 60).reshape(20, 3)
    return mh.Trainer(
        model=Tied,
        loss=Scaled(),
        optimizer=adam,
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        data=mh.Data(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=6),
        seed=3,
        run_dir=run_dir,
    )


def test_optimizer_by_numbers_in_two_groups_goes_on_and_is_kept_by_name_from_then_on(tmp_path: Path) -> None:
    shutil.copytree(BY_INDEX, tmp_path / "resumed" / "snapshots")
    resumed, at_once = make_adam(tmp_path / "resumed"), make_adam(tmp_path / "whole")
    assert resumed.fit("8 steps").steps == at_once.fit("8 steps").steps == 8
    for name, value in resumed.model.state_dict().items():
        torch.testing.assert_close(value, at_once.model.state_dict()[name])
    kept = load(tmp_path / "resumed" / "snapshots" / "step-00000008").state["optimizer"]
    whole = load(tmp_path / "whole" / "snapshots" / "step-00000008").state["optimizer"]
    assert [group["params"] for group in kept["param_groups"]] == [group["params"] for group in whole["param_groups"]]
    for name, values in whole["state"].items():
        assert kept["state"][name].keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(kept["state"][name][key], value)


@pytest.mark.parametrize("folder", [*sorted(FORMATS.iterdir()), BY_INDEX / "step-00000003"], ids=lambda each: each.name)
def test_manifest_of_every_format_is_written_again_as_it_was_read(folder: Path) -> None:
    assert read(folder).to_text() == (folder / "manifest.json").read_text()
