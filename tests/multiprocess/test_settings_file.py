"""Settings from a YAML file count as those of `--set`, and a trainer shows its model in a table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from launching import MANYHOSTS
from ranks import run_ranks
from runs import Recipe, make_trainer
from torch import nn

from manyhosts.config import overrides
from manyhosts.errors import ConfigError
from manyhosts.model.trained_module import summary

pytestmark = pytest.mark.multiprocess

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import manyhosts as mh

inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
mh.Trainer(
    model=lambda: nn.Linear(4, 1),
    loss=nn.MSELoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
    data=mh.Data(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8),
).fit("1 epoch")
"""
YAML = """
lr: 0.02
batch_size: 12
drop_last: true
duration: 3 epochs
clip_gradients: null
snapshots:
  every: 2 steps
  keep: 5
"""


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_file_of_settings_counts_as_words_do_and_later_words_count_more(workers: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "small.yaml").write_text(YAML)
    found = []
    by_words = ["lr=0.02", "batch_size=12", "drop_last=true", "duration=3 epochs", "snapshots.every=2 steps"]
    for number, words in enumerate(
        [["small.yaml", "seed=4"], [*by_words, "snapshots.keep=5", "seed=4"], ["small.yaml", "seed=4", "lr=0.03"]]
    ):
        options = [each for word in words for each in ("--set", word)]
        command = [*MANYHOSTS, "run", "--workers", str(workers), "--run-dir", f"run-{number}", *options, "train.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        settings = json.loads((tmp_path / f"run-{number}" / "run.json").read_text())["settings"]
        found.append((settings, json.loads((tmp_path / f"run-{number}" / "summary.json").read_text())))
    assert found[0][0] == found[1][0]
    assert found[0][1]["weights_sha256"] == found[1][1]["weights_sha256"]
    assert (found[2][0]["lr"], found[0][0]["lr"], found[0][1]["steps"]) == (0.03, 0.02, 12)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- lr", "the file is a list"),
        ("lr: [1, 2]", "lr is a list"),
        ("lr: {a: 1}", "lr is a section"),
        ("learning_rate: 1", "no setting named 'learning_rate'"),
        ("lr: 'a", "cannot read the settings"),
        ("", "the file has no settings"),
    ],
)
def test_file_that_holds_something_else_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        overrides.parse([str(path)])
    with pytest.raises(ConfigError, match="there is no file"):
        overrides.parse([str(tmp_path / "missing.yaml")])


def summed_up(rank: int, folder: Path) -> str:
    return make_trainer(Recipe(accuracy=False, batch_norm=True), folder).summary()


@pytest.mark.parametrize("workers", [1, 2])
def test_model_in_a_table(workers: int, tmp_path: Path) -> None:
    for text in run_ranks(workers, summed_up, tmp_path):
        rows = [line.split() for line in text.splitlines()]
        assert ["0", "Conv2d", "80", "80"] in rows
        assert rows[-1][-2:] == ["1,386", "1,386"]


def test_tied_and_frozen_parameters_in_the_table() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    rows = [line.split() for line in summary(model).splitlines()]
    assert ["0", "Linear", "12", "12"] in rows
    assert ["1", "Linear", "3", "3"] in rows
    assert ["2.0", "Linear", "6", "0"] in rows
    assert rows[-1][-2:] == ["21", "15"]
    assert torch.tensor([each.numel() for each in model.parameters()]).sum() == 21
