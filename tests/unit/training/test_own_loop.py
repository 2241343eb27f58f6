"""What `mh.Run` refuses, in a sentence, and what it does on one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.config import overrides
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


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"optimizers": {"three": lambda params: torch.optim.SGD(params, 0.1)}}, "three"),
        ({"schedulers": {"both": lambda optimizer: None}}, "no optimizer of this name"),
        ({"warmup": "5 steps"}, "scheduler that begins with a low rate"),
        ({"optimizers": {"one": lambda params: torch.optim.LBFGS(params)}}, "as often as it likes"),
        ({"optimizers": {"one": lambda params: None}}, "not a torch.optim.Optimizer"),
        ({"optimizers": {n: lambda p: torch.optim.SGD(p, 0.1) for n in ("one", "one+two")}}, "both change"),
        ({"schedulers": {"one": torch.optim.lr_scheduler.ReduceLROnPlateau}}, "no value that it could look at"),
        ({"data": None}, "virtual_workers"),
        ({"loss": nn.MSELoss()}, "no argument 'loss'"),
        ({"clip_gradients": 1.0}, "no argument 'clip_gradients'"),
        ({"precision": "fp16"}, "scaler"),
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
    ],
)
def test_a_step_that_asks_for_what_cannot_be_ends_in_a_sentence(
    tmp_path: Path, step: Callable[[mh.Run], Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        made(run_dir=tmp_path).fit(step, "1 step")
    assert "mh.Trainer(" not in str(refused.value)


def test_setting_of_the_command_line_that_a_step_of_its_own_does_not_read_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in overrides.to_environment({"clip_gradients": "1.0"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"clip_gradients is for the step(.|\n)*run\.update\(clip=…\)"):
        made()


def test_verbs_outside_of_a_step_are_refused() -> None:
    run = made()
    with pytest.raises(ConfigError, match="outside of a step"):
        run.backward(loss(run), "one")


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
