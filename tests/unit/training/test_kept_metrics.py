"""A metric that keeps something from one validation to the next: the look before the first step does not move it."""

from __future__ import annotations

from pathlib import Path

import torch
from runs import events, images_and_labels, network
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import MinMaxMetric

import manyhosts as mh


def test_smallest_and_largest_are_those_of_the_validations_and_a_note_says_what_no_snapshot_has(tmp_path: Path) -> None:
    data = TensorDataset(*images_and_labels(200))
    mh.Trainer(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        data=mh.Data(train=data, validation=data, batch_size=50),
        metrics={"range": MinMaxMetric(MulticlassAccuracy(num_classes=10, average="micro"))},
        run_dir=tmp_path,
    ).fit("4 epochs")
    rows = [line["values"] for line in events(tmp_path, "validation")]
    raw = [row["range/raw"] for row in rows]
    assert raw[-1] > raw[0] > 0.1, "the model before the first step is another"
    assert [row["range/min"] for row in rows] == [min(raw[: place + 1]) for place in range(4)]
    assert [row["range/max"] for row in rows] == [max(raw[: place + 1]) for place in range(4)]
    assert any(
        "range (metrics) keep something from one validation" in line["text"] for line in events(tmp_path, "note")
    )
