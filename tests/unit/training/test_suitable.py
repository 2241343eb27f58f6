"""Models and optimizers that workers cannot train together as they are: made so, or refused before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import IterableDataset
from unusual import Case, trainer_for

import manyhosts as mh
from manyhosts.data.steps import mapped
from manyhosts.errors import ConfigError


class Lazy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Dropout(0.5), nn.Linear(8, 2))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding((x > 0).long().sum(1) % 4))


def test_lazy_model_is_made_whole_and_trains(tmp_path: Path) -> None:
    trainer = trainer_for(Case(Lazy), tmp_path)
    assert trainer.model[0].weight.shape == (8, 6)
    assert trainer.model[1].num_batches_tracked == 0
    assert trainer.fit("3 steps").steps == 3


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(6), torch.ones(2)


def test_lazy_model_on_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lazy layers"):
        mh.Trainer(
            model=Lazy(),
            loss=nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            data=mh.Data(train=Endless(), batch_size=2),
            run_dir=tmp_path,
        )


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (Case(Embedded), "the embedding 'embedding' gives sparse gradients"),
        (Case(lambda: nn.Linear(6, 2), optimizer=torch.optim.LBFGS), "LBFGS computes the loss several times"),
    ],
    ids=["sparse", "LBFGS"],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(case: Case, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        trainer_for(case, tmp_path, virtual_workers=2)


def test_sparse_embedding_trains_in_one_process(tmp_path: Path) -> None:
    plain_sgd = Case(Embedded, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert trainer_for(plain_sgd, tmp_path).fit("2 steps").steps == 2


def test_momentum_of_sparse_gradients_is_refused(tmp_path: Path) -> None:
    """It trained until the first snapshot."""
    with_momentum = Case(Embedded, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    with pytest.raises(ConfigError, match="'embedding' gives sparse gradients, of which SGD's momentum"):
        trainer_for(with_momentum, tmp_path)


def test_sparse_gradient_of_a_function_is_refused_in_its_step(tmp_path: Path) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.embedding((x > 0).long().sum(1) % 4, self.weight, sparse=True)

    with pytest.raises(ConfigError, match="is sparse, and workers sum dense ones"):
        trainer_for(Case(Functional), tmp_path, virtual_workers=2).fit("1 steps")


def test_packed_sequence_keeps_its_lengths_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(5, 2)], enforce_sorted=False)
    moved = mapped({"x": (packed, torch.ones(2))}, lambda tensor: tensor.to("meta"))["x"][0]
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device.type, moved.sorted_indices.device.type) == ("meta", "meta")
    assert torch.equal(moved.batch_sizes, packed.batch_sizes)


def test_batch_norm_that_sees_micro_batches_is_told(tmp_path: Path) -> None:
    case = Case(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    for size, reported in ((4, 1), (10, 0)):
        trainer_for(case, tmp_path / f"{size}", micro_batch_size=size).fit("1 steps")
        text = (tmp_path / f"{size}" / "metrics.jsonl").read_text()
        assert text.count(f"so micro_batch_size={size} changes the model") == reported
