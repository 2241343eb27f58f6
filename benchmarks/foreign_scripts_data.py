"""Random data in the place of data sets and models that scripts download: copied as `sitecustomize.py` beside them.

Python imports it at its start, in every process, under torchrun and under `manyhosts run` alike. What a script
downloads is replaced when the library that would do so has been imported: nothing here is imported before.
"""

from __future__ import annotations

import os
from typing import Any

from manyhosts.imports import when_imported

_SAMPLES = int(os.environ.get("FOREIGN_SAMPLES", "64"))


def _images(size: tuple[int, ...], classes: int) -> Any:
    import numpy
    import torch
    from PIL import Image

    class RandomImages(torch.utils.data.Dataset):  # type: ignore[type-arg]  # torch's generic needs no argument here
        """Takes the arguments of torchvision's data sets, and needs none of them but the transforms."""

        def __init__(self, root: Any = None, train: bool = True, transform: Any = None, **more: Any) -> None:
            noise = numpy.random.default_rng(int(train))
            self.data = torch.as_tensor(noise.integers(0, 255, (_SAMPLES, *size), dtype="uint8"))
            self.targets = torch.as_tensor(noise.integers(0, classes, _SAMPLES))
            self.transform, self.target_transform = transform, more.get("target_transform")
            self.classes = [str(number) for number in range(classes)]

        def __len__(self) -> int:
            return _SAMPLES

        def __getitem__(self, index: int) -> tuple[Any, int]:
            image = Image.fromarray(self.data[index].numpy())
            return (self.transform(image) if self.transform else image), int(self.targets[index])

    return RandomImages


def _sentences() -> Any:
    from datasets import Dataset, DatasetDict

    words = [f"word{number}" for number in range(40)]
    rows = {
        "sentence1": [" ".join(words[number % 30 : number % 30 + 8]) for number in range(_SAMPLES)],
        "sentence2": [" ".join(words[number % 20 : number % 20 + 6]) for number in range(_SAMPLES)],
        "label": [number % 2 for number in range(_SAMPLES)],
        "idx": list(range(_SAMPLES)),
    }
    return DatasetDict({split: Dataset.from_dict(rows) for split in ("train", "validation", "test")})


def _replace_load_dataset(datasets: Any) -> None:
    load = datasets.load_dataset

    def load_dataset(path: str, *arguments: Any, **named: Any) -> Any:
        return _sentences() if path.endswith("glue") else load(path, *arguments, **named)

    datasets.load_dataset = load_dataset


def _replace_bert(kind: Any) -> None:
    """Whoever asks for BERT gets a small one with random weights, from a folder."""
    place, load = os.environ["FOREIGN_TINY"], kind.from_pretrained

    def from_pretrained(wanted: str, *arguments: Any, **named: Any) -> Any:
        return load(os.path.join(place, "bert") if "bert" in str(wanted) else wanted, *arguments, **named)

    kind.from_pretrained = from_pretrained


class _Metric:
    """Takes what the metrics of `evaluate` take, whose definitions are downloaded, too."""

    def __init__(self) -> None:
        self.right: list[float] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self.right += (predictions == references).float().tolist()

    def compute(self, **_: Any) -> dict[str, float]:
        return {"accuracy": sum(self.right) / max(1, len(self.right))}


when_imported("evaluate", lambda module: setattr(module, "load", lambda *_, **__: _Metric()))
when_imported("torchvision.datasets.mnist", lambda module: setattr(module, "MNIST", _images((28, 28), 10)))
when_imported("torchvision.datasets.cifar", lambda module: setattr(module, "CIFAR10", _images((32, 32, 3), 10)))
when_imported("lightning.pytorch.demos.mnist_datamodule", lambda m: setattr(m, "MNIST", _images((28, 28), 10)))
when_imported("datasets", _replace_load_dataset)
if os.environ.get("FOREIGN_TINY"):
    auto = "transformers.models.auto"
    when_imported(f"{auto}.tokenization_auto", lambda module: _replace_bert(module.AutoTokenizer))
    when_imported(f"{auto}.modeling_auto", lambda module: _replace_bert(module.AutoModelForSequenceClassification))
