"""Several validation and test sets: each evaluated as one alone, watched by name, the same on any number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import images_and_labels, network
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import manyhosts as mh

pytestmark = pytest.mark.multiprocess


def noisy(images: Tensor) -> Tensor:
    return images + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(5))


def held_out() -> dict[str, tuple[Tensor, Tensor]]:
    images, labels = images_and_labels(61, first=1000)
    return {"clean": (images, labels), "noisy": (noisy(images)[:37], labels[:37])}


def evaluate(models: nn.Module, batch: Any) -> dict[str, Tensor]:
    outputs = models["model"](batch[0])
    return {"loss": nn.functional.cross_entropy(outputs, batch[1]), "outputs": outputs, "targets": batch[1]}


def step(run: mh.Run) -> None:
    run.backward(lambda batch: evaluate(run.models, batch)["loss"])
    run.update()


def trained(rank: int, folder: Path, face: str, best: str | None) -> dict[str, Any]:
    sets = {name: TensorDataset(*each) for name, each in held_out().items()}
    given: dict[str, Any] = {
        "data": mh.Data(TensorDataset(*images_and_labels(60)), validation=sets, test=sets, batch_size=20),
        "metrics": {"accuracy": MulticlassAccuracy(num_classes=10, average="micro")},
        "best": best,
        "run_dir": folder,
    }
    if face == "Run":
        made: mh.Trainer = mh.Run(
            models=lambda: network(dropout=False),
            optimizers=lambda params: torch.optim.SGD(params, lr=0.05),
            evaluate=evaluate,
            **given,
        )
        result = made.fit(step, "3 epochs")
    else:
        made = mh.Trainer(
            model=lambda: network(dropout=False),
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
            **given,
        )
        result = made.fit("3 epochs")
    model = made.model["model"] if face == "Run" else made.model
    wanted = {}
    with torch.no_grad():
        for name, (images, labels) in held_out().items():
            outputs = model.eval()(images)
            wanted[f"{name}/loss"] = float(nn.functional.cross_entropy(outputs, labels))
            wanted[f"{name}/accuracy"] = float((outputs.argmax(1) == labels).double().mean())
    return {
        "wanted": wanted,
        "last": made.validate(weights="last"),
        "test": made.test(weights="last"),
        "fitted": result.validation,
        "best": (result.best, result.best_step),
        "best values": made.validate(),
    }


@pytest.mark.parametrize("face", ["Trainer", "Run"])
@pytest.mark.parametrize("workers", [1, 2])
def test_each_set_is_evaluated_as_if_it_were_alone(workers: int, face: str, tmp_path: Path) -> None:
    for found in run_ranks(workers, trained, tmp_path, face, "noisy/accuracy"):
        assert found["wanted"].keys() == found["last"].keys()
        for kind in ("last", "test", "fitted"):
            assert found[kind] == pytest.approx(found["wanted"], abs=1e-5), kind
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    values = [(line["values"]["noisy/accuracy"], -line["step"]) for line in lines if line["event"] == "validation"]
    assert found["best"] == (max(values)[0], -max(values)[1])
    assert found["best values"]["noisy/accuracy"] == max(values)[0]


def test_without_a_word_the_loss_of_the_first_set_says_what_is_best(tmp_path: Path) -> None:
    [found] = run_ranks(1, trained, tmp_path, "Trainer", None)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["best"]["metric"] == "clean/loss"
    assert summary["best"]["value"] == found["best"][0] == found["best values"]["clean/loss"]
