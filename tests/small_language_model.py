"""A decoder of a few blocks, as small as a test wants it."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention to what came before, then two layers for each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.heads(self.before(tokens)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = tokens + self.inner(self.between(tokens))
        return out


def language_model(words: int, *, width: int, blocks: int) -> nn.Module:
    layers = [Block(width) for _ in range(blocks)]
    return nn.Sequential(nn.Embedding(words, width), *layers, nn.LayerNorm(width), nn.Linear(width, words))


def next_words(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean loss of the next word behind each."""
    loss: Tensor = torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    return loss
