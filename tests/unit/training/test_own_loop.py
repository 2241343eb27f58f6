"""What `mh.Run` refuses, in a sentence, and what it does on one process."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.config import overrides
from manyhosts.data import randomness
from manyhosts.errors import ConfigError, TrainingError

INPUTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def made(**changed: Any) -> mh.Run:
    arguments: dict[str, Any] = {
        "models": {"one": lambda: nn.Linear(3, 2), "two": lambda: nn.Linear(2, 1)},
        "optimizers": {name: lambda params: torch.optim.SGD(params, 0.1) for name in ("one", "two")},
        "data": mh.Data(train=TensorDataset(INPUTS), batch_size=4),
    }
    return mh.Run(**{**arguments, **changed})


def loss(run: mh.Run) -> Callable[[Any], torch.Tensor]:
    return lambda batch: run.models["two"](run.models["one"](batch[0])).square().mean()


def loss_that_nobody_takes(run: mh.Run) -> torch.Tensor:
    return loss(run)([INPUTS])


def with_no_graph(rows: torch.Tensor) -> torch.Tensor:
    return rows.detach().mean()


def gone_backward(run: mh.Run) -> Callable[[Any], torch.Tensor]:
    def own(batch: Any) -> torch.Tensor:
        found = loss(run)(batch)
        found.backward()
        return found

    return own


def trained(run: mh.Run) -> None:
    for name in ("one", "two"):
        run.backward(loss(run), name)
        run.update(name)


def counting(run: mh.Run, count: Any) -> Callable[[Any], Any]:
    """A loss that says that it is a mean over `count` for each sample."""
    return lambda batch: {"loss": loss(run)(batch), "count": count if torch.is_tensor(count) else len(batch[0]) * count}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"optimizers": {"three": lambda params: torch.optim.SGD(params, 0.1)}}, "three"),
        ({"schedulers": {"both": lambda optimizer: None}}, "no optimizer of this name"),
        ({"schedulers": torch.optim.lr_scheduler.StepLR}, r"with \(optimizer\), and StepLR takes other arguments"),
        ({"optimizers": torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)}, "is a SGD, which cannot be called"),
        ({"optimizers": lambda model, lr: None}, r"with \(parameters\), and <lambda> takes other arguments"),
        ({"warmup": "5 steps"}, "scheduler that begins with a low rate"),
        ({"optimizers": {"one": lambda params: torch.optim.LBFGS(params)}}, "as often as it likes"),
        ({"optimizers": {"one": lambda params: None}}, "not a torch.optim.Optimizer"),
        ({"optimizers": {n: lambda p: torch.optim.SGD(p, 0.1) for n in ("one", "one+two")}}, "both change"),
        ({"schedulers": {"one": torch.optim.lr_scheduler.ReduceLROnPlateau}}, "no value that it could look at"),
        ({"data": None}, "virtual_workers"),
        ({"loss": nn.MSELoss()}, "no argument 'loss'"),
        ({"clip_gradients": 1.0}, "no argument 'clip_gradients'"),
        ({"precision": "fp16"}, "scaler"),
        ({"schedule_every": "epoch"}, "with each run.update"),
        ({"evaluate": lambda batch: batch}, r"evaluate is called with \(models, batch\)"),
        ({"audit": 0.1}, "audit"),
        ({"nonsense": 3}, "no argument 'nonsense'"),
        ({"callbacks": [3]}, r"mh\.Run\(callbacks="),
        ({"models": {"one": lambda: nn.Linear(3, 2), "two": nn.ReLU}}, "nothing to step"),
        ({"data": mh.Data(train=TensorDataset(INPUTS), test=TensorDataset(INPUTS), batch_size=4)}, "what its loss is"),
        ({"models": {"one": 3}, "optimizers": {"one": lambda p: torch.optim.SGD(p, 0.1)}}, "not a torch.nn.Module"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        made(**changed)
    assert "mh.Trainer(" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("precision", "fp16", "scaler"),
        ("compile", "true", "compile is for"),
        ("audit", "0.1", "audit"),
        ("look_every", "5", "look_every is for"),
        ("schedule_every", "epoch", "with each run.update"),
    ],
)
def test_what_the_command_line_sets_is_refused_likewise(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, text in overrides.to_environment({name: value}).items():
        monkeypatch.setenv(key, text)
    with pytest.raises(ConfigError, match=words):
        made()


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda run: run.update("one"), "before a run.backward"),
        (lambda run: run.backward(loss(run), "one"), "no run.update has used it"),
        (lambda run: run.backward(loss(run)), "several optimizers"),
        (lambda run: run.backward(loss(run), "three"), "no optimizer 'three'"),
        (lambda run: run.part, "no part is computed"),
        (lambda run: run.backward(lambda batch: run.part.keep("x", dict), "one"), "kept by part"),
        (lambda run: run.backward(lambda batch: batch[0], "one"), "one number"),
        (
            lambda run: run.backward(lambda batch: {"loss": loss(run)(batch), "pair": (1, 2)}, "one"),
            "'pair' is a tuple",
        ),
        (lambda run: run.log(pair=(1, 2)), r"'pair' is a tuple(.|\n)*where: run\.log"),
        (lambda run: run.log(much=10**400), "'much' is a int"),
        (lambda run: run.log(many=torch.ones(3)), r"'many' is a Tensor of shape \(3,\)"),
        (lambda run: (yield), "gives a generator"),
        (loss_that_nobody_takes, "nothing is done with"),
        (lambda run: run.fit(print, "1 step"), "inside of a step"),
        (lambda run: run.backward(lambda batch: run.backward(loss(run), "two"), "one"), "for each micro-batch"),
        (lambda run: (run.backward(loss(run), "one"), run.update("one", clip=-1.0)), "clip is -1"),
        (lambda run: (run.backward(loss(run), "one"), run.update("one", clip=math.nan)), "clip is nan"),
        (lambda run: (run.backward(loss(run), "one"), run.update("one", clip=True)), "clip is True"),
        (lambda run: run.backward(counting(run, -1), "one"), "count is -4"),
        (lambda run: run.backward(counting(run, math.nan), "one"), "count is nan"),
        (lambda run: run.backward(counting(run, "3"), "one"), "'count' is a str"),
        (lambda run: run.log(much="3"), "'much' is a str"),
        (
            lambda run: run.backward(lambda batch: batch[0], "one", over_batch=lambda rows: 1.0),
            "over_batch returned a f",
        ),
        (lambda run: run.backward(counting(run, torch.ones(4)), "one"), r"'count' is a Tensor of shape \(4,\)"),
        (lambda run: run.backward(lambda batch: batch[0].mean(0, True), "one", over_batch=torch.std), "1 rows for 4"),
        (lambda run: run.backward(lambda batch: {"rows": batch[0]}, "one", over_batch=torch.std), "gives a dict"),
        (
            lambda run: run.backward(lambda batch: loss(run)(batch).detach(), "one"),
            "any parameter that optimizer 'one'",
        ),
        (lambda run: run.backward(lambda batch: run.models["two"].bias.sum(), "one"), "that optimizer 'one' steps"),
        (lambda run: run.backward(lambda batch: batch[0], "one", over_batch=torch.std), "that optimizer 'one' steps"),
        (
            lambda run: run.backward(lambda batch: run.models["one"](batch[0]), "one", over_batch=with_no_graph),
            r"any parameter or row(.|\n)*over_batch",
        ),
        (lambda run: run.save("weights.pt"), "predict or save is called inside of a step"),
        (lambda run: made(), r"mh\.Run\(…\) is called inside of a step"),
        (lambda run: run.state.update(kept=[loss_that_nobody_takes(run)]), r"run\.state\['kept'\](.|\n)*test_own_loop"),
        (lambda run: run.models["one"].register_parameter("more", nn.Parameter(torch.ones(2))), "module 'more'"),
        (lambda run: setattr(run.models["two"], "weight", nn.Parameter(torch.ones(1, 2))), "or module 'weight'"),
        (lambda run: run.models["one"].add_module("more", nn.Linear(2, 2)), "module 'more'"),
        (lambda run: run.backward(torch.ones(()), "one"), "is given a Tensor as loss"),
        (lambda run: run.backward(lambda: 0, "one"), r"loss is called with \(batch\), and <lambda> takes other"),
        (
            lambda run: run.backward(lambda batch: batch[0], "one", over_batch=lambda rows, more: 0),
            r"over_batch is called with \(rows\)(.|\n)*over_batch=loss",
        ),
        (lambda run: (run.backward(loss(run), "one"), run.update("one", clip="1")), "clip is '1'"),
        (lambda run: run.backward(lambda batch: None, "one"), "run.backward was given returned a NoneType"),
        (lambda run: run.log({"a": 1.0}), "a dict comes without one"),
        (lambda run: run.log(loss=3.0), "the name of what run.backward records"),
        (
            lambda run: run.backward(gone_backward(run), "one"),
            r"backward twice(.|\n)*where: run\.backward",
        ),
        (lambda run: (trained(run), run.state.update(file=INPUTS.numel)), r"type \w+ cannot(.|\n)*run\.state\['file"),
    ],
)
def test_a_step_that_asks_for_what_cannot_be_ends_in_a_sentence(
    tmp_path: Path, step: Callable[[mh.Run], Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        made(run_dir=tmp_path).fit(step, "1 step")
    assert "mh.Trainer(" not in str(refused.value)
    assert f"{__file__}, line " in refused.value.where, "the line of the step that asks for it"


def test_setting_of_the_command_line_that_a_step_of_its_own_does_not_read_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in overrides.to_environment({"clip_gradients": "1.0"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"clip_gradients is for the step(.|\n)*run\.update\(clip=…\)"):
        made()


def test_error_of_a_call_ends_the_run_also_where_the_step_catches_it(tmp_path: Path) -> None:
    def step(run: mh.Run) -> None:
        trained(run)
        with contextlib.suppress(ConfigError):
            run.update("three")

    with pytest.raises(ConfigError, match="no optimizer 'three'"):
        made(run_dir=tmp_path).fit(step, "1 step")


@pytest.mark.parametrize(
    ("given", "words"),
    [({"epochs": 2}, r"run\.fit\(step, \"20 epochs\"\)"), ({}, "run.fit is given no step")],
)
def test_call_of_fit_as_elsewhere_is_answered(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made().fit(**given)


@pytest.mark.parametrize("data", [TensorDataset(INPUTS), [INPUTS]])
def test_data_that_is_no_mh_data_is_answered(data: Any) -> None:
    with pytest.raises(ConfigError, match=f"data is a {type(data).__name__}"):
        made(data=data)


def test_numbers_of_numpy_are_settings_of_a_run_without_data(tmp_path: Path) -> None:
    run = made(data=None, virtual_workers=np.int64(2), seed=np.int64(3), run_dir=tmp_path)

    def step(run: mh.Run) -> None:
        run.backward(lambda _: loss(run)((INPUTS,)), "one")
        run.update("one")

    assert run.fit(step, "1 step").steps == 1
    assert [run.settings.virtual_workers, run.settings.seed] == [2, 3]


def test_verbs_outside_of_a_step_are_refused() -> None:
    run = made()
    with pytest.raises(ConfigError, match="outside of a step"):
        run.backward(loss(run), "one")
    with pytest.raises(ConfigError, match="outside of a step"):
        run.log(value=1.0)


@pytest.mark.parametrize("goes_on", [True, False])
def test_step_that_catches_what_broke_off_a_pass_ends_by_it(tmp_path: Path, goes_on: bool) -> None:
    """Other workers may wait in that pass; and an update would be by gradients of half of it, or of none."""

    def breaks_off(batch: Any) -> torch.Tensor:
        raise KeyError("an odd sample")

    def step(run: mh.Run) -> None:
        run.backward(loss(run), "one")
        with contextlib.suppress(KeyError):
            run.backward(breaks_off, "one")
        if goes_on:
            run.update("one")

    with pytest.raises(KeyError, match="an odd sample") as raised:
        made(run_dir=tmp_path).fit(step, "2 steps")
    assert "a step that catches it ends here" in "".join(raised.value.__notes__)


def test_nan_that_the_step_catches_leaves_the_update_out(tmp_path: Path) -> None:
    run = made(run_dir=tmp_path, on_bad_step="skip")

    def step(run: mh.Run) -> None:
        with contextlib.suppress(Exception):
            run.backward(lambda batch: loss(run)(batch) * (math.nan if run.steps_done == 1 else 1.0), "one")
            run.update("one")

    run.fit(step, "3 steps")
    losses = [
        json.loads(line).get("loss")
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
        if '"step", ' in line
    ]
    assert sum(each is None or not isinstance(each, float) or math.isnan(each) for each in losses) == 1


def test_gradient_does_not_go_through_a_count(tmp_path: Path) -> None:
    run, gradients = made(run_dir=tmp_path), []

    def step(run: mh.Run) -> None:
        def weighed(batch: Any) -> dict[str, torch.Tensor]:
            return {"loss": loss(run)(batch), "count": run.models["one"](batch[0]).abs().sum()}

        for each in (loss(run), weighed):
            run.backward(each, "one")
            gradients.append(run.models["one"].weight.grad.clone())
            run.update("one", clip=1e-9)

    run.fit(step, "1 step")
    torch.testing.assert_close(*gradients)


def test_first_step_that_trains_nothing_is_said(tmp_path: Path) -> None:
    made(run_dir=tmp_path).fit(lambda run: run.log(value=1.0), "2 steps")
    assert (tmp_path / "metrics.jsonl").read_text().count("it has trained nothing") == 1


def test_parameters_that_an_optimizer_is_given_later_are_refused(tmp_path: Path) -> None:
    made_optimizers: list[torch.optim.Optimizer] = []

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made_optimizers.append(torch.optim.SGD(params[:1], 0.1))
        return made_optimizers[-1]

    run = made(models={"two": lambda: nn.Linear(3, 1)}, optimizers=optimizer, run_dir=tmp_path)

    def step(run: mh.Run) -> None:
        if run.steps_done == 1:
            made_optimizers[0].add_param_group({"params": [run.models["two"].bias]})
        run.backward(lambda batch: run.models["two"](batch[0]).square().mean())
        run.update()

    with pytest.raises(ConfigError, match="was given more parameters since the run was made"):
        run.fit(step, "3 steps")


@pytest.mark.parametrize("persistent", [True, False])
def test_buffer_that_a_step_registers_is_refused_where_a_snapshot_would_have_it(
    persistent: bool, tmp_path: Path
) -> None:
    calls = [0]

    class Scaled(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if not hasattr(self, "table") and calls[0] > 1:
                self.register_buffer("table", torch.full((1,), 2.0), persistent=persistent)
            return super().forward(inputs) * getattr(self, "table", 2.0)

    def run_to(steps: str) -> None:
        run = made(
            models={"two": lambda: Scaled(3, 1)},
            optimizers=lambda params: torch.optim.SGD(params, 0.1),
            run_dir=tmp_path,
        )

        def step(run: mh.Run) -> None:
            run.backward(lambda batch: run.models["two"](batch[0]).square().mean())
            run.update()

        run.fit(step, steps)

    if persistent:
        with pytest.raises(ConfigError, match="gives a model of the run the buffer 'table'"):
            run_to("2 steps")
        return
    run_to("2 steps")
    run_to("4 steps")  # the model of the resume has none until it is called


def test_only_the_named_optimizers_model_gets_a_gradient_and_gradients_add_up(tmp_path: Path) -> None:
    run, seen = made(run_dir=tmp_path), []

    def step(run: mh.Run) -> None:
        before = run.models["two"].weight.grad
        run.backward(loss(run), "one")
        once = run.models["one"].weight.grad.clone()
        run.backward(loss(run), "one")
        seen.append((before, run.models["two"].weight.grad, once, run.models["one"].weight.grad.clone()))
        run.update("one")

    run.fit(step, "1 step")
    [(before, after, once, twice)] = seen
    assert before is None
    assert after is None
    torch.testing.assert_close(twice, 2 * once)


def test_loss_that_is_not_finite_stops_the_run_with_the_weights_of_before(tmp_path: Path) -> None:
    run = made(run_dir=tmp_path)

    def step(run: mh.Run) -> None:
        weight = torch.nan if run.steps_done == 2 else 1.0
        run.backward(lambda batch: weight * loss(run)(batch), "one")
        run.update("one")

    with pytest.raises(TrainingError, match="nan"):
        run.fit(step, "5 steps")
    assert all(each.isfinite().all() for each in run.models.parameters())


def test_bad_step_is_skipped_with_all_its_updates(tmp_path: Path) -> None:
    run, weights = made(run_dir=tmp_path, on_bad_step="skip"), []

    def step(run: mh.Run) -> None:
        weights.append(run.models["one"].weight.detach().clone())
        run.backward(loss(run), "one")
        run.update("one")
        factor = torch.nan if run.steps_done == 1 else 1.0
        run.backward(lambda batch: factor * loss(run)(batch), "two")
        run.update("two")

    run.fit(step, "4 steps")
    assert torch.equal(weights[1], weights[2]), "the first update of the bad step was undone, too"
    assert not torch.equal(weights[2], weights[3])


def test_gradient_penalty_and_frozen_models_are_as_in_a_plain_loop(tmp_path: Path) -> None:
    run = made(run_dir=tmp_path)
    plain = [nn.Linear(3, 2), nn.Linear(2, 1)]
    for own, name in zip(plain, ("one", "two"), strict=True):
        own.load_state_dict(run.models[name].state_dict())
    frozen = torch.optim.SGD(plain[1].parameters(), 0.1)
    batches = []

    def penalty(one: nn.Module, two: nn.Module, batch: Any) -> torch.Tensor:
        inputs = batch[0].clone().requires_grad_()
        out = two(one(inputs))
        [slope] = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        return out.mean() + (slope.norm(dim=1) - 1).square().mean()

    def step(run: mh.Run) -> None:
        run.models["one"].requires_grad_(False)

        def of(batch: Any) -> torch.Tensor:
            batches.append(batch)
            return penalty(run.models["one"], run.models["two"], batch)

        run.backward(of, "two")
        run.update("two")

    run.fit(step, "3 steps")
    for batch in batches:
        frozen.zero_grad()
        penalty(*plain, batch).backward()
        frozen.step()
    torch.testing.assert_close(run.models["two"].weight, plain[1].weight)
    assert torch.equal(run.models["one"].weight, plain[0].weight)


def test_what_a_part_keeps_changes_once_where_a_loss_looks_at_the_whole_batch(tmp_path: Path) -> None:
    """Its rows are computed twice, once without a graph: both times from what the part kept before the step."""

    def train(name: str, over_batch: bool) -> dict[str, torch.Tensor]:
        run = made(run_dir=tmp_path / name, virtual_workers=2)

        def rows(batch: Any) -> torch.Tensor:
            kept = run.part.keep("seen", lambda: {"steps": 0, "sum": torch.zeros(3)})
            kept["steps"] += 1
            kept["sum"] += batch[0].sum(0)
            return run.models["two"](run.models["one"](batch[0] + kept["sum"])) * kept["steps"]

        def step(run: mh.Run) -> None:
            if over_batch:
                run.backward(rows, "one", over_batch=lambda found: found.square().mean())
            else:
                run.backward(lambda batch: rows(batch).square().mean(), "one")
            run.update("one", clip=0.1)

        run.fit(step, "5 steps")
        return {**run.models.state_dict(), **{str(k): v["seen"]["sum"] for k, v in run._own_step.parts.kept.items()}}

    found, expected = train("over", True), train("each", False)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


@pytest.mark.parametrize("count", [-1.0, math.nan])
def test_count_that_evaluate_cannot_mean_is_refused(tmp_path: Path, count: float) -> None:
    both = mh.Data(train=TensorDataset(INPUTS), validation=TensorDataset(INPUTS), batch_size=4)
    run = made(data=both, evaluate=lambda models, batch: {"loss": loss(run)(batch), "count": count}, run_dir=tmp_path)
    with pytest.raises(ConfigError, match=f"count is {count}") as refused:
        run.validate()
    assert refused.value.where == "mh.Run(evaluate=…)"


def test_count_that_evaluate_gives_is_what_its_mean_is_over(tmp_path: Path) -> None:
    """Over three samples of eleven, some batches with none of them: as in one pass over those three."""
    inputs = torch.randn(11, 3, generator=torch.Generator().manual_seed(1))
    counted = inputs[:, 0] > inputs[:, 0].sort().values[7]

    def evaluate(models: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        rows = batch[0][batch[1]]
        error = models["two"](models["one"](rows)).square()
        return {"loss": error.sum() / max(len(rows), 1), "count": batch[1].sum()}

    both = mh.Data(
        train=TensorDataset(INPUTS),
        validation=TensorDataset(inputs, counted),
        test=TensorDataset(inputs, counted),
        batch_size=4,
    )
    run = made(data=both, evaluate=evaluate, run_dir=tmp_path / "run")

    def step(run: mh.Run) -> None:
        run.backward(loss(run), "one")
        run.update("one")

    found = run.fit(step, "1 epochs")
    with torch.no_grad():
        expected = float(loss(run)((inputs[counted],)))
    assert found.validation["loss"] == pytest.approx(expected)
    assert run.test()["loss"] == pytest.approx(expected)


def test_one_model_predicts_and_of_several_it_must_be_said_which(tmp_path: Path) -> None:
    one = made(
        models={"two": lambda: nn.Linear(3, 1)},
        optimizers=lambda params: torch.optim.SGD(params, 0.1),
        run_dir=tmp_path / "one",
    )

    def step(run: mh.Run) -> None:
        run.backward(lambda batch: run.models["two"](batch[0]).square().mean())
        run.update()

    one.fit(step, "2 steps")
    with torch.no_grad():
        torch.testing.assert_close(one.predict(TensorDataset(INPUTS)), one.models["two"](INPUTS))
    several = made(run_dir=tmp_path / "several")
    with pytest.raises(ConfigError, match="which of them predicts"):
        several.predict(TensorDataset(INPUTS))
    found = several.predict(TensorDataset(INPUTS), forward=lambda models, batch: models["one"](batch[0]))
    with torch.no_grad():
        torch.testing.assert_close(found, several.models["one"](INPUTS))


@pytest.mark.parametrize("through_data", [False, True])
def test_average_that_begins_late_is_put_back_where_its_step_is_undone(tmp_path: Path, through_data: bool) -> None:
    """Also weights that an optimizer steps and the step changes by hand, where it makes no update of them."""
    models = {name: lambda: nn.Linear(3, 2) for name in ("one", "average", "late")} | {"two": lambda: nn.Linear(2, 1)}
    run, kept = made(models=models, run_dir=tmp_path, on_bad_step="skip"), []

    def move(name: str) -> None:
        for own, other in zip(run.models[name].parameters(), run.models["one"].parameters(), strict=True):
            if through_data:
                own.data.lerp_(other.data, 0.5)
            else:
                with torch.no_grad():
                    own.lerp_(other, 0.5)

    def step(run: mh.Run) -> None:
        kept.append({name: value.clone() for name, value in run.models.state_dict().items()})
        done = run.steps_done
        if done >= 2:
            move("average")
        if done >= 5:
            move("late")
        run.models["two"].weight.data.clamp_(-0.5, 0.5 - 0.1 * done)
        factor = torch.nan if done in (2, 4, 5) else 1.0
        run.backward(lambda batch: factor * loss(run)(batch), "one")
        run.update("one")

    run.fit(step, "7 steps")
    for bad in (2, 4, 5):
        for name, value in kept[bad].items():
            assert torch.equal(kept[bad + 1][name], value), (bad, name)
    assert not torch.equal(kept[3]["average.weight"], kept[4]["average.weight"])
    assert torch.equal(kept[6]["late.weight"], kept[0]["late.weight"])
    assert not torch.equal(run.models["late"].weight, kept[6]["late.weight"])


@pytest.mark.parametrize("place", ["nowhere", "number", "scores in an object", "buffer"])
def test_plain_attribute_that_a_step_changes_is_named(tmp_path: Path, place: str) -> None:
    class Scores:
        def __init__(self) -> None:
            self.by_name: dict[str, Any] = {"first": torch.zeros(2)}

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.calls, self.scores = 0, Scores()
            self.register_buffer("seen", torch.zeros(()))

    run = made(models={"one": Counting, "two": lambda: nn.Linear(2, 1)}, run_dir=tmp_path)

    def step(run: mh.Run) -> None:
        run.backward(loss(run), "one")
        run.update("one")
        one: Any = run.models["one"]
        if place == "number":
            one.calls += 1
        elif place == "scores in an object" and run.steps_done:
            one.scores.by_name["first"] = one.scores.by_name["first"] + 1
        elif place == "buffer":
            one.seen += 1

    run.fit(step, "5 steps")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    notes = [line["text"] for line in lines if line["event"] == "note" and "a plain attribute" in line["text"]]
    named = {"number": "one.calls", "scores in an object": "one.scores"}.get(place)
    assert [named in note for note in notes if named] == ([True] if named else [])
    assert bool(notes) is bool(named)


def test_validate_test_predict_and_save_use_the_same_weights_and_say_which(tmp_path: Path) -> None:
    """The rate rises, so that the best validation is not the last."""
    data, layer = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True)), nn.Linear(3, 1)
    error: Callable[[Any, Any], torch.Tensor] = lambda models, batch: (models["m"](batch[0]) - batch[1]).square().mean()  # noqa: E731
    run = mh.Run(
        models={"m": lambda: nn.Linear(3, 1)},
        optimizers=lambda params: torch.optim.SGD(params, 0.1),
        schedulers={"m": lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0 if step < 6 else 12.0)},
        data=mh.Data(train=data, validation=data, test=data, batch_size=4),
        evaluate=error,
        early_stopping=mh.EarlyStopping("loss", patience=50),
        run_dir=tmp_path,
    )

    def step(run: mh.Run) -> None:
        run.backward(lambda batch: error(run.models, batch))
        run.update()

    run.fit(step, "5 epochs")
    found: dict[str, float] = {}
    for given in ({}, {"weights": "best"}, {"weights": "last"}):
        name = next(iter(given.values()), "default")
        run.save(tmp_path / f"{name}.pt", **given)  # type: ignore[arg-type]
        kept = torch.load(tmp_path / f"{name}.pt")
        layer.load_state_dict({key.rpartition(".")[2]: value for key, value in kept.items()})
        found[name] = run.validate(**given)["loss"]  # type: ignore[arg-type]
        assert run.test(**given)["loss"] == found[name]  # type: ignore[arg-type]
        for outputs in (run.predict(data, **given), layer(INPUTS)):  # type: ignore[arg-type]
            assert (outputs - data.tensors[1]).square().mean().item() == pytest.approx(found[name], rel=1e-5)
    assert found["default"] == found["best"] < found["last"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    said = [line["text"] for line in lines if line["event"] == "note" and "weights, of step" in line["text"]]
    assert sum("the best weights" in text for text in said) == 6
    assert sum("the last weights, of step 15" in text for text in said) == 3


def test_step_of_one_piece_has_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    twin, batches = copy.deepcopy(model), []
    features = torch.randn(42, 4, generator=torch.Generator().manual_seed(3))
    data = mh.Data(train=TensorDataset(features, features.sum(1, keepdim=True)), batch_size=7)
    run = mh.Run(
        models=model, optimizers=lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), data=data, run_dir=tmp_path
    )

    def mean(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batches.append(batch)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def step(run: mh.Run) -> None:
        run.backward(mean)
        run.update()

    run.fit(step, "6 steps")
    optimizer = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(twin(inputs), targets).backward()
        optimizer.step()
    assert len(batches) == 6
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))


def test_step_on_one_worker_is_seeded_around_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[tuple[int, ...]] = []
    drawn: dict[str, list[float]] = {"before": [], "in": [], "after": []}
    seed_compute = randomness.seed_compute

    def noted(*address: int) -> None:
        seeded.append(address)
        seed_compute(*address)

    monkeypatch.setattr(randomness, "seed_compute", noted)

    def step(run: mh.Run) -> None:
        drawn["before"].append(torch.rand(()).item())

        def noisy(batch: Any) -> torch.Tensor:
            drawn["in"].append(torch.rand(()).item())
            return loss(run)(batch)

        run.backward(noisy, "one")
        run.update("one")
        drawn["after"].append(torch.rand(()).item())

    made(run_dir=tmp_path / "in one go", seed=5).fit(step, "4 steps")
    assert seeded == [(5, randomness.OWN_STEP, done, *call) for done in range(4) for call in ((), (1, 0))]
    first = {place: list(numbers) for place, numbers in drawn.items()}
    assert len({number for numbers in first.values() for number in numbers}) == 12, "each is drawn from its own address"
    made(run_dir=tmp_path / "again", seed=5).fit(step, "2 steps")
    made(run_dir=tmp_path / "again", seed=5).fit(step, "4 steps")
    assert {place: numbers[4:] for place, numbers in drawn.items()} == first, "a resumed run draws the same"


@pytest.mark.parametrize("width", [3, 200])
def test_norm_that_update_returns_is_that_of_all_gradients(width: int, tmp_path: Path) -> None:
    norms: list[tuple[float, float]] = []
    inputs = torch.randn(4, width, generator=torch.Generator().manual_seed(2))

    def step(run: mh.Run) -> None:
        run.backward(lambda batch: run.models["model"](batch[0]).square().mean())
        expected = nn.utils.get_total_norm([each.grad for each in run.models.parameters() if each.grad is not None])
        norms.append((run.update().item(), expected.item()))

    run = mh.Run(
        models=lambda: nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1)),
        optimizers=lambda params: torch.optim.SGD(params, 0.01),
        data=mh.Data(train=TensorDataset(inputs), batch_size=4),
        run_dir=tmp_path,
    )
    run.fit(step, "2 steps")
    for norm, expected in norms:
        assert norm == pytest.approx(expected, rel=1e-6)
