"""A small BERT of transformers on a set of Hugging Face's datasets.

manyhosts run --workers 2 examples/transformers_text.py

Is a line prose or Python? Weights are random and the text is on every machine where this
runs, so nothing is downloaded; with `from_pretrained("…")` and `load_dataset("…")` in their places the rest stays.
"""

from pathlib import Path

from datasets import Dataset
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from torch import nn
from torch.optim import AdamW
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification

import manyhosts as mh

LENGTH = 48
prose = "\n".join(each().DESCR for each in (load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine))
texts = [prose, *(file.read_text() for file in sorted(Path(mh.__file__).parent.glob("training/*.py")))]
rows = [(line.strip(), number > 0) for number, text in enumerate(texts) for line in text.splitlines() if len(line) > 20]
rows = sorted(rows, key=lambda row: (row[1], row[0]))[:500]  # about as many of each


def encoded(row: dict) -> dict:
    """A line as numbers of its characters, filled up with 0."""
    numbers = [min(ord(character), 127) for character in row["line"][:LENGTH]]
    left = LENGTH - len(numbers)
    return {"input_ids": numbers + [0] * left, "attention_mask": [1] * len(numbers) + [0] * left}


def network() -> nn.Module:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    return BertForSequenceClassification(BertConfig(vocab_size=128, num_labels=2, **sizes))


lines = Dataset.from_dict({"line": [line for line, _ in rows], "labels": [int(label) for _, label in rows]})
parts = lines.map(encoded, remove_columns="line").with_format("torch").train_test_split(0.2, seed=0)


def step(model: nn.Module, batch: dict) -> dict:
    answer = model(**batch)
    return {"loss": answer.loss, "outputs": answer.logits, "targets": batch["labels"]}


if __name__ == "__main__":
    trainer = mh.Trainer(
        model=network,
        step=step,
        optimizer=lambda params: AdamW(params, lr=2e-3),
        data=mh.Data(train=parts["train"], validation=parts["test"], batch_size=32),
        metrics={"accuracy": MulticlassAccuracy(num_classes=2, average="micro")},
    )
    trainer.fit("3 epochs")
