"""A run that is resumed by another script: what changed takes effect, or is refused before the first step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import events, step_lines
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import manyhosts as mh
from manyhosts.errors import ManyhostsError
from manyhosts.events import Note

pytestmark = pytest.mark.multiprocess
SOME_WORKERS = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
STEPS, MORE = 7, 20  # of 40 samples in batches of 12: the resume is in the midst of an epoch

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 30),
    "longer cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 60),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
    "warm-up first": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [5],
    ),
    "by function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "too short": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0),
}


class Stream(IterableDataset[Any]):
    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        return (self.dataset[index] for index in range(40))


class OtherStream(Stream):
    pass


def samples(count: int = 40, seed: int = 5) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def fit(rank: int, run_dir: Path, steps: int, asked: dict[str, Any]) -> dict[str, Any]:
    """One run of a script that is as `asked`: the rates of its optimizer at the end, its weights, what it said."""
    found = {key: asked[key] for key in ("batch", "stream") if key in asked}
    made = samples(asked.get("samples", 40), asked.get("content", 5))
    streams = {None: made, "one": Stream(made), "another": OtherStream(made)}
    data = {"batch_size": found.get("batch", 12), **asked.get("data", {})}
    said: list[str] = []

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups: Any = [{"params": params[:1]}, {"params": params[1:]}] if asked.get("groups") else params
        return getattr(torch.optim, asked.get("optimizer", "SGD"))(groups, **{"lr": 0.05, **asked.get("options", {})})

    trainer = mh.Trainer(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        loss=nn.MSELoss(),
        optimizer=optimizer,
        schedule=SCHEDULES.get(asked.get("schedule", "")),
        data=mh.Data(streams[found.get("stream")], validation=samples(7), **data),
        listeners=[lambda event: said.append(event.text) if isinstance(event, Note) else None],
        run_dir=run_dir,
        **asked.get("trainer", {}),
    )
    try:
        result = trainer.fit(f"{steps} steps")
    except ManyhostsError as error:
        return {"error": str(error), "said": said}
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in trainer.components.optimizer.param_groups]
    return {"weights": weights, "groups": groups, "said": said, "sha": result.weights_sha256, "steps": result.steps}


def gone_on(rank: int, run_dir: Path, first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """One run, and the same resumed as `then` says."""
    done = fit(rank, run_dir, STEPS, first)
    assert "error" not in done, done
    return fit(rank, run_dir, MORE, {**first, **then})


def by_hand(first: dict[str, Any], then: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer as its schedule has it after `MORE` steps under the options of now alone."""
    asked = {**first, **then}
    parameter = nn.Parameter(torch.zeros(1))
    optimizer: torch.optim.Optimizer = getattr(torch.optim, asked.get("optimizer", "SGD"))(
        [parameter], **{"lr": 0.05, **asked.get("options", {})}
    )
    schedule = SCHEDULES[asked["schedule"]](optimizer)
    for _ in range(MORE):
        optimizer.step()
        schedule.step()
    return optimizer


