"""Train a small convolutional network on handwritten digits: `manyhosts run --workers 2 examples/digits.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import manyhosts as mh

EPOCHS, BATCH = 30, 32


def block(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def convnet() -> nn.Module:
    return nn.Sequential(block(1, 32), block(32, 64), nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


digits = load_digits()  # 1,797 real digits of 8 x 8 pixels, inside scikit-learn's package
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, validation, test = (TensorDataset(images[part], labels[part]) for part in order.split([1197, 300, 300]))

trainer = mh.Trainer(
    model=convnet,  # made under the seed of the run, so that two runs are equal
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.05),
    schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train) // BATCH),
    data=mh.Data(train=train, validation=validation, test=test, batch_size=BATCH),
    metrics={"accuracy": MulticlassAccuracy(num_classes=10, average="micro")},
    early_stopping=mh.EarlyStopping("accuracy", mode="max", patience=10),
)
trainer.fit(f"{EPOCHS} epochs")
trainer.test()
