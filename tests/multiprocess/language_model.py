"""Trains a small language model, and writes what one worker holds: by PyTorch's profiler, and by the tensors alive."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

import manyhosts as mh

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is started as a script is
from small_language_model import language_model, next_words

VOCABULARY, LENGTH, SEQUENCES = 256, 48, 64


def bytes_of(tensors) -> int:
    """Of memory that is there once."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


made, held = [], {}


def step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean loss of the next tokens; notes what is held then."""
    if made[0].state:  # the second step, and later ones: everything is there
        held["optimizer"] = bytes_of(value for state in made[0].state.values() for value in state.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss = next_words(model, batch)
    held["activations"] = max(held.get("activations", 0), sum(each.self_cpu_memory_usage for each in seen.events()))
    held["parameters"] = bytes_of(model.parameters())
    return loss


class Optimizer(torch.optim.AdamW):
    """Notes the gradients that it is given."""

    def step(self, *arguments, **named):
        held["gradients"] = bytes_of(each.grad for group in self.param_groups for each in group["params"])
        return super().step(*arguments, **named)


def optimizer(parameters) -> Optimizer:
    """The optimizer, known to `step`."""
    made.append(Optimizer(parameters, lr=1e-3))
    return made[0]


if __name__ == "__main__":
    text = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    trainer = mh.Trainer(
        model=lambda: language_model(VOCABULARY, width=64, blocks=3),
        step=step,
        optimizer=optimizer,
        data=mh.Data(train=TensorDataset(text[:, :-1].clone(), text[:, 1:].clone()), batch_size=16),
        weight="samples",
    )
    trainer.fit("3 steps")
    if folder := os.environ.get("HELD"):
        Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(held))
