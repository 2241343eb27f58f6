"""Train a small GPT on text, character by character: `manyhosts run --workers 2 examples/char_lm.py`."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh

CONTEXT, WIDTH, HEADS, LAYERS = 64, 96, 4, 3


class Block(nn.Module):
    """Attention to the characters before, then two layers for each character."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_layers = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        texts, length, _ = x.shape
        of_heads = self.queries_keys_values(self.before_attention(x)).view(texts, length, 3, HEADS, -1)
        query, key, value = of_heads.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.layers(self.before_layers(x)))


class GPT(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, text: Tensor) -> Tensor:  # shape (texts, characters)
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.last(x).transpose(1, 2)  # the class in the second dim, as CrossEntropyLoss wants it


# A text that is on every machine where this runs: the source of manyhosts.
files = sorted(Path(mh.__file__).parent.rglob("*.py"))
text = "".join(file.read_text(encoding="utf-8") for file in files)
alphabet = sorted(set(text))
number_of = {character: number for number, character in enumerate(alphabet)}
numbers = torch.tensor([number_of[character] for character in text])
share = torch.bincount(numbers) / len(numbers)
by_frequency = -float((share * share.log()).sum())  # what one could do who knows only how frequent characters are

count = (len(numbers) - 1) // CONTEXT
inputs, targets = (numbers[first : first + count * CONTEXT].view(count, CONTEXT) for first in (0, 1))
order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
train, validation = (TensorDataset(inputs[part], targets[part]) for part in order.split([count - 200, 200]))

trainer = mh.Trainer(
    model=lambda: GPT(len(alphabet)),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    data=mh.Data(train=train, validation=validation, batch_size=32),
    clip_gradients=1.0,
    warmup="20 steps",
)
loss = trainer.fit("300 steps").validation["loss"]
mh.print(f"nats per character: {loss:.2f}, by the frequency of characters alone {by_frequency:.2f}")
