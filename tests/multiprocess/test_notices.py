"""Scripts that run and do not train together are told so, in one line; those that do hear nothing."""

from __future__ import annotations

import textwrap
import zipfile
from pathlib import Path

import pytest
from launching import Ended, run_words, write_script

pytestmark = pytest.mark.multiprocess

BEGIN = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

rank = int(os.environ["RANK"])
data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3)
model = nn.Linear(4, 3)
"""
TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    exchange()
    optimizer.step()
print("trained")
"""
ALONE = BEGIN + "loader = DataLoader(data, batch_size=8)\nexchange = bool\n" + TRAIN
TOGETHER = BEGIN + "dist.init_process_group('gloo')\nexchange = bool\n"
BY_HAND = """
def exchange():
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
"""


def notices(folder: Path, source: str, *options: str, workers: int = 2) -> list[str]:
    script = write_script(folder, source)
    return reported(run_words(folder, "--run-dir", "run", "--workers", str(workers), *options, str(script)))


def reported(ended: Ended) -> list[str]:
    """What the launcher has said; the script has done its work all the same."""
    assert ended.code == 0, ended.err
    return [line for line in ended.err.splitlines() if line.startswith("manyhosts: ")]


def test_workers_without_a_process_group_are_told_that_each_trains_alone(tmp_path: Path) -> None:
    [words] = notices(tmp_path, ALONE)
    assert words.startswith("manyhosts: each of the 2 workers trains alone: there is no process group")
    assert "fix: call torch.distributed.init_process_group()" in words


def test_module_and_archive_are_told_so_too(tmp_path: Path) -> None:
    write_script(tmp_path, ALONE, "alone.py")
    with zipfile.ZipFile(tmp_path / "alone.zip", "w") as archive:
        archive.writestr("__main__.py", textwrap.dedent(ALONE))
    for words in (["--module", "alone"], ["alone.zip"]):
        said = reported(run_words(tmp_path, "--run-dir", f"run-{words[-1]}", "--workers", "2", *words))
        assert ["trains alone" in line for line in said] == [True], words


def test_workers_that_begin_with_different_weights_are_told_so(tmp_path: Path) -> None:
    source = TOGETHER + "loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))\n" + BY_HAND + TRAIN
    [words] = notices(tmp_path, source)
    assert words.startswith("manyhosts: the 2 workers began with different weights")
    assert "DistributedDataParallel" in words


def test_workers_that_read_the_same_samples_are_told_so(tmp_path: Path) -> None:
    source = TOGETHER + "model = DistributedDataParallel(model)\nloader = DataLoader(data, batch_size=8)\n" + TRAIN
    [words] = notices(tmp_path, source)
    assert words.startswith("manyhosts: all 2 workers train on the same samples")
    assert "DistributedSampler" in words


def test_script_that_makes_an_optimizer_and_no_step_is_told_so(tmp_path: Path) -> None:
    source = BEGIN + "loader = DataLoader(data, batch_size=64, drop_last=True)\nexchange = bool\n" + TRAIN
    [words] = notices(tmp_path, source, workers=1)
    assert words.startswith("manyhosts: the script ended without one optimizer step")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            TOGETHER
            + "model = DistributedDataParallel(model)\n"
            + "loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))\n"
            + TRAIN,
            id="data parallel",
        ),
        pytest.param(
            TOGETHER
            + "model = DistributedDataParallel(model)\n"
            + "loader = ((x[rank::2], y[rank::2]) for x, y in DataLoader(data, batch_size=8))\n"
            + TRAIN,
            id="each cuts its part out of the same batches",
        ),
        pytest.param(
            TOGETHER
            + "from torch.distributed.device_mesh import init_device_mesh\n"
            + "from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module\n"
            + "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))\n"
            + "parallelize_module(model, init_device_mesh('cpu', (2,)), {'0': ColwiseParallel()})\n"
            + "loader = DataLoader(data, batch_size=8)\n"
            + "exchange = bool\n"
            + TRAIN.replace("model(inputs)", "model[0](inputs) @ torch.ones(2, 3)"),
            id="tensor parallel",
        ),
        pytest.param(
            TOGETHER
            + "from torch.distributed.fsdp import fully_shard\n"
            + "fully_shard(model)\n"
            + "loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))\n"
            + TRAIN,
            id="fully sharded",
        ),
        pytest.param(
            BEGIN
            + "with torch.no_grad():\n"
            + "    print([model(inputs).sum() for inputs, _ in DataLoader(data, batch_size=8)][0])\n",
            id="evaluation alone",
        ),
    ],
)
def test_workers_that_do_as_they_should_hear_nothing(source: str, tmp_path: Path) -> None:
    assert notices(tmp_path, source) == []
