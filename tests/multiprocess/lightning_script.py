"""A script as users of Lightning write it, and nothing in it knows of manyhosts. Prints the weights' hash."""

import hashlib
import sys

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        inputs, targets = batch
        accuracy = (self.layers(inputs).argmax(1) == targets).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    lightning.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    dataset = TensorDataset(images[:480], torch.tensor(digits.target[:480]))
    validation = TensorDataset(images[480:600], torch.tensor(digits.target[480:600]))
    model = Digits()
    trainer = lightning.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(model, DataLoader(dataset, batch_size=16, shuffle=True), DataLoader(validation, batch_size=60))
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()
    print(f"rank {trainer.global_rank} of {trainer.world_size} on {model.device.type}: {digest}")
    if trainer.is_global_zero:
        torch.save(state, sys.argv[1])


if __name__ == "__main__":
    main()
