"""Weights to begin with: what may differ is listed and allowed by name, what is frozen or slow by pattern."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.last.weight = self.words.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.words(inputs))


def trainer(tmp_path: Path, model: Any = Net, **words: Any) -> mh.Trainer:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    words.setdefault("optimizer", lambda params: torch.optim.SGD(params, lr=0.1))
    data = mh.Data(TensorDataset(inputs, torch.arange(24) % 3), batch_size=8)
    return mh.Trainer(model=model, loss=nn.CrossEntropyLoss(), data=data, run_dir=tmp_path / "run", **words)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return {name: each.clone() for name, each in Net().state_dict().items()}


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor], names: list[str]) -> bool:
    return all(torch.equal(found[name], wanted[name]) for name in names)


def test_state_dict_file_and_folder_of_shards_give_the_same(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, tmp_path / "one.safetensors")
    torch.save({"state_dict": weights}, tmp_path / "one.pt")
    folder, names = tmp_path / "shards", sorted(weights)
    folder.mkdir()
    files = {name: f"model-{number % 4 + 1:05d}-of-00004.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for source in (weights, tmp_path / "one.safetensors", str(tmp_path / "one.pt"), folder, mh.InitFrom(folder)):
        assert equal(trainer(tmp_path, init_from=source).model.state_dict(), weights, names)


def test_what_differs_is_listed_all_at_once(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    other = {**weights, "head.weight": torch.zeros(7, 8), "old.scale": torch.ones(1)}
    del other["body.0.bias"]
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, init_from=other)
    for part in ("not there: body.0.bias", "not in this model: old.scale", "(7, 8) there, and (3, 8) in this model"):
        assert part in caught.value.what


def test_new_head_other_names_and_leftovers_are_taken_where_they_are_named(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    other = {f"encoder.{name}": each for name, each in weights.items() if name.startswith("body")}
    other |= {"pooler.weight": torch.ones(3), "head.weight": torch.zeros(9, 8)}
    init = mh.InitFrom(other, rename={"encoder.": ""}, missing=["head.*"], extra=["pooler.*"])
    made = trainer(tmp_path, model=lambda: Net(5), init_from=init)
    fresh = trainer(tmp_path, model=lambda: Net(5))
    body = [name for name in weights if name.startswith("body")]
    assert equal(made.model.state_dict(), weights, body)
    assert equal(made.model.state_dict(), fresh.model.state_dict(), ["head.weight", "head.bias"])
    [note] = [note for note in made.world.notes if "init_from" in note]
    assert "4 of the model's 6" in note
    assert "as made: head.bias, head.weight" in note
    assert "pooler.weight" in note


def test_tensor_of_two_names_may_be_there_once(tmp_path: Path) -> None:
    wanted = torch.randn(5, 4)
    made = trainer(tmp_path, model=Tied, init_from={"words.weight": wanted})
    assert torch.equal(made.model.get_parameter("last.weight"), wanted)


def test_frozen_parameters_stay_and_patterns_choose_rates(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    init = mh.InitFrom(weights, freeze=["body.0.*"])
    rates = {"body": {"lr": 0.0}, "head": {"lr": 0.1}}
    made = trainer(tmp_path, init_from=init, optimizer=lambda params: torch.optim.SGD(mh.groups(params, rates), lr=1.0))
    made.fit("3 steps")
    found = made.model.state_dict()
    assert equal(found, weights, [name for name in weights if name.startswith("body")])
    assert not torch.equal(found["head.weight"], weights["head.weight"])
    assert [len(group["params"]) for group in made.components.optimizer.param_groups] == [2, 2]


def test_patterns_that_fit_nothing_are_refused(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"no parameter matches 'boddy\.\*'"):
        trainer(tmp_path, init_from=mh.InitFrom(weights, freeze=["boddy.*"]))
    with pytest.raises(ConfigError, match="freeze is a word"):
        mh.InitFrom(weights, freeze="body.*")


def test_two_names_that_become_one_are_refused(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    doubled = {f"{way}.{name}": each for way in ("q", "k") for name, each in weights.items()}
    init = mh.InitFrom(doubled, rename={"q.": "", "k.": ""})
    with pytest.raises(ConfigError, match=r"rename makes .* of both q"):
        trainer(tmp_path, init_from=init)


def test_two_tensors_for_one_are_refused(tmp_path: Path) -> None:
    given = {"words.weight": torch.zeros(5, 4), "last.weight": torch.ones(5, 4)}
    with pytest.raises(ConfigError, match=r"words\.weight and last\.weight are one tensor in this model") as told:
        trainer(tmp_path, Tied, init_from=mh.InitFrom(given))
    assert 'rename={"last.weight": "unused.last.weight"}' in told.value.fix
    taken = mh.InitFrom(given, rename={"last.weight": "unused.last.weight"}, extra=["unused.*"])
    made = trainer(tmp_path, Tied, init_from=taken)
    assert not made.model.last.weight.any()  # type: ignore[union-attr]


def test_name_of_a_part_that_matches_nothing_is_said_to_be_none(tmp_path: Path) -> None:
    given = {"words.weight": torch.zeros(5, 4)}
    with pytest.raises(ConfigError, match=r"'head' of mh\.InitFrom matches nothing: of a part write head\.\*"):
        trainer(tmp_path, init_from=mh.InitFrom(given, missing=["head"]))


def test_head_that_fits_is_taken_and_said_although_it_may_be_missing(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    made = trainer(tmp_path, init_from=mh.InitFrom(weights, missing=["head.*"]))
    [note] = [note for note in made.world.notes if "init_from" in note]
    assert f"{len(weights)} of the model's {len(weights)} tensors are from there; head.bias, head.weight, which" in note
    assert torch.equal(made.model.head.weight, weights["head.weight"])
    as_made = mh.InitFrom(weights, missing=["head.*"], rename={"head.": "old."}, extra=["old.*"])
    assert not torch.equal(trainer(tmp_path, init_from=as_made).model.head.weight, weights["head.weight"])
