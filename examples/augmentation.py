"""Random augmentation: the same numbers for a sample on any number of workers and loaders, and after a resume."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import manyhosts as mh


class Shifted(Dataset):
    """Digits moved by up to one pixel in each direction, with a little noise: another picture in each epoch."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = nn.functional.pad(images, (1, 1, 1, 1))
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(0, 3, (2,)).tolist()  # seeded by (seed, epoch, index) before each sample
        image = self.images[index, :, down : down + 8, right : right + 8]
        return image + 0.05 * torch.randn_like(image), self.labels[index]


digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, validation = order.split([1497, 300])

trainer = mh.Trainer(
    model=lambda: nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10)
    ),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    data=mh.Data(
        train=Shifted(images[train], labels[train]),
        validation=TensorDataset(images[validation], labels[validation]),
        batch_size=64,
        loader_workers=2,
    ),
    metrics={"accuracy": MulticlassAccuracy(num_classes=10, average="micro")},
)
trainer.fit("5 epochs")
