"""A script as users of Accelerate write it, and nothing in it knows of manyhosts. Prints the weights' hash."""

import hashlib
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    set_seed(0)
    accelerator = Accelerator()
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    dataset = TensorDataset(images[:480], torch.tensor(digits.target[:480]))
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
    accelerator.wait_for_everyone()
    state = {name: value.cpu() for name, value in accelerator.unwrap_model(model).state_dict().items()}
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()
    print(f"rank {accelerator.process_index} of {accelerator.num_processes} on {accelerator.device.type}: {digest}")
    if accelerator.is_main_process:
        torch.save(state, sys.argv[1])
    accelerator.end_training()


if __name__ == "__main__":
    main()
