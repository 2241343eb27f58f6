"""Runs of a pipeline: resumed by others and on other numbers of workers, killed, failed by a script, refused."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
from commands import summary
from launching import run
from ranks import run_ranks
from sharded import Case, Model, both, make_trainer, samples, script, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError

pytestmark = pytest.mark.multiprocess
CASE = Case(strategy="pipeline", optimizer="AdamW", block={"dropout": 0.2}, trainer={"micro_batch_size": 4})
STAGES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (3, {"options": {"schedule": "gpipe", "cuts": "layers"}}),
    (1, {"strategy": "ddp"}),
    (4, {}),
    (2, {"strategy": "ddp"}),
    (2, {"strategy": "fsdp"}),
    (3, {}),
]
"""Workers and strategy of one after the other, each two steps on from where the one before it ended."""
EQUAL = 5
"""Of these, the first that together have the bits of one process."""


def test_one_run_passes_through_strategies_and_numbers_of_workers(tmp_path: Path) -> None:
    whole = trained(1, {"whole": replace(CASE, steps=2 * EQUAL)}, tmp_path)["whole"]
    before = ""
    for number, (workers, changes) in enumerate(STAGES, start=1):
        case = replace(CASE, **changes)
        found = run_ranks(workers, both, case, 2 * number - 2, tmp_path / "run")
        assert all(each == found[0] for each in found)
        assert found[0][0] == before or not before, "what was taken up is not what was left, bit for bit"
        before = found[0][1]
        if number == EQUAL:
            assert before == whole.sha


def test_a_killed_stage_is_replaced_and_the_run_goes_on_to_the_bits_of_one_process(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole", script("pass"), "--workers", "1", "--set", "threads=1")
    assert whole.code == 0, whole.err
    once = "if not os.path.exists('killed'): open('killed', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    killed = run(tmp_path / "killed", script(once), "--workers", "2", "--restarts", "1", "--set", "threads=1")
    assert killed.code == 0, killed.err
    assert summary(killed.run_dir)["restarts"] == 1
    assert summary(killed.run_dir)["weights_sha256"] == summary(whole.run_dir)["weights_sha256"]
    reported = sharded.said(killed.run_dir)
    assert "if a worker is lost, all end (there is one copy of the model); --restarts N continues" in reported
    assert "the stages waited" in reported


def test_an_error_of_one_stage_is_shown_once_and_ends_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, script("raise ValueError('not this one')"), "--workers", "2")
    assert ended.code == 1
    assert ended.err.count("Traceback (most recent call last)") == 1, ended.err
    assert "ValueError: not this one" in ended.err


def use(rank: int, folder: Path) -> tuple[str, list[list[float]]]:
    """Saves, and what is said where the model is called alone, and what all are told together."""
    trainer, words = make_trainer(CASE, folder / "run"), samples(7, 3).tensors[0]
    trainer.fit("3 steps")
    trainer.save(folder / "weights.pt", weights="last")
    said = ""
    try:
        trainer.model(words)
    except ConfigError as error:
        said = error.what
    together = trainer.predict(TensorDataset(words), forward=lambda model, batch: model(batch[0]), weights="last")
    return said, together.tolist()


def test_what_is_saved_is_whole_and_all_predict_as_one_does(tmp_path: Path) -> None:
    found = run_ranks(3, use, tmp_path)
    last, saved = mh.load(tmp_path / "run", weights="last"), torch.load(tmp_path / "weights.pt", weights_only=True)
    assert {name: each.shape for name, each in last.items()} == {
        name: each.shape for name, each in Model().state_dict().items()
    }
    for name, each in last.items():
        assert torch.equal(each, saved[name]), name
    model = Model()
    model.load_state_dict(dict(last))
    expected = model.eval()(samples(7, 3).tensors[0])
    for said, predicted in found:
        assert "the model is called by the script itself" in said
        torch.testing.assert_close(torch.tensor(predicted), expected, rtol=1e-5, atol=1e-5)


class Forks(nn.Module):
    """Gives each block what the first one gave, too."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.first, self.late = nn.Embedding(11, 4), late
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 11)

    def forward(self, words: Tensor) -> Tensor:
        begin = hidden = self.first(words)
        for block in self.blocks:
            hidden = block(hidden) if self.late else block(hidden) + begin
        out: Tensor = self.last(hidden + begin)
        return out


