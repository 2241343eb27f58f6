"""Weights in fewer bits: models that read a layer's weight by name, share it, or hand it on, compute with it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from manyhosts.export.formats import narrow


class Reading(nn.Module):
    """Reads the weight of one layer that it does not call, and shares that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.last = nn.Embedding(9, 8), nn.Embedding(5, 8), nn.Linear(8, 9, bias=False)
        self.last.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.last(self.words(text) + self.places.weight[: text.shape[1]])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.attention(inputs, inputs, inputs)[0]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("model", "inputs"), [(Reading(), torch.arange(10).view(2, 5) % 9), (Attending(), torch.randn(2, 3, 8))]
)
def test_model_with_narrow_weights_answers_nearly_alike(model: nn.Module, inputs: Tensor, precision: str) -> None:
    narrowed = narrow(copy.deepcopy(model), precision)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        wanted, found = model(inputs), narrowed(inputs)
        assert not torch.equal(found, wanted)
        torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.1)
        program = torch.export.export(narrowed.eval(), (inputs,), dynamic_shapes=({0: batch},), strict=False).module()
        torch.testing.assert_close(program(inputs), found)
    kept = [each.dtype for name, each in narrowed.state_dict().items() if name.endswith("kept")]
    assert set(kept) == {{"bf16": torch.bfloat16, "int8": torch.int8}[precision]}
