"""Bad input gets one clear error: what, where, fix."""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import events, images_and_labels, network
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from torchmetrics.classification import MulticlassAccuracy

import manyhosts as mh
from manyhosts.errors import ConfigError, DataError, ManyhostsError, TrainingError
from manyhosts.launchers.named_runs import failed_early


def dataset(samples: int = 20) -> TensorDataset:
    return TensorDataset(*images_and_labels(samples))


def trainer(run_dir: Path, **more: Any) -> mh.Trainer:
    arguments: dict[str, Any] = {
        "model": network,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "data": mh.Data(train=dataset(), validation=dataset(), batch_size=5),
        "run_dir": run_dir,
    }
    return mh.Trainer(**{**arguments, **more})


class Uncounted(TensorDataset):
    """Has as many samples as `count` says, of whatever type."""

    def __init__(self, count: Any) -> None:
        super().__init__(torch.zeros(4, 1))
        self.count = count

    def __len__(self) -> int:
        return self.count  # type: ignore[no-any-return]


class Empty(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no batch size": ({"data": lambda: mh.Data(train=dataset())}, "no batch size"),
    "batch size 0": ({"data": lambda: mh.Data(train=dataset(), batch_size=0)}, "batch_size is 0"),
    "two batch sizes": (
        {"data": lambda: mh.Data(train=dataset(), batch_size=5, batch_size_per_worker=5)},
        "both batch_size",
    ),
    "no samples": ({"data": lambda: mh.Data(train=TensorDataset(torch.zeros(0, 1)), batch_size=5)}, "0 samples"),
    "half a sample": ({"data": lambda: mh.Data(train=Uncounted(2.5), batch_size=5)}, "cannot say how many samples"),
    "fewer than none": ({"data": lambda: mh.Data(train=Uncounted(-3), batch_size=5)}, "cannot say how many samples"),
    "a loader": ({"data": lambda: mh.Data(train=DataLoader(dataset()), batch_size=5)}, "DataLoader"),
    "a stream to validate": ({"data": lambda: mh.Data(train=dataset(), validation=Empty(), batch_size=5)}, "a stream"),
    "no set by name": (
        {"data": lambda: mh.Data(dataset(), validation={}, batch_size=5)},
        "no validation set in an empty",
    ),
    "a set without a name": ({"data": lambda: mh.Data(dataset(), test={"": dataset()}, batch_size=5)}, "'' is no name"),
    "a set with a path": ({"data": lambda: mh.Data(dataset(), test={"a/b": dataset()}, batch_size=5)}, "'a/b' is no"),
    "a set with a number": (
        {"data": lambda: mh.Data(dataset(), validation={1: dataset()}, batch_size=5)},
        "1 is no name",
    ),
    "sets to train on by number": (
        {"data": lambda: mh.Data({0: dataset(), 1: dataset()}, batch_size=5)},
        "the train set is a dict of 0, 1",
    ),
    "one of several is no dataset": (
        {"data": lambda: mh.Data(dataset(), validation={"clean": dataset(), "noisy": 3}, batch_size=5)},
        "the validation/noisy set is a int",
    ),
    "a batch too large to drop": (
        {"data": lambda: mh.Data(train=dataset(3), batch_size=5, drop_last=True)},
        "drop_last leaves nothing",
    ),
    "neither loss nor step": ({"loss": None}, "neither loss nor step"),
    "loss and step": ({"step": lambda model, batch: None}, "both loss and step"),
    "no model": ({"model": lambda: 3}, "the model is a int"),
    "nothing to train": ({"model": nn.ReLU}, "no parameter"),
    "no optimizer": ({"optimizer": lambda params: None}, "gave a NoneType"),
    "no metric": ({"metrics": {"accuracy": max}}, "the metric 'accuracy'"),
    "unknown precision": ({"precision": "fp8"}, "precision is 'fp8'"),
    "unknown strategy": ({"strategy": "dpp"}, "no strategy named 'dpp'"),
    "nccl without a GPU": ({"backend": "nccl"}, "no GPU"),
    "computing again more than all": ({"activation_checkpointing": 1.5}, "activation_checkpointing is 1.5"),
    "computing again without blocks": ({"activation_checkpointing": "blocks"}, "the model has no blocks"),
    "clipping at 0": ({"clip_gradients": 0.0}, "clip_gradients is 0"),
    "scaling without growth": ({"lr_scaling": "linear"}, "nothing to follow"),
    "warm-up by the clock": ({"warmup": "10 min"}, "is a time"),
    "validation never": ({"validate_every": "sometimes"}, "cannot read the duration 'sometimes'"),
    "watching nothing": (
        {"data": lambda: mh.Data(train=dataset(), batch_size=5), "early_stopping": mh.EarlyStopping("loss")},
        "no validation set",
    ),
    "weights that are not there": ({"init_from": "nowhere.pt"}, "cannot read the weights"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.skipif(torch.cuda.is_available(), reason="one case is about a machine without a GPU")
def test_trainer_refuses_with_a_sentence(case: str, tmp_path: Path) -> None:
    arguments, expected = CASES[case]
    with pytest.raises(ManyhostsError) as caught:
        trainer(tmp_path / "run", **{key: value() if key == "data" else value for key, value in arguments.items()})
    assert expected in caught.value.what
    assert caught.value.fix
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists(), "nothing is made for a run that cannot begin"


@pytest.mark.parametrize(
    "duration", ["soon", "20", "-3 epochs", "0 steps", "2 parsecs", "1.5 steps", "3 epochs or 4 epochs"]
)
def test_unreadable_duration_is_an_error_with_examples(duration: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path / "run").fit(duration)
    assert duration in caught.value.what
    assert "20 epochs" in caught.value.fix


class InADict(nn.Module):
    """Returns what models of Hugging Face return."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.network(images), "hidden": images}


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_a_model_that_returns_a_dict_to_a_loss_of_pytorch_is_told_of(loss: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the model returns a dict \(logits, hidden\), and the loss takes a tensor"):
        trainer(tmp_path, model=InADict, loss=loss).fit("1 step")


def test_a_loss_of_ones_own_takes_a_dict(tmp_path: Path) -> None:
    def of_logits(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs["logits"], targets)

    assert trainer(tmp_path, model=InADict, loss=of_logits).fit("1 step").steps == 1


def test_a_loss_that_returns_more_than_itself_is_told_of(tmp_path: Path) -> None:
    def both(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(outputs, targets), outputs

    with pytest.raises(ConfigError, match="the loss is a tuple, but must be a tensor of one number"):
        trainer(tmp_path, loss=both).fit("1 step")


def test_a_value_beside_the_loss_that_is_no_number_is_told_of(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1]), "pair": (1, 2)}

    with pytest.raises(ConfigError, match=r"'pair' is a tuple(.|\n)*where: mh\.Trainer\(step=…\)"):
        trainer(tmp_path, loss=None, step=step).fit("1 step")


def test_metric_that_nobody_reports_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, early_stopping=mh.EarlyStopping("acuracy", mode="max")).fit("1 epoch")
    assert "'acuracy'" in caught.value.what
    assert "loss" in caught.value.fix


class Own(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(20))


@pytest.mark.parametrize(
    ("loader", "advice"),
    [
        (
            DataLoader(dataset(), sampler=WeightedRandomSampler([1.0] * 20, 20)),
            "Its WeightedRandomSampler would be lost",
        ),
        (DataLoader(dataset(), batch_sampler=[[0, 1], [2]]), "Its list would be lost with that"),
        (DataLoader(dataset(), sampler=Own()), "Its Own would be lost with that"),
        (DataLoader(dataset()), "It does not shuffle, and mh.Data does: shuffle=False"),
        (DataLoader(dataset(), shuffle=True, collate_fn=list), "Give its collate_fn, too"),
        (DataLoader(dataset(), shuffle=True), ""),
    ],
    ids=["weights", "batches", "own", "in order", "collate", "plain"],
)
def test_advice_about_a_loader_drops_nothing_in_silence(loader: DataLoader[Any], advice: str) -> None:
    with pytest.raises(ConfigError, match="is a DataLoader") as caught:
        mh.Data(train=loader, batch_size=5)
    assert advice in caught.value.fix
    assert ("lost" in caught.value.fix) is ("lost" in advice)
    assert ("class" in caught.value.fix) is ("lost" in advice), "what balances classes here"


def test_advice_about_a_loader_of_held_out_samples_changes_nothing_of_the_training() -> None:
    with pytest.raises(ConfigError, match="the validation set is a DataLoader") as caught:
        mh.Data(train=dataset(), validation=DataLoader(dataset(), batch_size=4), batch_size=5)
    assert caught.value.fix == "give its dataset: mh.Data(validation=loader.dataset, evaluation_batch_size=4)"
    chosen = DataLoader(dataset(), sampler=torch.utils.data.SubsetRandomSampler([1, 2]))
    with pytest.raises(ConfigError, match="DataLoader") as caught:
        mh.Data(train=dataset(), validation=chosen, batch_size=5)
    assert "Its SubsetRandomSampler would be lost with that: give the samples that it chooses" in caught.value.fix


class Wordless(MulticlassAccuracy):
    """A metric that says nothing of its direction."""

    higher_is_better = None


@pytest.mark.parametrize(
    ("metric", "metrics", "what"),
    [
        ("score", {"score": Wordless(num_classes=10)}, "does not say whether higher or lower is better"),
        ("perplexity", {}, "no metric of mh.Trainer(metrics=…) has that name"),
    ],
    ids=["silent", "none"],
)
def test_metric_of_unknown_direction_is_refused_before_the_first_step(
    metric: str, metrics: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        trainer(tmp_path, metrics=metrics, early_stopping=mh.EarlyStopping(metric))
    assert f'mh.EarlyStopping("{metric}", mode="max") if higher is better' in caught.value.fix
    assert ("choose one of loss" in caught.value.fix) == (not metrics)


def regression(columns: int) -> mh.Data:
    images, labels = images_and_labels(20)
    targets = labels.float()
    return mh.Data(TensorDataset(images, targets[:, None] if columns else targets), batch_size=5)


def one_number(*, flat: bool) -> nn.Module:
    return nn.Sequential(network(), nn.Linear(10, 1), *([nn.Flatten(0)] if flat else []))


OF_OTHER_SHAPES = {
    "a column and a row": (nn.MSELoss(), False, 0),
    "a row and a column": (nn.functional.l1_loss, True, 1),
    "of a partial": (functools.partial(nn.functional.huber_loss, delta=2.0), False, 0),
}


@pytest.mark.parametrize("case", OF_OTHER_SHAPES)
def test_targets_that_would_be_broadcast_are_refused(case: str, tmp_path: Path) -> None:
    """PyTorch warns, and computes the loss of each output against the targets of all samples."""
    loss, flat, columns = OF_OTHER_SHAPES[case]
    with pytest.raises(ConfigError, match=r"outputs have shape \(5(, 1)?,?\).*would broadcast") as caught:
        trainer(tmp_path, model=one_number(flat=flat), loss=loss, data=regression(columns)).fit("1 step")
    assert ".squeeze(-1)" in caught.value.fix


@pytest.mark.parametrize("columns", [0, 1])
def test_model_of_more_numbers_than_its_targets_is_refused(columns: int, tmp_path: Path) -> None:
    """Of targets in a column PyTorch would broadcast each to all of them, and only warn."""
    with pytest.raises(ConfigError, match=r"outputs have shape \(5, 10\)") as caught:
        trainer(tmp_path, loss=nn.MSELoss(), data=regression(columns)).fit("1 step")
    assert "the model gives 10 numbers for a sample, and its target is 1" in caught.value.fix


def test_targets_of_the_same_shape_are_trained_with(tmp_path: Path) -> None:
    for columns in (0, 1):
        made = trainer(
            tmp_path / str(columns), model=one_number(flat=not columns), loss=nn.MSELoss(), data=regression(columns)
        )
        assert made.fit("1 step").steps == 1


def test_a_loss_of_ones_own_may_broadcast(tmp_path: Path) -> None:
    def ranks(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets[:, None]).square().mean()

    made = trainer(tmp_path, model=one_number(flat=False), loss=ranks, data=regression(0))
    assert made.fit("1 step").steps == 1


@pytest.mark.parametrize("subtracts", [torch.sub, lambda outputs, targets: nn.functional.mse_loss(outputs, targets)])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_loss_of_ones_own_that_holds_a_column_against_a_row_is_refused(subtracts: Any, tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return subtracts(outputs, targets).square().mean()

    with pytest.raises(ConfigError, match=r"shape \(5, 1\) and the targets \(5,\).* gives 5 times 5 numbers"):
        trainer(tmp_path, model=one_number(flat=False), loss=loss, data=regression(0)).fit("1 step")


def test_loss_of_ones_own_may_make_pairs_of_its_own(tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets[None, :]).square().mean()

    assert trainer(tmp_path, model=one_number(flat=False), loss=loss, data=regression(0)).fit("1 step").steps == 1


def test_scores_without_a_row_for_each_sample_are_refused(tmp_path: Path) -> None:
    """Cross entropy would take the samples for the classes of one."""
    with pytest.raises(ConfigError, match="takes a row of scores, one for each class, for every sample") as caught:
        trainer(tmp_path, model=one_number(flat=True), data=regression(0)).fit("1 step")
    assert "BCEWithLogitsLoss" in caught.value.fix


@pytest.mark.parametrize("choice", ["skip", "rewind"])
def test_run_whose_steps_were_all_left_out_has_failed(choice: str, tmp_path: Path) -> None:
    images, labels = images_and_labels(20)
    data = mh.Data(TensorDataset(images * math.nan, labels), batch_size=5)
    with pytest.raises(TrainingError, match="each of the 3 steps was left out, so no weight has changed"):
        trainer(tmp_path, data=data, on_bad_step=choice).fit("3 steps")
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_run_that_has_trained_before_it_was_resumed_is_no_failure_where_the_rest_is_left_out(tmp_path: Path) -> None:
    images, labels = images_and_labels(20)
    images[17] = math.nan
    data = mh.Data(TensorDataset(images, labels), batch_size=5, shuffle=False)
    for steps in (3, 4):
        assert trainer(tmp_path, data=data, on_bad_step="skip").fit(f"{steps} steps").steps == steps


def test_steps_that_were_left_out_are_counted_at_the_end(tmp_path: Path) -> None:
    images, labels = images_and_labels(20)
    images[7] = math.nan
    data = mh.Data(TensorDataset(images, labels), batch_size=5, shuffle=False)
    assert trainer(tmp_path, data=data, on_bad_step="skip").fit("4 steps").steps == 4
    notes = [line["text"] for line in events(tmp_path, "note")]
    assert "1 step was left out of the 4 until here" in notes
    assert math.isfinite(json.loads((tmp_path / "summary.json").read_text())["train_loss"])


def test_steps_that_were_left_out_are_counted_of_those_that_this_start_has_made(tmp_path: Path) -> None:
    images, labels = images_and_labels(30)
    images[[7, 17]] = math.nan
    data = mh.Data(TensorDataset(images, labels), batch_size=5, shuffle=False)
    for steps in (3, 6):
        trainer(tmp_path, data=data, on_bad_step="skip").fit(f"{steps} steps")
    notes = [line["text"] for line in events(tmp_path, "note") if "left out of" in line["text"]]
    assert notes == ["1 step was left out of the 3 until here", "1 step was left out of steps 4 to 6"]


@pytest.mark.parametrize(
    ("loss", "targets", "what", "fix"),
    [
        (nn.CrossEntropyLoss(), torch.rand(8), "3) of float32 with targets (", "of int64"),
        (nn.CrossEntropyLoss(), torch.full((8,), 3), "Target 3 is out of bounds", "from 0 to classes - 1"),
        (nn.functional.cross_entropy, torch.zeros(8, 1, dtype=torch.int64), ", 1) of int64: ", "(N) of int64"),
        (nn.BCEWithLogitsLoss(), torch.zeros(8, 2), ", 2) of float32: ", "both in one shape"),
    ],
    ids=["float", "range", "2-D", "pairs"],
)
@pytest.mark.parametrize("is_validated", [True, False])
def test_targets_that_a_loss_cannot_take_are_said_in_a_sentence(
    loss: Any, targets: torch.Tensor, what: str, fix: str, is_validated: bool, tmp_path: Path
) -> None:
    samples = TensorDataset(torch.randn(8, 4), targets)
    data = mh.Data(samples, validation=samples if is_validated else None, batch_size=5)
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, model=nn.Linear(4, 3), loss=loss, data=data).fit("1 epoch")
    assert what in caught.value.what
    assert fix in caught.value.fix


@pytest.mark.parametrize("of_model", [torch.float32, torch.float64])
def test_numbers_of_numpy_are_refused_by_a_model_that_cannot_take_them(of_model: torch.dtype, tmp_path: Path) -> None:
    samples = TensorDataset(torch.randn(8, 4, dtype=torch.float64), torch.zeros(8, dtype=torch.int64))
    given: dict[str, Any] = {"model": nn.Linear(4, 3).to(of_model), "data": mh.Data(samples, batch_size=4)}
    if of_model == torch.float64:
        assert trainer(tmp_path, **given).fit("1 epoch").steps == 2
        return
    with pytest.raises(ConfigError, match="the model cannot take inputs of float64, as NumPy makes them") as caught:
        trainer(tmp_path, **given).fit("1 epoch")
    assert "float32" in caught.value.fix


def rising(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30)


def cyclic(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 5)


@pytest.mark.parametrize("schedule", [rising, cyclic])
def test_rate_that_a_schedule_sets_itself_is_refused_besides_it(
    schedule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path / "a", schedule=schedule).fit("1 epoch")
    data = mh.Data(dataset(), batch_size_per_worker=5)
    with pytest.raises(ConfigError, match=r"lr_scaling would have no effect: (OneCycle|Cyclic)LR begins with"):
        trainer(tmp_path / "b", schedule=schedule, data=data, lr_scaling="linear").fit("1 epoch")
    monkeypatch.setenv("MANYHOSTS_SET", '{"lr": "0.5"}')
    with pytest.raises(ConfigError, match="lr would have no effect"):
        trainer(tmp_path / "c", schedule=schedule).fit("1 epoch")


def test_schedule_that_computes_with_the_rate_takes_the_one_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rising_to(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 10 * optimizer.param_groups[0]["lr"], total_steps=30)

    monkeypatch.setenv("MANYHOSTS_SET", '{"lr": "0.5"}')
    trainer(tmp_path, schedule=rising_to).fit("1 epoch")
    assert events(tmp_path, "step")[0]["lr"] == pytest.approx(10 * 0.5 / 25)


def test_best_model_is_that_of_the_best_validation_however_little_better(tmp_path: Path) -> None:
    rule = mh.EarlyStopping("loss", patience=3, min_delta=100.0)
    trained = trainer(tmp_path, early_stopping=rule)
    trained.fit("9 epochs")
    losses = [row["values"]["loss"] for row in events(tmp_path, "validation")]
    assert len(losses) == 4, "the first, and three that were not better by so much"
    assert trained.validate()["loss"] == pytest.approx(min(losses)) != losses[0]


@pytest.mark.parametrize("weights", ["bset", None, 3])
def test_weights_that_are_neither_the_best_nor_the_last_are_refused(weights: Any, tmp_path: Path) -> None:
    made = trainer(tmp_path, data=mh.Data(dataset(), validation=dataset(), test=dataset(), batch_size=5))
    for use in (
        made.validate,
        made.test,
        functools.partial(made.predict, dataset()),
        functools.partial(made.save, tmp_path / "a.pt"),
    ):
        with pytest.raises(ConfigError, match="weights is") as refused:
            use(weights=weights)
        assert refused.value.fix == 'choose "best" or "last"'


def test_evaluation_of_a_model_that_was_not_trained_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = mh.Data(dataset(), test=dataset(), batch_size=5)
    trainer(tmp_path / "a", data=data).test()
    said = "tested: the last weights, of step 0: fit was not called, and they are those that the model begins with"
    assert said in capsys.readouterr().err
    trainer(tmp_path / "b", data=data, model=network()).test()  # which may have been trained elsewhere
    assert "tested" not in capsys.readouterr().err


def test_metric_that_cannot_take_the_outputs_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the metric 'right', a MulticlassAccuracy, cannot take outputs"):
        trainer(tmp_path, metrics={"right": MulticlassAccuracy(num_classes=7)}).fit("1 epoch")


def test_step_that_goes_backward_itself_is_said_in_a_validation_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)  # a script, and no notebook

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    with pytest.raises(ConfigError, match="a graph is gone through backward twice") as caught:
        trainer(tmp_path / "alone", loss=None, step=step, data=mh.Data(dataset(), batch_size=5)).fit("1 epoch")
    assert "leave backward(), zero_grad() and optimizer.step() to the trainer" in caught.value.fix
    data = mh.Data(dataset(), validation=dataset(), batch_size=5)
    with pytest.raises(ConfigError, match="asks for a gradient itself, with backward") as caught:
        trainer(tmp_path, loss=None, step=step, data=data).fit("1 epoch")
    assert "leave backward() to the trainer" in caught.value.fix
    assert "ConfigError: the script asks for a gradient itself" in failed_early(tmp_path)


def test_validation_that_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    images, labels = images_and_labels(20)
    bad = TensorDataset(images * math.nan, labels)
    made = trainer(tmp_path, data=mh.Data(train=dataset(), validation=bad, batch_size=5))
    assert made.fit("2 epochs").best is None
    assert not (tmp_path / "best").exists() or not any((tmp_path / "best").iterdir())
    assert [line["best"] for line in events(tmp_path, "validation")] == [False, False]


def test_unknown_setting_is_an_error_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHOSTS_SET", '{"batch_sise": "3"}')
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path)
    assert "'batch_size'" in caught.value.fix


def test_settings_are_overridden_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHOSTS_SET", '{"batch_size": "4", "lr": "0.5", "duration": "3 steps"}')
    made = trainer(tmp_path)
    assert made.components.optimizer.param_groups[0]["lr"] == 0.5
    assert made.fit("9 steps").steps == 3
    assert made.components.batches.size == 4


def test_loss_that_is_no_number_stops_with_step_samples_and_snapshot(tmp_path: Path) -> None:
    images, labels = images_and_labels(20)
    images[7] = float("nan")
    run = trainer(
        tmp_path / "run",
        data=mh.Data(train=TensorDataset(images, labels), batch_size=2, shuffle=False),
        snapshots=mh.Snapshots(every="1 steps"),
    )
    with pytest.raises(TrainingError) as caught:
        run.fit("1 epoch")
    assert caught.value.what == "the loss is nan in step 4"
    assert caught.value.where == "epoch 1, samples [6, 7]", "epochs are counted as the screen counts them"
    assert "step-00000003" in caught.value.fix
    assert '"status": "failed"' in (tmp_path / "run" / "summary.json").read_text()


class Broken(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        if index == 11:
            raise OSError("half-written file")
        return super().__getitem__(index)


class BrokenStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from TensorDataset(*images_and_labels(11))
        raise OSError("half-written file")


@pytest.mark.parametrize("processes", [0, 1], ids=["in the worker", "in a loader process"])
@pytest.mark.parametrize(
    ("dataset", "what"),
    [(Broken(*images_and_labels(20)), "sample 11 of the train set"), (BrokenStream(), "the train stream")],
    ids=["by index", "stream"],
)
def test_what_cannot_be_read_is_named_with_the_line_and_no_traceback_of_a_loader(
    dataset: Any, what: str, processes: int, tmp_path: Path
) -> None:
    data = mh.Data(train=dataset, batch_size=5, loader_workers=processes)
    with pytest.raises(DataError) as caught:
        trainer(tmp_path / "run", data=data).fit("1 epoch")
    assert caught.value.what == f"{what} cannot be read: OSError: half-written file"
    assert f"{__file__}, line " in caught.value.where
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", caught.value.what)


def test_run_directory_of_another_script_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).fit("1 steps")
    record = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**record, "script": "another.py", "script_sha256": "0" * 64}))
    with pytest.raises(ConfigError, match="run directory of"):
        trainer(tmp_path).fit("2 steps")


def test_batch_that_is_no_pair_is_told_how_to_pass_a_step(tmp_path: Path) -> None:
    images, labels = images_and_labels(20)
    data = mh.Data(train=TensorDataset(images, labels, labels), batch_size=5)
    with pytest.raises(ConfigError, match="not an \\(inputs, targets\\) pair"):
        trainer(tmp_path, data=data).fit("1 epoch")


def test_loss_that_is_not_reduced_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the loss has shape"):
        trainer(tmp_path, loss=nn.CrossEntropyLoss(reduction="none")).fit("1 epoch")


def test_loss_of_none_of_several_sets_is_refused_before_the_first_step(tmp_path: Path) -> None:
    several = mh.Data(dataset(), validation={"clean": dataset(), "noisy": dataset()}, batch_size=5)
    made = trainer(tmp_path, data=several, early_stopping=mh.EarlyStopping("loss"))
    with pytest.raises(ConfigError, match="early stopping watches 'loss', which no one reports") as found:
        made.fit("1 epoch")
    assert "clean/loss, noisy/loss" in found.value.fix


@pytest.mark.parametrize("wrapped", ["the model", "a part of it"])
def test_model_in_a_wrapper_that_exchanges_by_itself_is_refused(wrapped: str, tmp_path: Path) -> None:
    """Two reducers would race, and most runs end as if nothing was wrong."""

    class DistributedDataParallel(nn.Module):  # the real one wants a process group
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    inner, optimizer = DistributedDataParallel(network()), {"net": lambda params: torch.optim.SGD(params, lr=0.1)}
    with pytest.raises(ConfigError, match="the model is wrapped in DistributedDataParallel") as caught:
        trainer(tmp_path, model=inner if wrapped == "the model" else nn.Sequential(inner))
    assert "give the module itself" in caught.value.fix
    with pytest.raises(ConfigError, match="the model is wrapped in DistributedDataParallel"):
        mh.Run(
            models={"net": lambda: inner}, optimizers=optimizer, data=mh.Data(dataset(), batch_size=5), run_dir=tmp_path
        )


def test_validation_that_is_nan_is_said_once(tmp_path: Path) -> None:
    images, labels = images_and_labels(20)
    bad = TensorDataset(images * math.nan, labels)
    stopping = mh.EarlyStopping("loss", patience=3)
    data = mh.Data(train=dataset(), validation=bad, batch_size=5)
    result = trainer(tmp_path, data=data, early_stopping=stopping).fit("9 epochs")
    assert result.reason == "loss has not become better for 3 validations (it is nan)"
    notes = [line["text"] for line in events(tmp_path, "note") if "never the best" in line["text"]]
    assert notes == ["the validation of step 4 gives loss nan, which is never the best: see its samples for nan"]
