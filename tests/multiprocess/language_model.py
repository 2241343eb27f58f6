"""Trains a small language model, and writes what one worker holds: by PyTorch's profiler, and by the tensors alive."""

import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

import manyhosts as mh

VOCABULARY, LENGTH, WIDTH, LAYERS, SEQUENCES = 256, 48, 64, 3, 64


class Block(nn.Module):
    """Attention to what came before, then two layers for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        count, length, _ = tokens.shape
        query, key, value = self.heads(self.before(tokens)).view(count, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.out(mixed.transpose(1, 2).reshape(count, length, WIDTH))
        return tokens + self.inner(self.between(tokens))


def language_model() -> nn.Module:
    """A decoder."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, VOCABULARY),
    )  # fmt: skip


def bytes_of(tensors) -> int:
    """Of memory that is there once."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


made, held = [], {}


def step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean loss of the next tokens; notes what is held then."""
    if made[0].state:  # the second step, and later ones: everything is there
        held["optimizer"] = bytes_of(value for state in made[0].state.values() for value in state.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss = nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
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
        model=language_model,
        step=step,
        optimizer=optimizer,
        data=mh.Data(train=TensorDataset(text[:, :-1].clone(), text[:, 1:].clone()), batch_size=16),
        weight="samples",
    )
    trainer.fit("3 steps")
    if folder := os.environ.get("HELD"):
        Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(held))