class Alone(nn.Module):
    """No chain."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(11, 11), nn.Linear(11, 11)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(words))
        return out


def counting_step(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def short() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 11))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no chain": ({"model": Alone}, "is a Alone, which is no nn.Sequential and has no nn.ModuleList"),
    "more stages than blocks": ({"model": short}, "there are 2 stages, and the model has 1"),
    "more virtual stages than blocks": (
        {"model": short, "strategy": mh.Pipeline(schedule="interleaved")},
        "there are 4 stages, and the model has 1",
    ),
    "a trunk interleaved": ({"strategy": mh.Pipeline(schedule="interleaved")}, "are interleaved share a worker"),
    "a cut of nothing": ({"strategy": mh.Pipeline(cuts=["blocks.9"])}, "'blocks.9' is no block with which a stage"),
    "too many cuts": ({"strategy": mh.Pipeline(cuts="blocks.1,blocks.2")}, "and 2 stages take 1"),
    "something between blocks": ({"model": Forks}, "is not given what the one before it gives"),
    "something kept for the end": ({"model": lambda: Forks(late=True)}, "stage"),
    "a step": ({"step": counting_step, "loss": None}, "step= computes model and loss in one"),
    "virtual workers": ({"virtual_workers": 2}, "which virtual workers never do"),
    "fp16": ({"precision": "fp16"}, "whose scale only the last stage"),
    "compile": ({"compile": True}, "compile is asked for"),
    "checkpoints": ({"activation_checkpointing": "blocks"}, "activation_checkpointing is asked for"),
}


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def answer(rank: int, name: str, folder: Path) -> str:
    changes, _ = REFUSED[name]
    given = {"model": Model, "strategy": "pipeline", "loss": nn.CrossEntropyLoss(), "optimizer": plain_sgd, **changes}
    given = {key: each for key, each in given.items() if each is not None}
    try:
        mh.Trainer(data=mh.Data(train=samples(8, 1), batch_size=4), run_dir=folder, **given)
    except ConfigError as error:
        return error.what
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_before_the_first_step(name: str, tmp_path: Path) -> None:
    _, sentence = REFUSED[name]
    with pytest.raises(AssertionError) if name in _ONE_SAYS else _all_say() as found:
        reported = run_ranks(2, loud if name in _ONE_SAYS else answer, name, tmp_path)
        assert all(sentence in each for each in reported), reported
    if name in _ONE_SAYS:
        assert sentence in str(found.value), found.value  # type: ignore[union-attr]


_ONE_SAYS = ("something between blocks", "something kept for the end")
"""What rank 0 finds when it looks, and the launcher ends the others."""


class _all_say:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def loud(rank: int, name: str, folder: Path) -> str:
    if what := answer(rank, name, folder):
        raise ValueError(what)
    return what


class Sleeping(nn.Linear):
    """A layer whose backward pass takes long."""

    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        if made.requires_grad:
            made.register_hook(lambda gradient: time.sleep(0.1))
        return made


def waits(rank: int, folder: Path) -> None:
    made = mh.Trainer(
        model=lambda: nn.Sequential(Sleeping(4, 4), Sleeping(4, 4)), loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=mh.Data(train=TensorDataset(torch.ones(9, 4), torch.ones(9, 4)), batch_size=2), micro_batch_size=1,
        strategy=mh.Pipeline(schedule="gpipe", cuts="layers"), run_dir=folder,
    )  # fmt: skip
    made.fit("3 steps")


def test_a_stage_that_is_through_waits_for_the_last_one(tmp_path: Path) -> None:
    """Two backward passes of 0.1 s on each stage, and forward passes of nothing: each waits a third of the time. The
    first stage does so before its backward passes, the second one behind them."""
    run_ranks(2, waits, tmp_path)
    [first, second, expected] = [
        float(each) for each in re.findall(r"([\d.]+) %", sharded.said(tmp_path).partition("the stages waited")[2])[:3]
    ]
    assert expected == 33.3
    assert first > 30
    assert second > 30
