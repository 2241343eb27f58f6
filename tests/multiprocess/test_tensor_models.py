"""Models of many shapes, cut over workers: how they are cut, and that they train as in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import step_lines
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.config.overrides import to_environment

pytestmark = pytest.mark.multiprocess
WORDS, LENGTH, WIDTH = 11, 6, 8


class Attention(nn.Module):
    """As models write it: `split` says how features become heads."""

    def __init__(self, split: str, *, heads: int = 4, own_heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.split, self.heads, self.of_head = split, heads, WIDTH // heads
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, self.of_head * own_heads) for _ in range(2))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, self.of_head))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        texts, length, _ = hidden.shape
        shape = (texts, length, self.heads if self.split == "number" else -1, self.of_head)
        query, key, value = (
            layer(hidden).view(shape if layer is self.query or self.split == "number" else (*shape[:2], -1, shape[3]))
            for layer in (self.query, self.key, self.value)
        )
        query, key, value = (each.transpose(1, 2) for each in (query * self.scale, key, value))
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        shares = self.dropout((query @ key.transpose(2, 3) / self.of_head**0.5).softmax(-1))
        if self.split == "functional":
            shares = functional.dropout(shares, 0.2, self.training)
        out: Tensor = self.out((shares @ value).transpose(1, 2).flatten(2))
        return hidden + out


class Fused(nn.Module):
    """Queries, keys and values in one layer; PyTorch's own attention beside it; a matrix used without its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.used = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.all(hidden).view(*hidden.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        out: Tensor = hidden @ self.used.weight
        return out


class Gated(nn.Module):
    """Two columns and a row, dropout on parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 14), nn.Linear(WIDTH, 14, bias=False)
        self.down, self.dropout = nn.Linear(14, WIDTH), nn.Dropout(0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        given = self.norm(hidden)
        out: Tensor = self.down(self.dropout(functional.silu(self.gate(given)) * self.up(given)))
        return hidden + out


class Mixed(nn.Module):
    """Features are mixed between two layers, one of which is called twice; another is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Linear(16, WIDTH)
        self.twice, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.second(torch.tanh(self.norm(self.first(hidden))))
        out: Tensor = self.frozen(torch.relu_(self.twice(torch.tanh(self.twice(hidden)))))
        return out


class Text(nn.Module):
    """Embeddings with a padding word, blocks, and a head."""

    def __init__(self, *blocks: nn.Module, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=7), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(self.norm(hidden))
        return out.transpose(1, 2)


SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 14,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}
"""Of the models of `transformers`."""


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False, attention_dropout=0.0)
    return LlamaForCausalLM(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**SIZES)
    return BertForMaskedLM(config)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "heads by -1": (lambda: Text(Attention("rest", dropout=0.2)), "1 vocabulary, 3 column, 1 row, 1 gathered"),
    "heads by number": (lambda: Text(Attention("number")), "1 vocabulary, 3 column, 1 row, 1 gathered"),
    "grouped heads": (lambda: Text(Attention("rest", own_heads=2)), "1 vocabulary, 3 column, 1 row, 1 gathered"),
    "one head for keys": (lambda: Text(Attention("rest", own_heads=1)), "1 vocabulary, 5 gathered"),
    "drawn between": (lambda: Text(Attention("functional")), "1 vocabulary, 5 gathered"),
    "fused": (lambda: Text(Fused(), tied=True), "1 vocabulary, 3 gathered"),
    "gated": (lambda: Text(Gated(), Gated()), "1 vocabulary, 4 column, 2 row, 1 gathered"),
    "mixed": (lambda: Text(Mixed(), Gated()), "1 vocabulary, 2 column, 1 row, 5 gathered"),
    "encoder": (lambda: Text(encoder()), "1 vocabulary, 1 gathered"),
    "llama": (llama, "1 vocabulary, 10 column, 4 row, 1 gathered"),
    "bert": (bert, ""),
}
"""With how two workers cut it."""


def samples(count: int, seed: int) -> TensorDataset:
    words = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(words, (words * 3 + 1) % WORDS)


def loss(outputs: Any, targets: Tensor) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits.transpose(1, 2)
    return functional.cross_entropy(logits, targets)


def fit(rank: int, names: list[str], strategy: str, folder: Path) -> dict[str, list[Any]]:
    """Of each model: norms, losses, validation, predictions, weights, and the notes."""
    found = {}
    for name in names:
        trainer = mh.Trainer(
            model=MODELS[name][0],
            loss=loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            data=mh.Data(train=samples(11, 1), validation=samples(7, 2), batch_size=4),
            strategy=strategy,
            run_dir=folder / name,
            clip_gradients=1e9,
        )
        result = trainer.fit("5 steps")
        lines = step_lines(folder / name)
        notes = [
            line for line in (folder / name / "metrics.jsonl").read_text().splitlines() if "tensor parallel" in line
        ]
        numbers = [*(line["gradient_norm"] for line in lines), *(line["loss"] for line in lines)]
        found[name] = [numbers, result.validation["loss"], notes]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("alone")
    return run_ranks(1, fit, list(MODELS), "ddp", folder, timeout_s=120)[0], folder


@pytest.mark.parametrize("workers", [2, *(pytest.param(workers, marks=pytest.mark.slow) for workers in (3, 4))])
def test_models_train_as_in_one_process(workers: int, alone: Any, tmp_path: Path) -> None:
    wanted, folder = alone
    for found in run_ranks(workers, fit, list(MODELS), "tensor", tmp_path, timeout_s=300):
        for name, (numbers, validation, notes) in found.items():
            assert numbers == pytest.approx(wanted[name][0], rel=1e-5), name
            assert validation == pytest.approx(wanted[name][1], rel=1e-5), name
            if workers == 2:
                assert MODELS[name][1] in notes[0], name
    for name in MODELS:
        whole, cut = (mh.load(where / name, weights="last") for where in (folder, tmp_path))
        assert whole.keys() == cut.keys()
        for key, weight in whole.items():
            torch.testing.assert_close(
                cut[key], weight, rtol=1e-5, atol=1e-6, msg=lambda text, n=f"{name} {key}": f"{n}: {text}"
            )


def fit_as_set(rank: int, names: list[str], sets: dict[str, str], folder: Path) -> dict[str, list[Any]]:
    """The same of a script that knows nothing of it, with what `--set` gives."""
    os.environ.update(to_environment(sets))
    return fit(rank, names, "ddp", folder)


def test_a_model_of_transformers_in_parts_of_cut_layers_trains_as_in_one_process(tmp_path: Path) -> None:
    [wanted] = run_ranks(1, fit, ["llama"], "ddp", tmp_path / "alone", timeout_s=120)
    sets = {"strategy": "fsdp+tensor", "mesh.shard": "2", "mesh.tensor": "2"}
    for found in run_ranks(4, fit_as_set, ["llama"], sets, tmp_path / "parts", timeout_s=300):
        numbers, validation, notes = found["llama"]
        assert numbers == pytest.approx(wanted["llama"][0], rel=1e-5)
        assert validation == pytest.approx(wanted["llama"][1], rel=1e-5)
        assert MODELS["llama"][1] in notes[0]
