"""What `mh.Trainer` does with each of its arguments, in one process."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Recipe, images_and_labels, make_trainer, network, step_lines
from torch import nn
from torch.utils.data import ChainDataset, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import manyhosts as mh
from manyhosts.errors import ConfigError, SnapshotError
from manyhosts.events import Event, RunStarted, SnapshotSaved, StepDone, ValidationDone


def lines(run_dir: Path, event: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if line["event"] == event]


def trainer(run_dir: Path, **more: Any) -> mh.Trainer:
    arguments: dict[str, Any] = {
        "model": network,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "data": mh.Data(train=TensorDataset(*images_and_labels(40)), batch_size=10),
        "run_dir": run_dir,
    }
    return mh.Trainer(**{**arguments, **more})


def test_trainer_equals_a_plain_loop(tmp_path: Path) -> None:
    """Shuffling off, so that the plain loop needs nothing of ours."""
    images, labels = images_and_labels(40)
    made = trainer(tmp_path, data=mh.Data(train=TensorDataset(images, labels), batch_size=16, shuffle=False))
    plain = network()
    plain.load_state_dict(made.model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for begin in (0, 16, 32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(images[begin : begin + 16]), labels[begin : begin + 16]).backward()
            optimizer.step()
    made.fit("2 epochs")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, made.model.state_dict()[name]), name


def test_model_made_by_a_callable_has_the_weights_of_the_seed(tmp_path: Path) -> None:
    first, second = (trainer(tmp_path, seed=4).model.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = trainer(tmp_path, seed=5).model.state_dict()
    assert not torch.equal(first["0.weight"], other["0.weight"])


def test_schedule_steps_once_per_optimizer_step(tmp_path: Path) -> None:
    trainer(
        tmp_path,
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        micro_batch_size=3,
    ).fit("4 steps")
    assert [line["lr"] for line in step_lines(tmp_path)] == [0.1, 0.05, 0.025, 0.0125]


def test_plateau_schedule_judges_validations(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        data=mh.Data(
            train=TensorDataset(*images_and_labels(40)),
            validation=TensorDataset(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)),
            batch_size=10,
        ),
        early_stopping=mh.EarlyStopping("loss", min_delta=100.0, patience=9),
        schedule=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=100.0),
    )
    made.fit("3 epochs")
    assert made.components.optimizer.param_groups[0]["lr"] < 0.1


def test_warm_up_rises_to_the_full_rate_under_a_schedule(tmp_path: Path) -> None:
    trainer(
        tmp_path,
        warmup="1 epoch",
        schedule=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
    ).fit("6 steps")
    full = [0.1 * 0.5**step for step in range(6)]
    expected = [rate * min(1, (step + 1) / 4) for step, rate in enumerate(full)]
    assert [line["lr"] for line in step_lines(tmp_path)] == pytest.approx(expected)


def test_early_stopping_keeps_the_best_model_and_test_uses_it(tmp_path: Path) -> None:
    made = make_trainer(
        Recipe(batch=10, trainer={"early_stopping": mh.EarlyStopping("accuracy", mode="max", patience=2)}), tmp_path
    )
    made.data.test = made.data.validation
    result = made.fit("50 epochs")
    assert result.status == "stopped early"
    assert "accuracy has not become better for 2 validations" in result.reason
    validations = lines(tmp_path, "validation")
    best = max(validations, key=lambda line: line["values"]["accuracy"])
    assert (result.best, result.best_step) == (best["values"]["accuracy"], best["step"])
    assert made.test()["accuracy"] == best["values"]["accuracy"]
    assert made.test(weights="last")["accuracy"] == validations[-1]["values"]["accuracy"]
    assert made.validate()["accuracy"] == best["values"]["accuracy"], "the same weights as test()"
    assert made.validate(weights="last")["accuracy"] == validations[-1]["values"]["accuracy"], "they are put back"
    said = [line["text"] for line in lines(tmp_path, "note") if line["text"].startswith("validated: ")]
    assert said[0] == f"validated: the best weights, of step {best['step']}"
    tests = [(line["weights"], line["weights_step"]) for line in lines(tmp_path, "test")]
    assert tests == [("best", best["step"]), ("last", result.steps)]


@pytest.mark.parametrize(
    ("script", "typed", "mode"),
    [
        (mh.EarlyStopping("accuracy"), {}, "max"),
        (mh.EarlyStopping(), {}, "min"),
        (mh.EarlyStopping("accuracy", mode="min"), {}, "min"),
        (mh.EarlyStopping(), {"early_stopping.metric": "accuracy"}, "max"),
        (mh.EarlyStopping("accuracy"), {"early_stopping.metric": "loss"}, "min"),
    ],
    ids=str,
)
def test_direction_of_early_stopping_comes_from_the_metric(
    script: mh.EarlyStopping, typed: dict[str, str], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHOSTS_SET", json.dumps(typed))
    made = make_trainer(Recipe(batch=10, trainer={"early_stopping": script}), tmp_path)
    assert made.settings.early_stopping is not None
    assert made.settings.early_stopping.mode == mode
    result = made.fit("3 epochs")
    found = [line["values"][made.settings.early_stopping.metric] for line in lines(tmp_path, "validation")]
    assert result.best == (max if mode == "max" else min)(found)


@pytest.mark.parametrize("stops", [False, True])
def test_best_model_is_that_by_its_own_metric_whatever_early_stopping_looks_at(stops: bool, tmp_path: Path) -> None:
    rule = {"early_stopping": mh.EarlyStopping("loss", min_delta=0.05, patience=3)} if stops else {}
    made = make_trainer(Recipe(batch=10, trainer={"best": mh.Best("loss", mode="max"), **rule}), tmp_path)
    result = made.fit("12 epochs")
    found = [(line["values"]["loss"], line["step"]) for line in lines(tmp_path, "validation")]
    assert (result.best, result.best_step) == max(found)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["best"] == {"metric": "loss", "value": max(found)[0], "step": max(found)[1]}
    assert made.validate()["loss"] == max(found)[0]
    stopped, least, without = 0, float("inf"), 0
    for number, (loss, _) in enumerate(found, 1):
        least, without = (loss, 0) if loss < least - 0.05 else (least, without + 1)
        stopped = stopped or (number if without == 3 else 0)
    assert len(found) == (stopped or 12 if stops else 12)


def test_direction_of_best_comes_from_the_metric(tmp_path: Path) -> None:
    made = make_trainer(Recipe(batch=10, trainer={"best": "accuracy"}), tmp_path)
    assert made.settings.best == mh.Best("accuracy", "max")
    result = made.fit("3 epochs")
    assert result.best == max(line["values"]["accuracy"] for line in lines(tmp_path, "validation"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"best": "accurcy"}, "the best model is chosen by 'accurcy', and no metric"),
        ({"best": mh.Best("accurcy", mode="max")}, "the best model is chosen by 'accurcy', which no one reports"),
        ({"best": 3}, "best is 3"),
    ],
)
def test_best_by_what_nobody_reports_is_refused(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        make_trainer(Recipe(batch=10, trainer=changed), tmp_path).fit("1 epoch")


def test_time_limit_ends_a_run(tmp_path: Path) -> None:
    result = trainer(tmp_path).fit("1000000 epochs or 0.3s")
    assert result.status == "completed"
    assert "are over" in result.reason
    assert result.seconds >= 0.3


@pytest.mark.parametrize(
    ("every", "steps"), [("3 steps", [3, 6, 8]), ("1 epoch", [4, 8]), ("0.5 epochs", [2, 4, 6, 8])]
)
def test_validation_is_due_as_often_as_asked_and_at_the_end(every: str, steps: list[int], tmp_path: Path) -> None:
    images, labels = images_and_labels(40)
    data = mh.Data(train=TensorDataset(images, labels), validation=TensorDataset(images, labels), batch_size=10)
    trainer(tmp_path, data=data, validate_every=every).fit("2 epochs")
    assert [line["step"] for line in lines(tmp_path, "validation")] == steps


def test_snapshots_are_made_and_kept_as_asked(tmp_path: Path) -> None:
    trainer(tmp_path, snapshots=mh.Snapshots(every="2 steps", keep=2)).fit("7 steps")
    kept = sorted(path.name for path in (tmp_path / "snapshots").iterdir())
    assert kept == ["step-00000006", "step-00000007"]
    assert [line["step"] for line in lines(tmp_path, "snapshot")] == [2, 4, 6, 7]


def test_listeners_hear_the_story_in_order(tmp_path: Path) -> None:
    heard: list[Event] = []
    trainer(tmp_path, listeners=[heard.append], snapshots=mh.Snapshots(every="2 steps")).fit("4 steps")
    assert isinstance(heard[0], RunStarted)
    assert [event.step for event in heard if isinstance(event, StepDone)] == [1, 2, 3, 4]
    assert sorted(event.step for event in heard if isinstance(event, SnapshotSaved)) == [2, 4]
    assert type(heard[-1]).__name__ == "RunEnded"


def test_listener_that_fails_is_dropped_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise ValueError("no more paper")

    assert trainer(tmp_path, listeners=[fail]).fit("3 steps").steps == 3
    assert "no more paper" in caplog.text


def test_own_step_returns_loss_and_values(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        images, labels = batch
        outputs = model(images)
        return {
            "loss": nn.functional.cross_entropy(outputs, labels),
            "confidence": outputs.softmax(1).amax(1).mean(),
            "outputs": outputs,
            "targets": labels,
        }

    images, labels = images_and_labels(40)
    made = trainer(
        tmp_path,
        loss=None,
        step=step,
        data=mh.Data(train=TensorDataset(images, labels), validation=TensorDataset(images, labels), batch_size=10),
        metrics={"accuracy": MulticlassAccuracy(num_classes=10, average="micro")},
    )
    result = made.fit("1 epoch")
    assert set(result.validation) == {"loss", "confidence", "accuracy"}
    assert all(0 < line["values"]["confidence"] <= 1 for line in step_lines(tmp_path))


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.images, self.labels = images_and_labels(count)

    def __iter__(self) -> Any:
        return iter(zip(self.images, self.labels, strict=True))


def test_stream_trains_and_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    data = mh.Data(train=Stream(35), batch_size=10)
    whole = trainer(tmp_path / "whole", data=data).fit("2 epochs")
    assert whole.steps == 8
    trainer(tmp_path / "parts", data=data).fit("6 steps")
    assert trainer(tmp_path / "parts", data=data).fit("2 epochs").weights_sha256 == whole.weights_sha256


def test_chain_of_streams_that_have_no_length_trains(tmp_path: Path) -> None:
    chained = ChainDataset([Stream(25), Stream(25)])
    result = trainer(tmp_path, data=mh.Data(train=chained, batch_size=20)).fit("2 steps")
    assert result.steps == 2


def test_warm_up_of_a_stream_must_be_in_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is not known how many steps"):
        trainer(tmp_path, data=mh.Data(train=Stream(35), batch_size=10), warmup="1 epoch")


@pytest.mark.parametrize("kind", ["run directory", "snapshot", "pt", "safetensors"])
def test_training_begins_from_given_weights(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    first = trainer(tmp_path / "first")
    result = first.fit("3 steps")
    path = {
        "run directory": tmp_path / "first",
        "snapshot": tmp_path / "first" / "snapshots" / "step-00000003",
        "pt": tmp_path / "weights.pt",
        "safetensors": tmp_path / "weights.safetensors",
    }[kind]
    torch.save(first.model.state_dict(), tmp_path / "weights.pt")
    save_file(first.model.state_dict(), tmp_path / "weights.safetensors")
    from manyhosts.snapshot.fingerprint import weights_sha256

    assert weights_sha256(trainer(tmp_path / "second", init_from=path, seed=9).model) == result.weights_sha256


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "other.pt")
    with pytest.raises(ConfigError, match="of another model"):
        trainer(tmp_path / "run", init_from=tmp_path / "other.pt")


def test_run_directory_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).fit("2 steps")
    with pytest.raises(SnapshotError, match="of another model"):
        trainer(tmp_path, model=lambda: network(batch_norm=True)).fit("4 steps")


def test_parameters_that_are_not_trained_stay_as_they_are(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        model = network()
        model[0].requires_grad_(False)
        return model

    made = trainer(tmp_path, model=frozen)
    before = made.model[0].weight.clone()  # type: ignore[index]
    made.fit("3 steps")
    assert torch.equal(made.model[0].weight, before)  # type: ignore[index]


def test_module_that_the_user_put_into_evaluation_mode_is_validated_and_restored(tmp_path: Path) -> None:
    images, labels = images_and_labels(20)
    data = mh.Data(train=TensorDataset(images, labels), validation=TensorDataset(images, labels), batch_size=10)
    made = trainer(tmp_path, data=data, model=lambda: network(dropout=0.5))
    made.fit("1 epoch")
    made.model.train()
    made.model[4].eval()  # type: ignore[index]
    made.validate()
    assert made.model.training
    assert not made.model[4].training  # type: ignore[index]


def test_validation_event_says_which_was_best(tmp_path: Path) -> None:
    heard: list[ValidationDone] = []

    def note(event: Event) -> None:
        if isinstance(event, ValidationDone):
            heard.append(event)

    make_trainer(Recipe(), tmp_path, listeners=[note]).fit("3 epochs")
    best = math.inf
    for event in heard:
        assert event.best == (event.values["loss"] < best)
        best = min(best, event.values["loss"])


def test_finished_run_keeps_the_record_of_what_trained_it(tmp_path: Path) -> None:
    """Asked again with other settings it does no step, so nothing of them is what the run was made with."""
    trainer(tmp_path).fit("2 epochs")
    first = json.loads((tmp_path / "run.json").read_text())
    state = (tmp_path / "provenance" / "state.json").read_bytes()
    again = trainer(tmp_path, clip_gradients=1.0, precision="bf16").fit("1 epoch")
    assert again.steps == 8
    record = json.loads((tmp_path / "run.json").read_text())
    assert record.pop("started") > first.pop("started")
    assert record == first
    assert (tmp_path / "provenance" / "state.json").read_bytes() == state
    trainer(tmp_path, clip_gradients=1.0).fit("3 epochs")
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["clip_gradients"] == 1.0


def test_finished_run_keeps_its_best_model_and_its_summary(tmp_path: Path) -> None:
    """Also where the best model is that of the last step, which a run that is asked again has just validated."""
    pictures = TensorDataset(*images_and_labels(40))
    trainer(tmp_path, data=mh.Data(train=pictures, validation=pictures, batch_size=10)).fit("2 epochs")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "best").iterdir()}
    assert json.loads((tmp_path / "summary.json").read_text())["best"]["step"] == 8, "the last one must be the best"
    other = mh.Data(train=pictures, validation=pictures, batch_size=20)
    assert trainer(tmp_path, data=other, clip_gradients=1.0).fit("2 epochs").steps == 8
    assert not any("changed since" in line["text"] for line in lines(tmp_path, "note")), "nothing takes effect"
    assert {path.name: path.read_bytes() for path in (tmp_path / "best").iterdir()} == kept
    assert json.loads((tmp_path / "summary.json").read_text())["steps_per_epoch"] == 4


def test_best_model_of_a_run_whose_snapshots_are_gone_is_kept(tmp_path: Path) -> None:
    pictures = mh.Data(train=TensorDataset(*images_and_labels(40)), validation=TensorDataset(*images_and_labels(40)),
                       batch_size=10)  # fmt: skip
    trainer(tmp_path, data=pictures).fit("2 epochs")
    best = {path.name: path.read_bytes() for path in (tmp_path / "best").iterdir()}
    recorded = (tmp_path / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "snapshots")
    trainer(tmp_path, data=pictures, seed=1).fit("1 epoch")
    (kept,) = tmp_path.glob("before-*")
    assert {path.name: path.read_bytes() for path in (kept / "best").iterdir()} == best
    assert (kept / "metrics.jsonl").read_bytes() == recorded
    assert any(f"the best model, are in {kept}" in line["text"] for line in lines(tmp_path, "note"))
    trainer(tmp_path, data=pictures, seed=1).fit("2 epochs")
    assert list(tmp_path.glob("before-*")) == [kept]


def test_second_fit_counts_what_is_done(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.fit("1 epoch")
    assert made.fit("2 epochs").steps == 8
    once = trainer(tmp_path / "once").fit("2 epochs")
    assert made.fit("2 epochs").weights_sha256 == once.weights_sha256


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch has deprecated
def test_compiled_model_trains_to_the_same_weights(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain")
    plain.fit("3 steps")
    compiled = trainer(tmp_path / "compiled", compile=True)
    compiled.fit("3 steps")
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(compiled.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_group_that_a_callback_adds_to_the_optimizer_is_refused(tmp_path: Path) -> None:
    class Adds(mh.Callback):
        def after_step(self, moment: Any) -> None:
            moment.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    with pytest.raises(ConfigError, match="with which no snapshot could be resumed"):
        trainer(tmp_path, callbacks=[Adds()]).fit("2 steps")


def test_finished_run_says_that_nothing_trains_with_what_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = trainer(tmp_path).fit("3 steps").weights_sha256
    capsys.readouterr()
    slower = trainer(tmp_path, optimizer=lambda params: torch.optim.SGD(params, lr=0.01))
    assert slower.fit("3 steps").weights_sha256 == ended
    said = "this run is finished (all 3 steps done), so these new settings are not used: lr 0.1 → 0.01; ask"
    assert said in " ".join(capsys.readouterr().out.split())
