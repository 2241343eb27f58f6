"""A small GPT in a loop of one's own: texts of any length, a mean over characters, decay for matrices alone.

manyhosts run --workers 2 examples/own_loop.py
"""

import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from torch import nn
from torch.nn.functional import cross_entropy

import manyhosts as mh

CONTEXT, WIDTH = 96, 64


class GPT(nn.Module):
    """Characters, shape (texts, length), to logits of the next one, shape (texts, length, characters)."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, characters, bias=False)
        self.last.weight = self.characters.weight

    def forward(self, text):
        length = text.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.characters(text) + self.places.weight[:length]
        return self.last(self.blocks(x, mask=later, is_causal=True))


def padded(texts):
    """A batch of texts: what is read, and what comes next, which is -100 after a text's end."""
    read = nn.utils.rnn.pad_sequence([text[:-1] for text in texts], batch_first=True)
    return read, nn.utils.rnn.pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=-100)


def of_characters(models, batch):
    """The mean over the characters of a batch, and how many there are: `count` makes it the mean over all workers."""
    read, following = batch
    loss = cross_entropy(models["gpt"](read).transpose(1, 2), following, ignore_index=-100)
    return {"loss": loss, "count": (following != -100).sum()}


def step(run):
    """One step."""
    values = run.backward(lambda batch: of_characters(run.models, batch))
    run.log(gradient_norm=run.update(clip=1.0), perplexity=values["loss"].exp())


def optimizer(params):
    """AdamW, with decay for matrices alone."""
    groups = [[each for each in params if (each.dim() > 1) is matrix] for matrix in (True, False)]
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], 3e-3
    )


sets = (load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine)
lines = [line[:CONTEXT] for each in sets for line in each().DESCR.splitlines() if len(line) > 1]
alphabet = {character: number for number, character in enumerate(sorted(set("".join(lines))))}
texts = [torch.tensor([alphabet[character] for character in line]) for line in lines]

run = mh.Run(
    models={"gpt": lambda: GPT(len(alphabet))},
    optimizers=optimizer,
    schedulers={"gpt": lambda made: torch.optim.lr_scheduler.CosineAnnealingLR(made, 60)},
    data=mh.Data(train=texts[30:], validation=texts[:30], batch_size=32, collate=padded),
    evaluate=of_characters,
    virtual_workers=6,
)

if __name__ == "__main__":
    run.fit(step, "60 steps")
