"""What would have no effect, or another one than was meant, is refused before the first step, or said."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import events
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import manyhosts as mh
from manyhosts.config import overrides
from manyhosts.errors import ConfigError

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
SET = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def trainer(**more: Any) -> mh.Trainer:
    arguments: dict[str, Any] = {
        "model": net,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": sgd,
        "data": mh.Data(SET, validation=SET, test=SET, batch_size=16),
    }
    return mh.Trainer(**{**arguments, **more})


def adamw(lr: Any = 1e-2, **by_name: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(mh.groups(params, by_name) if by_name else params, lr=lr)


def rateless(params: Any) -> torch.optim.Optimizer:
    made = sgd(params)
    made.param_groups[0]["lr"] = None
    return made


def accuracy() -> dict[str, Any]:
    return {"accuracy": MulticlassAccuracy(num_classes=2)}


def plateau(mode: Any) -> dict[str, Any]:
    return {
        "metrics": accuracy(),
        "early_stopping": mh.EarlyStopping("accuracy", patience=50),
        "schedule": lambda optimizer: ReduceLROnPlateau(optimizer, mode=mode),
    }


def with_value(model: nn.Module, batch: Any) -> dict[str, Any]:
    outputs = model(batch[0])
    loss = functional.cross_entropy(outputs, batch[1])
    return {"loss": loss, "accuracy": loss.detach(), "outputs": outputs, "targets": batch[1]}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a plateau against its metric": (lambda: trainer(**plateau("min")), "mode='min', and it follows 'accuracy'"),
    "an option that nobody reads": (
        lambda: trainer(optimizer=adamw(**{"0": {"learning_rate": 1e-5}})),
        "AdamW has no option 'learning_rate'",
    ),
    "a rate that is a text": (lambda: trainer(optimizer=adamw(**{"0": {"lr": "1e-5"}})), "group 1 of AdamW is '1e-5'"),
    "no rate": (lambda: trainer(optimizer=rateless), "the learning rate of group 0 of SGD is None"),
    "a freeze of nothing": (lambda: mh.Freeze(until="3 epochs"), "freezes nothing"),
    "a freeze of a list": (lambda: mh.Freeze(["0"], until="1 epoch"), "is given a list, no name"),  # type: ignore[arg-type]
    "a freeze that is never": (lambda: mh.Freeze("0", start="5 epochs", until="3 epochs"), "which is never"),
    "two freezes of one parameter": (
        lambda: trainer(callbacks=[mh.Freeze("0.*", start="8 steps"), mh.Freeze("0", until="4 steps")]),
        "0.bias is frozen and thawed by two callbacks, 'freeze 0",
    ),
    "two freezes of some in common": (
        lambda: trainer(callbacks=[mh.Freeze("0", until="4 steps"), mh.Freeze("*.bias", start="8 steps")]),
        "0.bias is frozen and thawed by two callbacks, 'freeze 0 until 4 steps' and 'freeze [*].bias from 8 steps'",
    ),
    "one freeze that undoes another": (
        lambda: trainer(callbacks=[mh.Freeze("0"), mh.Freeze("*.bias", until="8 steps")]),
        "0.bias is frozen and thawed by two callbacks",
    ),
    "two freezes of one module": (
        lambda: trainer(callbacks=[mh.Freeze("0", until="4 steps"), mh.Freeze("0", start="8 steps")]),
        "'freeze 0 until 4 steps' and 'freeze 0 from 8 steps'",
    ),
    "a decay that is a text": (lambda: mh.EMA("0.99"), "decay is '0.99'"),  # type: ignore[arg-type]
    "a warm-up in steps": (lambda: mh.EMA(0.9, warmup="500 steps"), "warmup is '500 steps'"),  # type: ignore[arg-type]
    "no snapshots": (lambda: trainer(snapshots=False), "snapshots is False"),
    "a value with the name of a metric": (
        lambda: trainer(loss=None, step=with_value, metrics=accuracy()).fit("1 epoch"),
        "'accuracy' is a value that step returns, and the name of a metric",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_have_no_effect_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, what = REFUSED[case]
    with pytest.raises(ConfigError, match=what) as told:
        make()
    assert told.value.where
    assert told.value.fix


def test_plateau_that_goes_with_its_metric_is_taken() -> None:
    trainer(**plateau("max"))


def test_callbacks_and_listeners_of_an_iterator_are_all_there(tmp_path: Path) -> None:
    heard: list[Any] = []
    ema = mh.EMA(0.9)
    made = trainer(callbacks=filter(None, [ema]), listeners=(each for each in [heard.append]), run_dir=tmp_path)
    made.fit("1 epoch")
    assert ema.count == 6
    assert heard


def test_parameters_that_are_thawed_by_hand_are_not_left_as_they_are_in_silence(tmp_path: Path) -> None:
    model = net()
    model[0].requires_grad_(False)  # type: ignore[index]
    made = trainer(model=model, run_dir=tmp_path)
    made.fit("1 epoch")
    model[0].requires_grad_(True)  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"0\.weight was frozen when the trainer was made"):
        made.fit("2 epochs")


@pytest.mark.parametrize(
    ("start", "said"), [("20 epochs", "not averaged: swa had not begun"), ("1 epoch", "averaged (swa)")]
)
def test_weights_are_called_averaged_where_they_are(start: str, said: str, tmp_path: Path) -> None:
    made = trainer(callbacks=[mh.SWA(start)], run_dir=tmp_path)
    made.fit("3 epochs")
    made.validate(weights="last")
    assert said in events(tmp_path, "note")[-1]["text"]


def test_best_weights_of_before_an_average_began_are_not_called_averaged(tmp_path: Path) -> None:
    made = trainer(callbacks=[mh.SWA("2 epochs")], run_dir=tmp_path, on_bad_step="skip", seed=3)
    made.fit("3 epochs")
    best = made._run.state.best_step  # type: ignore[union-attr]
    made.validate()
    assert ("not averaged" in events(tmp_path, "note")[-1]["text"]) is (best < 12)


def test_callback_that_keeps_something_is_that_of_one_trainer() -> None:
    ema, told = mh.EMA(0.9), []

    class Says(mh.Callback):
        def after_step(self, moment: mh.Moment) -> None:
            told.append(moment.step)

    says = Says()
    first = trainer(callbacks=[ema, says])
    with pytest.raises(ConfigError, match="callback 'ema' is that of another trainer, too"):
        trainer(callbacks=[ema])
    trainer(callbacks=[says])
    del first
    trainer(callbacks=[ema])


def test_attribute_of_a_callback_that_no_snapshot_has_is_said_once(tmp_path: Path) -> None:
    class Counts(mh.Callback):
        seen, name = 0, "counts"

        def after_step(self, moment: mh.Moment) -> None:
            self.seen += 1

    trainer(callbacks=[Counts(), mh.EMA(0.9)], run_dir=tmp_path, snapshots=mh.Snapshots(every="2 steps")).fit("1 epoch")
    [said] = [each["text"] for each in events(tmp_path, "note") if "callback" in each["text"]]
    assert said.startswith("callback 'counts' changes its attribute seen, which no snapshot has")


def test_change_of_the_model_between_two_fits_is_said_to_be_gone(tmp_path: Path) -> None:
    made = trainer(run_dir=tmp_path)
    made.fit("1 epoch")
    made.fit("2 epochs")
    with torch.no_grad():
        made.model[0].weight.zero_()  # type: ignore[index]
    made.fit("3 epochs")
    said = [each for each in events(tmp_path, "note") if "the model was changed after the last fit" in each["text"]]
    assert len(said) == 1
    assert "the snapshot of step 12" in said[0]["text"]


def test_trained_weights_that_an_evaluation_does_not_use_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(run_dir=tmp_path).fit("1 epoch")
    capsys.readouterr()
    trainer(model=net(), run_dir=tmp_path).test()
    assert f"{tmp_path} holds weights that were trained: fit takes them up" in capsys.readouterr().err
    trainer(model=net(), run_dir=tmp_path / "other").test()
    assert "weights" not in capsys.readouterr().err


def test_loss_over_labels_is_counted_alike_when_a_finished_run_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.full((96, 6), -100)
    for index in range(96):
        labels[index, : 1 + index % 6] = torch.randint(2, (1 + index % 6,), generator=generator)
    tokens = TensorDataset(torch.randn(96, 6, 4, generator=generator), labels)

    def step(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def made(run_dir: Path = tmp_path) -> mh.Trainer:
        data = mh.Data(tokens, validation=tokens, test=tokens, batch_size=16)
        return mh.Trainer(model=net, step=step, optimizer=sgd, data=data, run_dir=run_dir)

    first, again = made(), made()
    first.fit("2 epochs")
    before = first.test()
    again.fit("2 epochs")
    assert again.test() == before
    capsys.readouterr()
    made(tmp_path / "none").test()
    assert "averaged over samples: no step of fit has shown" in capsys.readouterr().err


def test_epoch_begins_anew_with_all_its_sums_where_the_batch_changes(tmp_path: Path) -> None:
    one = TensorDataset(torch.randn(100, 4), torch.randint(2, (100,)))

    def made(batch: int) -> mh.Trainer:
        return trainer(data=mh.Data(one, batch_size=batch, drop_last=True), run_dir=tmp_path)

    made(30).fit("2 steps")
    made(50).fit("2 epochs")
    last, steps = events(tmp_path, "epoch")[-1], events(tmp_path, "step")[-2:]
    assert last["train_loss"] == pytest.approx(sum(each["loss"] for each in steps) / 2)


def test_metrics_without_a_set_and_processes_without_use_are_said(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(SET)

    trainer(data=mh.Data(Stream(), batch_size=16, loader_workers=4), metrics=accuracy(), run_dir=tmp_path).fit(
        "2 steps"
    )
    said = " ".join(each["text"] for each in events(tmp_path, "note"))
    assert "metrics= has no effect" in said
    assert "loader_workers=4: a stream is read by one process" in said


def test_rows_are_counted_from_the_end_as_pytorch_counts_them(tmp_path: Path) -> None:
    sets = [Subset(SET, [-1, -2, 0, 1]), Subset(SET, [95, 94, 0, 1])]
    losses = []
    for place, each in enumerate(sets):
        trainer(data=mh.Data(each, batch_size=2), run_dir=tmp_path / str(place)).fit("2 epochs")
        losses.append([line["loss"] for line in events(tmp_path / str(place), "step")])
    assert losses[0] == losses[1]


def test_step_that_the_scaler_leaves_out_has_not_updated(tmp_path: Path) -> None:
    updated = []

    class Sees(mh.Callback):
        def after_step(self, moment: mh.Moment) -> None:
            updated.append(moment.updated)

    ema = mh.EMA(0.9)
    trainer(
        precision="fp16",
        callbacks=[Sees(), ema],
        loss=lambda outputs, targets: 1e4 * functional.cross_entropy(outputs, targets),
        run_dir=tmp_path,
    ).fit("16 steps")
    assert updated[0] is False
    assert ema.count == sum(updated)


# A loop of one's own.


def own(**more: Any) -> mh.Run:
    arguments: dict[str, Any] = {"models": net, "optimizers": sgd, "data": mh.Data(SET, batch_size=16)}
    return mh.Run(**{**arguments, **more})


class Wide(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, 2)


OWN: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"models": {}}, "models is empty"),
    "no optimizer": ({"optimizers": {}}, "optimizers is empty"),
    "a model that takes something": ({"models": {"one": Wide}, "optimizers": {"one": sgd}}, "without width"),
    "no scheduler": ({"schedulers": lambda optimizer: None}, "the schedule is a NoneType"),
    "no parts": ({"data": None, "virtual_workers": 0}, "in how many parts a step is computed, not 0"),
    "parts in words": ({"data": None, "virtual_workers": "4"}, "not '4'"),
    "an option that nobody reads": ({"optimizers": adamw(biases={"wd": 0.0})}, "has no option 'wd'"),
}


@pytest.mark.parametrize("case", OWN)
def test_own_loop_refuses_what_it_could_not_use(case: str, tmp_path: Path) -> None:
    changed, what = OWN[case]
    with pytest.raises(ConfigError, match=what) as told:
        own(**changed, run_dir=tmp_path)
    assert "mh.Trainer" not in f"{told.value}"


def test_errors_of_an_own_loop_name_it(tmp_path: Path) -> None:
    run = own(run_dir=tmp_path)
    for call in (run.test, run.validate):
        with pytest.raises(ConfigError) as told:
            call(dataset=SET)  # type: ignore[call-arg]
        assert "trainer." not in str(told.value)
    with pytest.raises(ConfigError, match=r"run\.predict has no argument 'batch_size'"):
        run.predict(SET, batch_size=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="cannot read the duration") as told:
        run.fit(lambda run: None, "many")
    assert "trainer." not in str(told.value)


def test_parts_that_the_command_line_asks_for_are_all_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(overrides.VARIABLE, json.dumps({"virtual_workers": "8"}))
    seen: set[int] = set()
    run = own(data=None, virtual_workers=4, run_dir=tmp_path)

    def loss(batch: Any) -> Tensor:
        seen.add(run.part.index)
        return run.models["model"](torch.randn(4, 4)).square().mean()  # type: ignore[no-any-return]

    def step(run: mh.Run) -> None:
        run.backward(loss)
        run.update()

    run.fit(step, "2 steps")
    assert seen == set(range(8))


def test_counter_of_the_script_is_said_to_be_kept_nowhere(tmp_path: Path) -> None:
    counter = itertools.count()
    seen = []
    run = own(run_dir=tmp_path)

    def step(run: mh.Run) -> None:
        seen.append(next(counter))
        run.backward(lambda batch: functional.cross_entropy(run.models["model"](batch[0]), batch[1]))
        run.update()

    run.fit(step, "4 steps")
    assert any("the step changes seen" in each["text"] for each in events(tmp_path, "note"))


def test_micro_batch_that_counts_nothing_adds_nothing(tmp_path: Path) -> None:
    targets = SET.tensors[1].clone()
    targets[:8] = -100
    data = TensorDataset(INPUTS, targets)

    def weights(where: str, **more: Any) -> str:
        run = own(data=mh.Data(data, batch_size=16, shuffle=False), run_dir=tmp_path / where, **more)

        def loss(batch: Any) -> dict[str, Any]:
            counted = batch[1] != -100
            each = functional.cross_entropy(run.models["model"](batch[0]), batch[1], reduction="none")
            return {"loss": (each * counted).sum() / counted.sum(), "count": counted.sum()}

        def step(run: mh.Run) -> None:
            run.backward(loss)
            run.update()

        run.fit(step, "2 epochs")
        return torch.cat([each.detach().flatten() for each in run.models.parameters()])  # type: ignore[return-value]

    torch.testing.assert_close(weights("whole"), weights("pieces", micro_batch_size=8))


def test_best_model_of_a_part_that_was_not_resumed_is_not_taken_for_that_of_the_run(tmp_path: Path) -> None:
    made = trainer(run_dir=tmp_path)
    made.fit("2 epochs")
    run = made._run
    assert run is not None
    assert run.snapshot_schedule.put_aside_best(run.state) == ""
    run.state.best_step += 1
    assert "is not on the disk: best had that of another step" in run.snapshot_schedule.put_aside_best(run.state)
    assert not (tmp_path / "best").exists()
    assert len(list(tmp_path.glob("best-*"))) == 1
    made.validate()
    assert "the last weights, of step 12" in events(tmp_path, "note")[-1]["text"]


class Master(torch.optim.SGD):
    """Keeps what it steps in more bits than the parameters have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                kept = self.state[each].setdefault("master", each.float().clone())
                kept.sub_(group["lr"] * each.grad.float())
                each.copy_(kept)


def test_optimizer_that_keeps_more_bits_than_its_parameters_goes_on_with_them(tmp_path: Path) -> None:
    def weights(where: str, *lengths: str) -> Tensor:
        for length in lengths:
            made = trainer(
                model=lambda: net().bfloat16(),
                optimizer=lambda params: Master(params, lr=0.01),
                loss=lambda outputs, targets: functional.cross_entropy(outputs.float(), targets),
                data=mh.Data(TensorDataset(INPUTS.bfloat16(), SET.tensors[1]), batch_size=16),
                run_dir=tmp_path / where,
            )
            made.fit(length)
        return torch.cat([each.detach().flatten() for each in made.model.parameters()])

    assert torch.equal(weights("whole", "12 steps"), weights("halves", "5 steps", "12 steps"))
