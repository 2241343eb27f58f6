"""Train a small convolutional network on handwritten digits: `manyhands run --workers 2 examples/digits.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import manyhands as mh

EPOCHS, STEPS_PER_EPOCH = 20, 19


def block(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


digits = load_digits()  # 1,797 real digits of 8 x 8 pixels, inside scikit-learn's package
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, validation, test = (TensorDataset(images[part], labels[part]) for part in order.split([1197, 300, 300]))

trainer = mh.Trainer(
    model=nn.Sequential(block(1, 32), block(32, 64), nn.Flatten(), nn.Linear(64 * 2 * 2, 10)),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.05),
    schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * STEPS_PER_EPOCH),
    data=mh.Data(train=train, validation=validation, test=test, batch_size=64),
    metrics={"accuracy": MulticlassAccuracy(num_classes=10, average="micro")},
    early_stopping=mh.EarlyStopping("accuracy", mode="max", patience=5),
)
trainer.fit(f"{EPOCHS} epochs")
trainer.test()
