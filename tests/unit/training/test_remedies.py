"""What an error says to type is there, and helps; habits of other trainers are answered, or right."""

from __future__ import annotations

import copy
import math
import multiprocessing
import shutil
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import free_port
from runs import events
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, TensorDataset

import manyhosts as mh
from manyhosts.data.steps import mapped
from manyhosts.errors import ConfigError, ManyhostsError
from manyhosts.loss.compute import check_doubles, number_of
from manyhosts.loss.weighing import TargetMean
from manyhosts.training.setup.run_place import RunPlace

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
SET = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def trainer(**more: Any) -> mh.Trainer:
    arguments: dict[str, Any] = {
        "model": net,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": sgd,
        "data": mh.Data(SET, validation=SET, batch_size=16),
    }
    return mh.Trainer(**{**arguments, **more})


def own(**more: Any) -> mh.Run:
    arguments: dict[str, Any] = {"models": {"net": net}, "optimizers": sgd, "data": mh.Data(SET, batch_size=16)}
    return mh.Run(**{**arguments, **more})


def step_of(loss: Callable[[mh.Run, Any], Any], **update: Any) -> Callable[[mh.Run], None]:
    def step(run: mh.Run) -> None:
        run.backward(lambda batch: loss(run, batch))
        run.update(**update)

    return step


def cross_entropy(run: mh.Run, batch: Any) -> Tensor:
    return functional.cross_entropy(run.models["net"](batch[0]), batch[1])


class Lion(torch.optim.SGD):
    """Of a package that is not PyTorch."""


def with_rate(rate: Any) -> torch.optim.Optimizer:
    made = Lion(net().parameters(), lr=0.1)
    made.param_groups[0]["lr"] = rate
    return made


def trains(model: nn.Module, batch: Any) -> Tensor:
    model.train()
    return functional.cross_entropy(model(batch[0]), batch[1])


class Own:
    """A sum that is divided by a count of its own."""

    reduction = "sum"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="sum") / len(targets)


class Before(mh.Callback):
    def after_step(self, moment: mh.Moment) -> None: ...

    def on_before_optimizer_step(self, moment: mh.Moment) -> None: ...


class Average(mh.Callback):
    def average(self) -> dict[str, Tensor]:
        return {}


other = torch.optim.SGD(net().parameters(), lr=0.1)

REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a class of elsewhere": (lambda: trainer(optimizer=with_rate(None)), "is the Lion of a model", "Lion(params)"),
    "its rate": (lambda: trainer(optimizer=with_rate(0.25)), "is the Lion of a model", "Lion(params, lr=0.25)"),
    "parameters as a model": (
        lambda: trainer(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
        "is called with the parameters",
        "lambda params",
    ),
    "weights in an array": (lambda: trainer(weight=np.array([0.1, 0.9])), "weight is array", 'weight="samples"'),
    "a schedule of another optimizer": (
        lambda: trainer(schedule=lambda _: torch.optim.lr_scheduler.StepLR(other, 1)),
        "is a StepLR of another optimizer",
        "what the function is given",
    ),
    "sets to train on": (
        lambda: mh.Data({"a": SET, "b": SET}, batch_size=4),  # type: ignore[arg-type]
        "the train set is a dict of a, b",
        "ConcatDataset",
    ),
    "a loader by name": (
        lambda: mh.Data(SET, validation={"clean": DataLoader(SET, batch_size=8)}, batch_size=4),  # type: ignore[dict-item]
        "is a DataLoader",
        "validation={'clean': loader.dataset, …}, evaluation_batch_size=8",
    ),
    "a loader that leaves out": (
        lambda: mh.Data(DataLoader(SET, batch_size=8, drop_last=True, num_workers=2), batch_size=4),  # type: ignore[arg-type]
        "is a DataLoader",
        "batch_size=8, drop_last=True, loader_workers=2)",
    ),
    "a loader for each worker": (
        lambda: mh.Data(DataLoader(SET, batch_size=8, sampler=DistributedSampler(SET, 4, 0)), batch_size=4),  # type: ignore[arg-type]
        "is a DataLoader",
        "batch_size_per_worker=8",
    ),
    "a loader that draws": (
        lambda: mh.Data(DataLoader(SET, batch_size=8, sampler=RandomSampler(SET, replacement=True)), batch_size=4),  # type: ignore[arg-type]
        "is a DataLoader",
        "RandomSampler would be lost",
    ),
    "a hook of Lightning": (lambda: trainer(callbacks=[Before()]), "'on_before_optimizer_step', which nothing", "def "),
    "a method by another name": (lambda: trainer(callbacks=[Average()]), "'average'", "def averages(self)"),
    "a step that trains": (lambda: trainer(loss=None, step=trains).fit("1 step"), "into training mode", "leave model"),
    "models of no name": (lambda: own(models={"values": net}), "'values' can be no name of a model", "values_model"),
    "models as one": (
        lambda: own(
            data=mh.Data(SET, validation=SET, batch_size=16),
            evaluate=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        ).fit(step_of(cross_entropy), "1 step"),
        "as if they were one",
        "models['net'](batch[0])",
    ),
    "a list of optimizers": (lambda: own(optimizers=lambda p: [sgd(p)]), "is a list, not a torch.optim", "lambda"),
    "a weight that is a count": (
        lambda: own().fit(step_of(lambda run, batch: {"loss": cross_entropy(run, batch), "weight": 2}), "1 step"),
        "the function that run.backward was given returned a value named 'weight'",
        "return it as 'count'",
    ),
    "a weight in an evaluation": (
        lambda: own(
            data=mh.Data(SET, validation=SET, batch_size=16),
            evaluate=lambda models, batch: {"loss": models["net"](batch[0]).mean(), "weight": 2},
        ).fit(step_of(cross_entropy), "1 step"),
        "evaluate returned a value named 'weight', but what a piece counts is called 'count'",
        "return it as 'count'",
    ),
    "lazy layers": (lambda: own(models={"net": lambda: nn.LazyLinear(2)}), "lazy layers", "call the model once"),
    "a value over the batch": (
        lambda: own().fit(lambda run: run.backward(lambda b: b[0], over_batch=torch.tensor(1.0)), "1 step"),  # type: ignore[arg-type]
        "as over_batch, and calls it with the rows",
        "run.backward(rows, over_batch=loss)",
    ),
    "a schedule that is too short": (
        lambda: own(schedulers=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=3)).fit(
            step_of(cross_entropy), "6 steps"
        ),
        "the schedule goes no further",
        "as long as the entire run",
    ),
    "an argument of elsewhere": (lambda: own(criterion=1), "no argument 'criterion'", "run.backward(loss)"),
    "a directory of a number": (lambda: trainer(run_dir=5), "run_dir is a int", "run_dir="),
    "a directory without a name": (lambda: trainer(run_dir=""), "run_dir is empty", "or leave it out"),
    "weights of a number": (lambda: trainer(init_from=3), "init_from is given a int", "init_from="),
    "a checkpoint of several things": (
        lambda: trainer(init_from={"model": net().state_dict(), "epoch": 3, "random": torch.zeros(2)}),
        "no state_dict is in it, but model, epoch, random",
        "torch.load(PATH)['model']",
    ),
    "models without names": (lambda: own(models=[net]), "models is a list", "give each a name"),
    "a loss that is no number": (
        lambda: own().fit(step_of(lambda run, batch: cross_entropy(run, batch) * math.nan), "1 step"),
        "loss is nan",
        "run.update(clip=1.0)",
    ),
    "an order of no batch": (
        lambda: mh.Order(50, batch_size=64, drop_last=True),
        "drop_last leaves no batch",
        "batch_size=50 or less",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_habits_of_elsewhere_are_answered_with_what_to_write(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, what, fix = REFUSED[case]
    with pytest.raises(ManyhostsError) as raised:
        make()
    assert what in raised.value.what
    assert fix in raised.value.fix


def test_remedy_of_a_prediction_names_the_model(tmp_path: Path) -> None:
    run = own(run_dir=tmp_path)
    three = TensorDataset(INPUTS, INPUTS, INPUTS)
    with pytest.raises(ConfigError, match="a batch has 3 parts") as raised:
        run.predict(three)
    assert "models['net'](batch[0], batch[1])" in raised.value.fix
    assert "lambda models, batch" in raised.value.fix


def test_loss_with_a_reduction_of_its_own_is_no_sum(tmp_path: Path) -> None:
    trainer(loss=Own(), run_dir=tmp_path).fit("1 step")


def test_remedy_for_targets_that_are_left_out_counts_them_as_the_loss_does(tmp_path: Path) -> None:
    targets = SET.tensors[1].clone()
    targets[40:] = 255

    class Late(Dataset[Any]):
        def __len__(self) -> int:
            return 96

        def __getitem__(self, index: int) -> Any:
            return INPUTS[index], targets[index]

    loss = nn.CrossEntropyLoss(ignore_index=255)
    data = mh.Data(Late(), batch_size=16, shuffle=False)
    with pytest.raises(ConfigError, match="a target of step 3 does not count") as raised:
        trainer(loss=loss, data=data, micro_batch_size=8, run_dir=tmp_path).fit("1 epoch")
    assert "(batch[1] != 255).sum()" in raised.value.fix


def test_class_that_there_is_not_is_left_to_the_loss_to_say() -> None:
    labels = torch.tensor([0, 1, 7])
    assert TargetMean(torch.tensor([1.0, 2.0]))((None, labels)) == 3


@pytest.mark.parametrize(
    ("said", "is_told"),
    [
        ("mat1 and mat2 must have the same dtype, but got Double and Float", True),
        ("[../gloo/transport/tcp/pair.cc] Connection closed by peer [10.0.0.2]:1234", False),
        ("mat1 and mat2 shapes cannot be multiplied (8x4 and 5x2)", False),
    ],
)
def test_numbers_of_float64_are_blamed_for_what_they_cause(said: str, is_told: bool) -> None:
    def check() -> None:
        check_doubles(RuntimeError(said), nn.Linear(4, 2), torch.zeros(2, 4, dtype=torch.float64))

    if is_told:
        with pytest.raises(ConfigError, match="float64"):
            check()
    else:
        check()


def test_float64_of_a_held_out_set_is_named(tmp_path: Path) -> None:
    doubles = TensorDataset(INPUTS.double(), SET.tensors[1])
    with pytest.raises(ConfigError, match="inputs of float64"):
        trainer(data=mh.Data(SET, validation=doubles, batch_size=16), run_dir=tmp_path).fit("1 step")


def test_logged_number_is_where_the_loss_is() -> None:
    assert number_of("accuracy", torch.tensor(0.5), torch.device("meta"), "step").device.type == "meta"


class Encoded(UserDict[str, Any]):
    """As a tokenizer of `transformers` gives it."""

    @property
    def input_ids(self) -> Tensor:
        found: Tensor = self["input_ids"]
        return found


def test_batch_keeps_its_kind_where_it_is_moved() -> None:
    batch = Encoded(input_ids=torch.zeros(2), more=[torch.zeros(1)])
    moved = mapped(batch, lambda tensor: tensor + 1)
    assert isinstance(moved, Encoded)
    assert moved.input_ids.tolist() == [1, 1]
    assert batch.input_ids.tolist() == [0, 0]


def test_hooks_that_a_callback_registers_are_there_once(tmp_path: Path) -> None:
    class Scales(mh.Callback):
        def attach(self, moment: mh.Moment) -> None:
            for each in moment.model.parameters():
                each.register_hook(lambda gradient: 0.5 * gradient)

    def made(place: str) -> mh.Trainer:
        return trainer(callbacks=[Scales()], run_dir=tmp_path / place)

    whole = made("whole").fit("4 epochs").weights_sha256
    twice = made("twice")
    twice.fit("2 epochs")
    assert twice.fit("4 epochs").weights_sha256 == whole
    made("resumed").fit("2 epochs")
    assert made("resumed").fit("4 epochs").weights_sha256 == whole


def test_average_that_a_callback_keeps_beside_the_model_is_said_to_be_in_no_snapshot(tmp_path: Path) -> None:
    class Averages(mh.Callback):
        def attach(self, moment: mh.Moment) -> None:
            self.model = moment.model
            self.average = torch.optim.swa_utils.AveragedModel(moment.model)

        def after_step(self, moment: mh.Moment) -> None:
            self.average.update_parameters(moment.model)

    trainer(callbacks=[Averages()], run_dir=tmp_path).fit("1 epoch")
    said = [each["text"] for each in events(tmp_path, "note") if "changes its attribute" in each["text"]]
    assert [("average" in text, "model," in text) for text in said] == [(True, False)]


def test_target_network_that_a_run_was_not_given_is_said(tmp_path: Path) -> None:
    target = net()

    def loss(run: mh.Run, batch: Any) -> Tensor:
        return functional.mse_loss(run.models["net"](batch[0]), target(batch[0]).detach())

    own(run_dir=tmp_path / "without").fit(step_of(loss), "1 step")
    own(run_dir=tmp_path / "with", models={"net": net, "target": target}, optimizers={"net": sgd}).fit(
        step_of(loss), "1 step"
    )
    said = [
        any("the step uses target" in each["text"] for each in events(tmp_path / place, "note"))
        for place in ("without", "with")
    ]
    assert said == [True, False]


def test_norm_of_an_own_step_is_recorded_as_it_was_before_clipping(tmp_path: Path) -> None:
    norms: list[float] = []

    def step(run: mh.Run) -> None:
        run.backward(lambda batch: 100 * cross_entropy(run, batch))
        norms.append(float(run.update(clip=0.5)))

    own(run_dir=tmp_path).fit(step, "3 steps")
    assert [line["gradient_norm"] for line in events(tmp_path, "step")] == pytest.approx(norms)
    assert min(norms) > 0.5


def test_norm_of_several_updates_is_that_of_all_of_them(tmp_path: Path) -> None:
    norms: list[float] = []

    def step(run: mh.Run) -> None:
        for _ in range(2):
            run.backward(lambda batch: cross_entropy(run, batch))
            norms.append(float(run.update()))

    own(run_dir=tmp_path).fit(step, "1 step")
    assert events(tmp_path, "step")[0]["gradient_norm"] == pytest.approx(math.hypot(*norms))


def test_sparse_gradients_of_an_own_step_are_clipped_and_recorded(tmp_path: Path) -> None:
    words = TensorDataset(torch.arange(96) % 7, SET.tensors[1])
    run = own(
        models={"net": lambda: nn.Sequential(nn.Embedding(7, 2, sparse=True))},
        optimizers=lambda params: torch.optim.SparseAdam(params, lr=0.1),
        data=mh.Data(words, batch_size=16),
        run_dir=tmp_path,
    )
    run.fit(step_of(cross_entropy, clip=0.01), "3 steps")
    assert all(line["gradient_norm"] > 0.01 for line in events(tmp_path, "step"))


def test_rate_of_a_step_is_that_of_the_step_also_where_it_is_a_tensor(tmp_path: Path) -> None:
    rates = []
    for place, rate in (("number", 0.1), ("tensor", torch.tensor(0.1))):
        trainer(
            optimizer=lambda params, rate=rate: torch.optim.Adam(params, lr=copy.deepcopy(rate)),
            schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
            run_dir=tmp_path / place,
        ).fit("4 steps")
        rates.append([line["lr"] for line in events(tmp_path / place, "step")])
    assert rates[0] == pytest.approx(rates[1])


def test_rate_that_was_changed_between_two_fits_is_said_to_be_that_of_the_snapshot(tmp_path: Path) -> None:
    made = trainer(run_dir=tmp_path)
    made.fit("1 epoch")
    made.fit("2 epochs")
    made.components.optimizer.param_groups[0]["lr"] = 1e-4
    made.fit("3 epochs")
    assert sum("the learning rate was changed" in each["text"] for each in events(tmp_path, "note")) == 1


def test_second_fit_of_a_notebook_continues_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("manyhosts.training.setup.run_place._is_command", lambda: False)
    made = trainer()
    first, second = made.fit("1 epoch"), made.fit("2 epochs")
    assert first.run_dir == second.run_dir
    assert (first.steps, second.steps) == (6, 12)


def test_run_of_a_task_of_mpi_is_resumed_by_the_command_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhosts.training.setup.run_place._is_command", lambda: True)
    place = RunPlace(trainer(run_dir=tmp_path)._session, None)
    from manyhosts.records.run_directory import RunDirectory

    assert "(the command that has started this)" not in place.command(RunDirectory(tmp_path))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "(the command that has started this)" in place.command(RunDirectory(tmp_path))


def _in_a_group_of_its_own(rank: int, port: int, folder: str, said: Any) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        trainer(run_dir=folder)
    except ConfigError as error:
        said.put(str(error))
    else:
        said.put("it trains")
    torch.distributed.destroy_process_group()


def test_processes_that_a_script_has_spawned_do_not_train_each_alone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    said, port = context.Queue(), free_port()
    workers = [
        context.Process(target=_in_a_group_of_its_own, args=(rank, port, str(tmp_path / str(rank)), said))
        for rank in range(2)
    ]
    for each in workers:
        each.start()
    found = [said.get(timeout=120) for _ in workers]
    for each in workers:
        each.join(60)
    assert all("the script has made a group of 2 processes" in text for text in found)
    assert all("manyhosts run --workers 2" in text for text in found)


def test_model_with_a_state_of_its_own_is_saved_by_torch(tmp_path: Path) -> None:
    class Keeps(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

        def set_extra_state(self, state: Any) -> None: ...

    made = trainer(model=lambda: Keeps(4, 2), run_dir=tmp_path)
    made.save(tmp_path / "net.pt")
    assert torch.load(tmp_path / "net.pt", weights_only=True)["_extra_state"] == {"seen": 3}
    with pytest.raises(ConfigError, match="_extra_state is a dict, and safetensors keeps tensors alone"):
        made.save(tmp_path / "net.safetensors")


def test_best_model_that_somebody_has_removed_is_not_said_to_be_elsewhere(tmp_path: Path) -> None:
    made = trainer(run_dir=tmp_path)
    made.fit("2 epochs")
    shutil.rmtree(tmp_path / "best")
    run = made._run
    assert run is not None
    said = run.snapshot_schedule.put_aside_best(run.state)
    assert said.endswith("is not on the disk; the best weights are the last ones")


def test_callback_may_keep_a_module_that_keeps_more_than_tensors(tmp_path: Path) -> None:
    class Keeps(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

        def set_extra_state(self, state: Any) -> None: ...

    class Averages(mh.Callback):
        def attach(self, moment: mh.Moment) -> None:
            self.average = torch.optim.swa_utils.AveragedModel(moment.model)

        def after_step(self, moment: mh.Moment) -> None:
            self.on_step(moment)

        def on_step(self, moment: mh.Moment) -> None:
            self.average.update_parameters(moment.model)

    made = trainer(model=lambda: Keeps(4, 2), callbacks=[Averages()], run_dir=tmp_path)
    made.fit("1 epoch")
    made.save(tmp_path / "net.pt")
    assert mh.load(tmp_path / "net.pt").keys() == {"weight", "bias", "_extra_state"}
    trainer(init_from=tmp_path / "net.pt", model=lambda: Keeps(4, 2), run_dir=tmp_path / "more").fit("1 step")


def test_model_that_stays_in_training_mode_on_purpose_is_validated_so(tmp_path: Path) -> None:
    class Samples(nn.Sequential):
        def train(self, mode: bool = True) -> Samples:
            return super().train(True)

    model = Samples(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
    step = {"loss": None, "step": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])}
    trainer(model=model, **step, run_dir=tmp_path).fit("1 step")


def test_schedule_of_an_optimizer_within_is_its_own() -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            self.base = torch.optim.SGD(params, lr=0.1)
            super().__init__([{"params": list(params)}], {"lr": 0.1})

        def step(self, closure: Any = None) -> Any:
            return self.base.step(closure)

    trainer(optimizer=Lookahead, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o.base, 10))


def warmed_up(optimizer: torch.optim.Optimizer) -> Any:
    rates = torch.optim.lr_scheduler
    both = [rates.LinearLR(optimizer, 0.1, total_iters=3), rates.MultiStepLR(optimizer, [6, 8], gamma=0.5)]
    return rates.SequentialLR(optimizer, both, milestones=[4])


class Keeps(torch.optim.SGD):
    """Keeps of each parameter lists and dicts of tensors, and counts in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for each in group["params"]:
                state = self.state[each]
                kept = state.setdefault("kept", [torch.zeros_like(each), {"steps": torch.zeros(())}])
                kept[0].mul_(0.9).add_(each.grad)
                kept[1]["steps"] += 1
                each.grad.add_(kept[0], alpha=0.1 * float(kept[1]["steps"]))
        return super().step(closure)


RESUMED: dict[str, dict[str, Any]] = {
    "milestones after a warm-up": {"schedule": warmed_up},
    "lists of tensors": {"optimizer": lambda params: Keeps(params, lr=0.05)},
    "float32 within float64": {
        "model": lambda: net().double(),
        "optimizer": lambda params: torch.optim.NAdam(params, lr=0.01),
        "data": mh.Data(TensorDataset(INPUTS.double(), SET.tensors[1]), batch_size=16),
    },
}


@pytest.mark.parametrize("case", RESUMED)
def test_resumed_run_has_the_bits_of_one_that_was_not_stopped(case: str, tmp_path: Path) -> None:
    more = RESUMED[case]
    once = trainer(**more, run_dir=tmp_path / "once").fit("12 steps").weights_sha256
    trainer(**more, run_dir=tmp_path / "twice").fit("5 steps")
    assert trainer(**more, run_dir=tmp_path / "twice").fit("12 steps").weights_sha256 == once


def test_what_an_optimizer_counts_in_its_groups_stays_where_an_option_changes(tmp_path: Path) -> None:
    trainer(optimizer=lambda params: Keeps(params, lr=0.05), run_dir=tmp_path).fit("4 steps")
    made = trainer(optimizer=lambda params: Keeps(params, lr=0.01), run_dir=tmp_path)
    made.fit("6 steps")
    [group] = made.components.optimizer.param_groups
    assert (group["k"], group["lr"]) == (6, 0.01)


def test_schedule_that_is_another_after_a_resume_is_where_it_would_be(tmp_path: Path) -> None:
    rates = torch.optim.lr_scheduler
    more: dict[str, Any] = {"schedule_every": "epoch", "run_dir": tmp_path}
    trainer(schedule=lambda o: rates.ReduceLROnPlateau(o), **more).fit("2 epochs")
    chained = trainer(schedule=lambda o: rates.ChainedScheduler([rates.ExponentialLR(o, 0.5)], optimizer=o), **more)
    chained.fit("3 epochs")
    assert events(tmp_path, "step")[-1]["lr"] == pytest.approx(0.1 * 0.5**2)


def test_listener_whose_flush_fails_costs_no_snapshot(tmp_path: Path) -> None:
    class Posts:
        def __call__(self, event: Any) -> None: ...

        def flush(self) -> None:
            raise ConnectionError("the server is down")

    trainer(listeners=[Posts()], snapshots=mh.Snapshots(every="2 steps"), run_dir=tmp_path).fit("6 steps")
    assert (tmp_path / "snapshots" / "step-00000006" / "manifest.json").exists()
    assert not events(tmp_path, "skipped")


class Inside(torch.optim.lr_scheduler.LambdaLR):
    """Holds a scheduler, of which its state has the object."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: 1.0)
        self.after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


class Odd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["made"] = object()
        return super().step(closure)


@pytest.mark.parametrize(
    ("more", "steps"), [({"schedule": Inside}, 0), ({"optimizer": lambda params: Odd(params, lr=0.1)}, 1)]
)
def test_state_that_no_snapshot_could_keep_is_refused_before_much_is_trained(
    more: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no snapshot could be made: a value of type"):
        trainer(**more, run_dir=tmp_path).fit("4 epochs")
    metrics = tmp_path / "metrics.jsonl"
    assert (len(events(tmp_path, "step")) if metrics.exists() else 0) <= steps


def test_rows_of_graphs_in_one_tensor_are_counted_as_the_loss_does(tmp_path: Path) -> None:
    """Each sample has another number of rows, which collate puts into one tensor; the loss is a mean over rows."""
    generator = torch.Generator().manual_seed(3)
    samples = [(torch.randn(1 + n % 5, 4, generator=generator), torch.randn(1 + n % 5, generator=generator) + n % 5)
               for n in range(48)]  # fmt: skip

    class Graphs(Dataset[Any]):
        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, index: int) -> Any:
            return samples[index]

    def collate(chosen: list[Any]) -> Any:
        return torch.cat([each[0] for each in chosen]), torch.cat([each[1] for each in chosen])

    def made(where: str, **more: Any) -> mh.Trainer:
        data = mh.Data(Graphs(), validation=Graphs(), batch_size=16, collate=collate)
        return trainer(
            model=lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)),
            loss=nn.MSELoss(), data=data, run_dir=tmp_path / where, **more,
        )  # fmt: skip

    one = made("one")
    one.fit("1 epoch")
    inputs, targets = collate(samples)
    with torch.no_grad():
        whole = functional.mse_loss(one.model(inputs), targets)
    assert one.validate(weights="last")["loss"] == pytest.approx(float(whole), rel=1e-6)
    with pytest.raises(ConfigError, match="Samples have different numbers of rows") as raised:
        made("two", micro_batch_size=8).fit("1 epoch")
    assert "weight=lambda batch: len(batch[1])" in raised.value.fix
    made("three", micro_batch_size=8, weight=lambda batch: len(batch[1])).fit("1 epoch")
