"""Which modules are compiled."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhosts.model import activation_checkpointing
from manyhosts.model.activation_checkpointing import checkpoint_blocks, compile_model


class Block(nn.Module):
    """Several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.inner:
            inputs = layer(inputs)
        return inputs


class Transformer(nn.Module):
    """Layers before and behind a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 8))


def compiled(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the modules that were compiled."""
    found: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: found.append(module))
    compile_model(model)
    return [name for name, module in model.named_modules() if module in found]


def test_repeated_blocks_are_compiled_each_by_itself_and_nothing_inside_or_around_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert compiled(Transformer(), monkeypatch) == ["blocks.0", "blocks.1", "blocks.2"]


def test_model_without_repeated_blocks_is_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), monkeypatch) == [""]
    assert compiled(nn.Sequential(nn.Flatten(), Block()), monkeypatch) == ["1.inner.0", "1.inner.1"]


def test_block_that_is_computed_again_is_compiled_inside_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function: inside.append(function) or function)
    fresh = functools.cache(activation_checkpointing._checkpointed.__wrapped__)
    monkeypatch.setattr(activation_checkpointing, "_checkpointed", fresh)
    model = Transformer()
    checkpoint_blocks(model, 0.5, compiled=True)
    assert compiled(model, monkeypatch) == ["blocks.2"]
    assert inside == [Block.forward], "once for all blocks of a class"
    model = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    checkpoint_blocks(model, "all", compiled=True)
    assert compiled(model, monkeypatch) == [], "what is compiled whole would compile the checkpoint, too"
