"""Predictions: each sample once, in the dataset's order, the same bits on any number of workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import images_and_labels, network
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import manyhosts as mh
from manyhosts.errors import ManyhostsError

pytestmark = pytest.mark.multiprocess
SAMPLES = 31


class Named(Dataset[Any]):
    """Samples that are dicts, of which one may be half-written."""

    def __init__(self, torn: int = -1) -> None:
        self.images, self.torn = images_and_labels(SAMPLES)[0], torn

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.torn:
            raise OSError("half-written file")
        return {"image": self.images[index], "number": index}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Named())


def several(model: nn.Module, batch: dict[str, Any]) -> Any:
    scores = model(batch["image"])
    return {
        "scores": (scores, scores.argmax(1)),
        "number": batch["number"],
        "none": None,
        "noise": torch.rand(len(scores)),
    }


def one_column_more_behind_sample_20(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(batch["image"])[:, : 3 if batch["number"][0] > 20 else 2]


REFUSED: dict[str, Callable[[mh.Trainer], Any]] = {
    "the prediction set is a stream": lambda trainer: trainer.predict(Stream()),
    "the prediction set is a DataLoader": lambda trainer: trainer.predict(DataLoader(Named())),  # type: ignore[arg-type]
    "sample 30 of the prediction set cannot be read": lambda trainer: trainer.predict(Named(30), forward=several),
    "a tensor of shape () came out for 7 samples": lambda trainer: trainer.predict(
        Named(), forward=lambda model, batch: model(batch["image"]).sum()
    ),
    "a float came out": lambda trainer: trainer.predict(Named(), forward=lambda model, batch: 1.0),
    "a strided tensor of torch.float8_e4m3fn with 2 dims": lambda trainer: trainer.predict(
        Named(), forward=lambda model, batch: model(batch["image"]).to(torch.float8_e4m3fn)
    ),
    "what comes out differs from batch to batch": lambda trainer: trainer.predict(
        Named(), forward=one_column_more_behind_sample_20
    ),
    "a batch has 3 parts": lambda trainer: trainer.predict(TensorDataset(*[torch.zeros(4, 1)] * 3)),
}


def predicted(rank: int, folder: Path) -> dict[str, Any]:
    images, labels = images_and_labels(SAMPLES)
    trainer = mh.Trainer(
        model=lambda: network(batch_norm=True, dropout=0.5),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=TensorDataset(images, labels), validation=TensorDataset(images, labels), batch_size=7),
        early_stopping=mh.EarlyStopping("loss", mode="max", patience=9),  # so that the best is not the last
        run_dir=folder / f"run-{os.environ.get('WORLD_SIZE', '1')}",
    )
    before = torch.get_rng_state()
    found = {"untrained": trainer.predict(TensorDataset(images, labels))}
    trainer.fit("3 epochs")
    found |= {
        "pairs": trainer.predict(TensorDataset(images, labels), weights="last"),
        "best": trainer.predict(TensorDataset(images)),
        "few": trainer.predict(TensorDataset(images[:2]), weights="last"),
        "dicts": trainer.predict(Named(), forward=several, weights="last"),
    }
    model = trainer.model
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    for what, act in REFUSED.items():
        with pytest.raises(ManyhostsError) as caught:
            act(trainer)
        assert caught.value.what.startswith(what), caught.value
    model.eval()
    with torch.no_grad():
        found["plain"] = model(images)
    return found


def test_predictions_are_those_of_plain_pytorch_and_the_same_on_any_number_of_workers(tmp_path: Path) -> None:
    alone: dict[str, Any] = {}
    for workers in (1, 2, 3):
        for found in run_ranks(workers, predicted, tmp_path):
            alone = alone or found
            torch.testing.assert_close(found["pairs"], found["plain"])
            assert found["pairs"].shape == (SAMPLES, 10)
            torch.testing.assert_close(found["few"], found["pairs"][:2])
            assert not torch.allclose(found["best"], found["pairs"]), "the best model is another one"
            scores, classes = found["dicts"]["scores"]
            assert torch.equal(scores, found["pairs"])
            assert torch.equal(classes, scores.argmax(1))
            assert found["dicts"]["number"].tolist() == list(range(SAMPLES))
            assert found["dicts"]["none"] is None
            assert torch.equal(found["untrained"], alone["untrained"]), "the bits depend on the number of workers"
            assert torch.equal(found["dicts"]["noise"], alone["dicts"]["noise"])
