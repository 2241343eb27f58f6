"""What would fail in the first validation fails before the first step, on all workers alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import images_and_labels, network
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import manyhosts as mh
from manyhosts.errors import ConfigError
from manyhosts.records.line_file import read_lines

pytestmark = pytest.mark.multiprocess


def without_outputs(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1])}


SLIPS: dict[str, tuple[dict[str, Any], str]] = {
    "a metric that nobody reports": (
        {"early_stopping": mh.EarlyStopping("acuracy", mode="max")},
        "early stopping watches 'acuracy'",
    ),
    "outputs that step does not return": ({"loss": None, "step": without_outputs}, "no 'outputs' and 'targets'"),
    "too few classes": ({"metrics": {"accuracy": MulticlassAccuracy(num_classes=3)}}, "target"),
}


def refused(rank: int, slip: str, folder: Path) -> str:
    more, _ = SLIPS[slip]
    data = TensorDataset(*images_and_labels(60))
    given: dict[str, Any] = {
        "model": network,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "metrics": {"accuracy": MulticlassAccuracy(num_classes=10)},
        "data": mh.Data(train=data, validation=data, batch_size=20),
        "run_dir": folder,
    }
    try:
        mh.Trainer(**{**given, **more}).fit("1 epoch")
    except ConfigError as error:
        return error.what
    except (RuntimeError, ValueError) as error:  # as the metric itself puts it
        return str(error)
    return ""


@pytest.mark.parametrize("workers", [1, 2])
def test_what_validation_could_not_do_ends_the_run_before_its_first_step(workers: int, tmp_path: Path) -> None:
    for slip, (_, words) in SLIPS.items():
        folder = tmp_path / slip.replace(" ", "-")
        said = run_ranks(workers, refused, slip, folder)
        assert all(words in each for each in said), (slip, said)
        record = folder / "metrics.jsonl"
        assert not record.exists() or "step" not in {event["event"] for event in read_lines(record)}, slip
