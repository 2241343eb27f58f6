"""What a look could not try is said, in `run.json` too; and looks come again, without a bit of the training changed."""

from __future__ import annotations

import json
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import events, images_and_labels, network, step_lines
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError

CUT = {"micro_batch_size": 4}


def trainer(run_dir: Path, *, data: dict[str, Any] | None = None, **more: Any) -> mh.Trainer:
    arguments: dict[str, Any] = {
        "model": lambda: network(batch_norm=True, dropout=0.2),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05),
        "data": mh.Data(train=TensorDataset(*images_and_labels(40)), **{"batch_size": 10, **(data or {})}),
        "run_dir": run_dir,
    }
    return mh.Trainer(**{**arguments, **more})


def recorded(run_dir: Path) -> dict[str, str]:
    return dict(json.loads((run_dir / "run.json").read_text())["same_answer"])


def mixed_up(model: nn.Module, batch: Any) -> Tensor:
    other = torch.randperm(len(batch[0]))
    return functional.cross_entropy(model(0.7 * batch[0] + 0.3 * batch[0][other]), batch[1])


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


def test_what_could_not_be_tried_is_said_once_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path / "unknown", step=mixed_up, **CUT).fit("12 steps")
    said = "could not be tried, because the forward pass draws torch.randperm"
    assert capsys.readouterr().out.count(said) == 1
    [note] = [line["text"] for line in events(tmp_path / "unknown", "note") if said in line["text"]]
    assert "weight=" in note, "and what to do"
    assert recorded(tmp_path / "unknown") == {"outcome": "not tried", "text": note}
    trainer(tmp_path / "right", loss=entropy, **CUT).fit("12 steps")
    assert recorded(tmp_path / "right") == {"outcome": "mean", "text": ""}
    assert not [line for line in events(tmp_path / "right", "note") if "could not be tried" in line["text"]]


def later(model: nn.Module, batch: Any) -> Tensor:
    """A term that is a sum comes once the model has been trained a while."""
    outputs = model(batch[0])
    return functional.cross_entropy(outputs, batch[1]) + (model.age > 4) * outputs.square().sum()  # type: ignore[operator]


class Ages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("age", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_term_that_comes_later_is_found_by_a_later_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Ages()
    made = trainer(tmp_path / "looks", model=model, step=later, optimizer=Aging(model), **CUT)
    with pytest.raises(ConfigError, match="the loss is no mean over the samples"):
        made.fit("20 steps")
    assert len(step_lines(tmp_path / "looks")) == 9, "the tenth step is looked at"
    monkeypatch.setenv("MANYHOSTS_SET", '{"look_every": "0"}')
    model = Ages()
    trainer(tmp_path / "off", model=model, step=later, optimizer=Aging(model), **CUT).fit("20 steps")


class Aging:
    """Makes an optimizer whose steps make the model older."""

    def __init__(self, model: Ages) -> None:
        self.model = model

    def __call__(self, params: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(params, lr=0.01)
        made.register_step_post_hook(lambda *_: self.model.age.add_(1))
        return made


def test_each_resume_looks_again(tmp_path: Path) -> None:
    trainer(tmp_path, loss=entropy, **CUT).fit("2 steps")
    with pytest.raises(ConfigError, match="the loss is no mean over the samples"):
        trainer(tmp_path, loss=lambda outputs, targets: 10 * entropy(outputs, targets) / len(targets), **CUT).fit(
            "4 steps"
        )


def test_looks_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = trainer(tmp_path / "looks", loss=entropy, **CUT).fit("12 steps")
    monkeypatch.setenv("MANYHOSTS_SET", '{"look_every": "0"}')
    never = trainer(tmp_path / "never", loss=entropy, **CUT).fit("12 steps")
    assert looked.weights_sha256 == never.weights_sha256


def complete(samples: list[Any]) -> Any:
    """Leaves out what has label 3, as loaders of damaged files do."""
    kept = [each for each in samples if int(each[1]) != 3] or samples[:1]
    return torch.utils.data.default_collate(kept)


def complete_values(samples: list[Any]) -> Any:
    images, labels = complete(samples)
    return images, labels.float()


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs[:, 0], targets)


def test_collate_that_leaves_samples_out_is_refused_or_counted_by_what_is_left(tmp_path: Path) -> None:
    trainer(tmp_path / "labels", loss=entropy, data={"collate": complete}, **CUT).fit("1 epoch")
    assert any("mean over labels" in line["text"] for line in events(tmp_path / "labels", "note"))
    data = {"collate": complete_values, "shuffle": False}
    with pytest.raises(ConfigError, match=r"no mean over the samples|has \d rows"):
        trainer(tmp_path / "values", loss=squares, data=data, **CUT).fit("1 epoch")


def twice(samples: list[Any]) -> Any:
    images, labels = torch.utils.data.default_collate(samples)
    return torch.cat([images, images.flip(-1)]), labels.repeat(2)


def test_collate_that_gives_each_sample_as_many_rows_is_right(tmp_path: Path) -> None:
    trainer(tmp_path, loss=entropy, data={"collate": twice}, **CUT).fit("1 epoch")


@pytest.mark.parametrize("right", [True, False])
def test_pieces_of_one_sample_are_looked_at_together(right: bool, tmp_path: Path) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return entropy(outputs, targets) if right else 0 * entropy(outputs, targets) + outputs.sum()

    made = trainer(tmp_path, loss=loss, model=network, micro_batch_size=1)
    if right:
        made.fit("1 step")
    else:
        with pytest.raises(ConfigError, match="the loss is no mean over the samples"):
            made.fit("1 step")


def encoded(samples: list[Any]) -> Any:
    """As tokenizers give it: a mapping that is no dict, some of whose labels do not count."""
    images, labels = torch.utils.data.default_collate(samples)
    labels = labels.clone()
    labels[labels % 3 == 0] = -100
    return UserDict(images=images, labels=labels)


def of_labels(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["images"]), batch["labels"])


def test_labels_that_do_not_count_are_found_in_any_mapping(tmp_path: Path) -> None:
    trainer(tmp_path, step=of_labels, model=network, data={"collate": encoded}, **CUT).fit("1 epoch")
    assert any("a mean over labels that are not -100" in line["text"] for line in events(tmp_path, "note"))