MAY: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rate": ({}, {"options": {"lr": 0.2}}, "lr 0.05 → 0.2"),
    "rate of a cosine": ({"schedule": "cosine"}, {"options": {"lr": 0.2}}, "lr 0.05 → 0.2"),
    "rate behind a warm-up": ({"schedule": "warm-up first"}, {"options": {"lr": 0.2}}, "lr 0.05 → 0.2"),
    "rate by function": ({"schedule": "by function"}, {"options": {"lr": 0.2}}, "lr 0.05 → 0.2"),
    "length of a schedule": ({"schedule": "cosine"}, {"schedule": "longer cosine"}, "T_max of the schedule 30 → 60"),
    "kind of schedule": ({"schedule": "cosine"}, {"schedule": "one cycle"}, "CosineAnnealingLR → OneCycleLR"),
    "a schedule at last": ({}, {"schedule": "cosine"}, "schedule none → CosineAnnealingLR"),
    "no schedule any more": ({"schedule": "cosine"}, {"schedule": ""}, "schedule CosineAnnealingLR → none"),
    "decay": ({}, {"options": {"weight_decay": 0.1, "lr": 0.05}}, "weight_decay 0 → 0.1"),
    "momenta": (
        {"optimizer": "AdamW", "schedule": "cosine"},
        {"options": {"betas": (0.8, 0.9)}},
        "betas [0.9, 0.999] → [0.8, 0.9]",
    ),
    "batch": ({}, {"batch": 7}, "batch_size 12 → 7"),
    "batch without a rest": ({"data": {"drop_last": True}}, {"batch": 39}, "batch_size 12 → 39"),
    "micro-batch": ({}, {"trainer": {"micro_batch_size": 2}}, "micro_batch_size none → 2"),
    "clipping": ({}, {"trainer": {"clip_gradients": 0.1}}, "clip_gradients none → 0.1"),
    "precision": ({}, {"trainer": {"precision": "bf16"}}, "precision fp32 → bf16"),
    "strategy": (
        {},
        {"trainer": {"strategy": mh.LocalSGD(sync_every=2)}},
        "strategy ddp → local-sgd",
    ),
    "no strategy of its own": (
        {"trainer": {"strategy": mh.DiLoCo(sync_every=4, fragments=2)}},
        {"trainer": {"strategy": mh.DDP(compression="int8", compress_above=1)}},
        "strategy diloco → ddp",
    ),
    "fragments": (
        {"trainer": {"strategy": mh.DiLoCo(sync_every=4, fragments=2)}},
        {"trainer": {"strategy": mh.DiLoCo(sync_every=6, fragments=3)}},
        "fragments 2 → 3",
    ),
    "compression": (
        {"trainer": {"strategy": mh.DDP(compression="int8", compress_above=1)}},
        {"trainer": {"strategy": mh.DDP(compression="powersgd", compress_above=1)}},
        "compression int8 → powersgd",
    ),
    "patience": (
        {"trainer": {"early_stopping": mh.EarlyStopping(min_delta=9.0), "validate_every": "1 step"}},
        {"trainer": {"early_stopping": mh.EarlyStopping(patience=99)}},
        "early_stopping.patience 3 → 99",
    ),
    "best": (
        {"trainer": {"validate_every": "1 step"}},
        {"trainer": {"best": mh.Best("loss", mode="max"), "validate_every": "1 step"}},
        "best.mode min → max",
    ),
}  # fmt: skip
MUST_NOT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "seed": ({}, {"trainer": {"seed": 4}}, "seed is 4, and the run began with 0"),
    "order": ({}, {"data": {"shuffle": False}}, "shuffle is false, and the run began with true"),
    "last batch": ({}, {"data": {"drop_last": True}}, "drop_last is true, and the run began with false"),
    "parts": ({"trainer": {"virtual_workers": 4}}, {"trainer": {"virtual_workers": 3}}, "virtual_workers is 3"),
    "norm": ({}, {"trainer": {"batch_norm": "local"}}, "batch_norm is local, and the run began with global"),
    "shorter": ({}, {"samples": 30}, "the training set has 30 samples, and the run began with 40"),
    "longer": ({}, {"samples": 50}, "the training set has 50 samples, and the run began with 40"),
    "content": ({}, {"content": 6}, "of the training set is not what it was when the run began"),
    "stream": ({}, {"stream": "one"}, "the training set is a stream of class Stream, and the run began with no stream"),
    "other stream": ({"stream": "one"}, {"stream": "another"}, "a stream of class OtherStream, and the run began with"),
    "optimizer": ({}, {"optimizer": "AdamW"}, "optimizer is AdamW, and the run began with SGD"),
    "groups": ({}, {"groups": True}, "the optimizer has 2 parameter groups, and the run began with 1"),
    "schedule": ({"schedule": "cosine"}, {"schedule": "too short"}, "the schedule does not reach to step 7"),
}  # fmt: skip


def changed_in_turn(rank: int, folder: Path, cases: dict[str, Any]) -> dict[str, Any]:
    return {name: gone_on(rank, folder / name, first, then) for name, (first, then, _) in cases.items()}


