"""A model with a loss of its own: an autoencoder, whose batches are no (inputs, targets) pairs."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

import manyhosts as mh


class Images(Dataset):
    """Digits without their labels, each as a dictionary: any batch that PyTorch can collate will do."""

    def __init__(self) -> None:
        self.pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 16

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixels": self.pixels[index]}


class Autoencoder(nn.Module):
    """64 pixels through 8 numbers and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encode(pixels)
        return self.decode(code), code


def step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss, and whatever else should be logged: means over the samples of the batch."""
    restored, code = model(batch["pixels"])
    error = nn.functional.mse_loss(restored, batch["pixels"])
    size = code.abs().mean()
    return {"loss": error + 1e-4 * size, "error": error, "size": size}


images = Images()
train, validation = torch.utils.data.random_split(images, [1500, 297], torch.Generator().manual_seed(0))

trainer = mh.Trainer(
    model=Autoencoder,
    step=step,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    data=mh.Data(train=train, validation=validation, batch_size=100),
)
trainer.fit("10 epochs")
