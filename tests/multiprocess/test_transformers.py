"""A model of transformers, as it comes, is trained in parts over the workers as it is where each has all of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.strategies.materialise import materialise, places_of

pytestmark = pytest.mark.multiprocess

CHARACTERS, LENGTH = 48, 12


def gpt2() -> nn.Module:
    """With random weights; its embedding is its last layer, too."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 16, "n_positions": LENGTH}
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=CHARACTERS, bos_token_id=0, eos_token_id=0, **sizes, **dropped))


def bert() -> nn.Module:
    """A classifier with buffers that only its own library knows the values of."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=CHARACTERS, max_position_embeddings=LENGTH, **sizes))


@pytest.mark.parametrize("make", [gpt2, bert])
def test_model_made_on_meta_has_the_first_values_of_its_library(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shapes and buffers, and weights of the same spread; twice the same ones."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # and taken back
    expected = make().state_dict() | dict(make().named_buffers())
    found = []
    for _ in range(2):
        with torch.device("meta"):
            model = make()
        torch.manual_seed(3)
        materialise(model.modules(), places_of(model))
        found.append(model.state_dict() | dict(model.named_buffers()))
    assert found[0].keys() == expected.keys()
    for name, value in expected.items():
        own = found[0][name]
        assert torch.equal(own, found[1][name]), name
        if value.is_floating_point() and value.numel() > 100 and float(value.std()):
            assert float(own.std()) == pytest.approx(float(value.std()), rel=0.3), name
        elif not value.is_floating_point() or not float(value.std(correction=0)):
            assert torch.equal(own, value), name


def step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The loss that the model computes itself: the mean over the next tokens."""
    loss: Tensor = model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
    return loss


def train(rank: int, run_dir: Path, ways: list[dict[str, Any]]) -> list[tuple[float, dict[str, Any] | None]]:
    """The last validation, and on the leader the best model's tensors, for each way to train."""
    found = []
    texts = torch.randint(0, CHARACTERS, (30, LENGTH), generator=torch.Generator().manual_seed(1))
    for number, settings in enumerate(ways):
        trainer = mh.Trainer(
            model=gpt2,
            step=step,
            weight="samples",
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            data=mh.Data(train=TensorDataset(texts), validation=TensorDataset(texts[:7]), batch_size=8),
            run_dir=run_dir / str(number),
            **settings,
        )
        result = trainer.fit("3 epochs")
        snapshot = mh.load(run_dir / str(number) / "best") if rank == 0 else None
        found.append((result.validation["loss"], snapshot))
    return found


def test_gpt2_in_parts_equals_whole_ones(tmp_path: Path) -> None:
    ways: list[dict[str, Any]] = [
        {"strategy": "ddp"},
        {"strategy": "fsdp"},
        {"strategy": "fsdp", "activation_checkpointing": "blocks"},
        {"strategy": mh.FSDP(units="GPT2Block", zero=2), "micro_batch_size": 3},
    ]
    results = run_ranks(2, train, tmp_path, ways, timeout_s=240)
    assert [loss for loss, _ in results[0]] == [loss for loss, _ in results[1]]
    (whole_loss, whole), *parts = results[0]
    assert whole is not None
    for loss, tensors in parts:
        assert loss == pytest.approx(whole_loss, rel=1e-5)
        assert tensors is not None
        assert tensors.keys() == whole.keys()
        for name, value in tensors.items():
            torch.testing.assert_close(
                value, whole[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
    assert parts[0][0] == parts[1][0], "computed again, and no bit differs"
    assert all(torch.equal(value, parts[1][1][name]) for name, value in parts[0][1].items())  # type: ignore[index,union-attr]