@pytest.mark.parametrize("workers", SOME_WORKERS)
def test_what_may_change_takes_effect_and_is_said(workers: int, tmp_path: Path) -> None:
    found = run_ranks(workers, changed_in_turn, tmp_path, MAY)
    for name, (first, then, text) in MAY.items():
        leader = found[0][name]
        assert "error" not in leader, (name, leader)
        assert any(text in said for said in leader["said"] if said.startswith("changed since")), (name, leader["said"])
        assert all(each[name]["sha"] == leader["sha"] for each in found), name
        assert leader["steps"] == MORE, name
        for key, value in then.get("options", {}).items():
            if not {**first, **then}.get("schedule"):
                assert [group[key] for group in leader["groups"]] == [value], name
        if {**first, **then}.get("schedule"):
            hand = by_hand(first, then).param_groups[0]
            assert leader["groups"][0]["lr"] == pytest.approx(hand["lr"], rel=1e-12), name
            assert leader["groups"][0].keys() == hand.keys() - {"params"}, name
        rates = [line["lr"] for line in step_lines(tmp_path / name)]
        assert len(rates) == MORE
        if name.startswith("rate"):
            assert rates[STEPS] / rates[STEPS - 1] > 1.5, "from the first step on"
    batches = [line["samples"] for line in step_lines(tmp_path / "batch")]
    assert batches[: STEPS + 9] == [12, 12, 12, 4, 12, 12, 12, 4, 7, 7, 7, 7, 7, 5, 7, 7], "the epoch continues"
    assert [line["samples"] for line in step_lines(tmp_path / "batch without a rest")][6:9] == [12, 39, 39]


@pytest.mark.parametrize("workers", SOME_WORKERS)
def test_what_must_not_change_is_refused_on_every_worker_and_costs_nothing(workers: int, tmp_path: Path) -> None:
    found = run_ranks(workers, changed_in_turn, tmp_path, MUST_NOT)
    for name, (_, _, text) in MUST_NOT.items():
        for each in found:
            assert text in each[name].get("error", "no error"), name
        assert len(step_lines(tmp_path / name)) == STEPS
        record = json.loads((tmp_path / name / "run.json").read_text())
        assert record["settings"]["duration"] == f"{STEPS} steps", "the record is that of the run"
    shutil.rmtree(tmp_path / "seed")


def test_plateau_schedule_keeps_what_it_has_learned(tmp_path: Path) -> None:
    first = {"schedule": "plateau", "trainer": {"validate_every": "2 steps"}}
    [done] = run_ranks(1, gone_on, tmp_path, first, {"options": {"lr": 0.5}})
    rates = [line["lr"] for line in step_lines(tmp_path)]
    assert rates[STEPS] == pytest.approx(10 * rates[STEPS - 1] / 2), "the first run ends with a validation"
    assert rates[STEPS - 1] < 0.05
    assert done["groups"][0]["lr"] < rates[STEPS]


@pytest.mark.parametrize("schedule", ["", *sorted(SCHEDULES.keys() - {"too short"})])
def test_resume_without_a_change_has_the_bits_of_an_undisturbed_run(schedule: str, tmp_path: Path) -> None:
    asked = {"schedule": schedule, "optimizer": "AdamW", "trainer": {"validate_every": "3 steps"}}
    [resumed] = run_ranks(1, gone_on, tmp_path / "resumed", asked, {})
    [whole] = run_ranks(1, fit, tmp_path / "whole", MORE, asked)
    if schedule != "plateau":  # the end of the first run validates once more
        assert resumed["sha"] == whole["sha"]
        assert resumed["groups"] == whole["groups"]
    assert not [said for said in resumed["said"] if "changed" in said]


def test_change_taken_back_ends_with_the_rates_of_a_run_without_it(tmp_path: Path) -> None:
    """A schedule under a changed rate leaves nothing behind when the rate is put back."""
    found = run_ranks(1, there_and_back, tmp_path)
    assert found[0]["groups"][0]["lr"] == by_hand({"schedule": "cosine"}, {}).param_groups[0]["lr"]


def there_and_back(rank: int, run_dir: Path) -> dict[str, Any]:
    cosine = {"schedule": "cosine"}
    fit(rank, run_dir, 5, cosine)
    fit(rank, run_dir, 11, {**cosine, "options": {"lr": 3.0}})
    return fit(rank, run_dir, MORE, cosine)


def test_early_stopping_with_another_metric_begins_anew(tmp_path: Path) -> None:
    first = {"trainer": {"early_stopping": mh.EarlyStopping(min_delta=9.0, patience=2), "validate_every": "1 step"}}
    [done] = run_ranks(1, gone_on, tmp_path, first, {"trainer": {}})
    assert done["steps"] == MORE, "a run that the rule has ended continues without the rule"
    assert len(events(tmp_path, "end")) == 2
