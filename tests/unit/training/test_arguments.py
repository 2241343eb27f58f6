"""What people bring from other trainers is answered with what to write here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from runs import images_and_labels, network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, MetricCollection

import manyhosts as mh
from manyhosts.config.arguments import OF_DATA, OF_DDP, OF_EARLY_STOPPING, OF_FIT, OF_SNAPSHOTS, OF_TRAINER
from manyhosts.config.fully_sharded import OTHERWISE
from manyhosts.errors import ConfigError


def dataset() -> TensorDataset:
    return TensorDataset(*images_and_labels(20))


def trainer(**more: Any) -> mh.Trainer:
    given: dict[str, Any] = {
        "model": network,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "data": mh.Data(train=dataset(), batch_size=5),
    }
    return mh.Trainer(**{**given, **more})


SLIPS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "epochs for the trainer": (lambda: trainer(max_epochs=3), "no argument 'max_epochs'", 'trainer.fit("20 epochs")'),
    "workers for the trainer": (lambda: trainer(devices=2), "no argument 'devices'", "manyhosts run --workers 2"),
    "a slip of the pen": (lambda: trainer(clip_gradient=1), "no argument 'clip_gradient'", "'clip_gradients'"),
    "arguments without names": (lambda: mh.Trainer(network()), "by name, but a Sequential", "model=…"),
    "processes of a loader": (lambda: mh.Data(dataset(), num_workers=2), "no argument 'num_workers'", "loader_workers"),
    "a batch size without a name": (lambda: mh.Data(dataset(), 64), "by name, but a int", "batch_size=…"),
    "an optimizer that is made": (
        lambda: trainer(optimizer=torch.optim.AdamW(network().parameters(), lr=0.003)),
        "optimizer is the AdamW of a model",
        "lambda params: torch.optim.AdamW(params, lr=0.003)",
    ),
    "a schedule's class": (
        lambda: trainer(schedule=torch.optim.lr_scheduler.StepLR),
        "schedule is called with (optimizer), and StepLR takes other arguments: missing a required argument",
        "schedule=lambda optimizer: StepLR(optimizer, step_size=1000)",
    ),
    "a step of a batch alone": (
        lambda: trainer(loss=None, step=lambda batch: batch[0].mean()),
        "step is called with (model, batch), and <lambda> takes other arguments: too many positional arguments",
        "step=function(model, batch)",
    ),
    "an optimizer of two": (
        lambda: trainer(optimizer=lambda model, lr: torch.optim.SGD(model.parameters(), lr)),
        "optimizer is called with (parameters), and <lambda> takes other arguments: missing a required argument: 'lr'",
        "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)",
    ),
    "an argument of the data": (lambda: trainer(loader_workers=2), "no argument 'loader_workers'", "of mh.Data(loader"),
    "an argument of the trainer": (
        lambda: mh.Data(dataset(), batch_size=5, micro_batch_size=2),
        "mh.Data has no argument 'micro_batch_size'",
        "it is an argument of mh.Trainer(micro_batch_size=…)",
    ),
    "an argument of a strategy": (lambda: trainer(compression="bf16"), "no argument 'compression'", "of mh.DDP("),
    "a length for the trainer": (lambda: trainer(duration="1 epoch"), "no argument 'duration'", "trainer.fit("),
    "a set to validate": (lambda: trainer().validate(dataset()), "by name, but a TensorDataset", "mh.Data(train="),
    "loaders to test": (lambda: trainer().test(dataloaders=1), "no argument 'dataloaders'", "test=…"),
    "a batch to predict": (lambda: trainer().predict(dataset(), batch_size=2), "'batch_size'", "evaluation_batch_size"),
    "no file to save": (lambda: trainer().save(), "trainer.save is given no path", "model.pt"),
    "an order of a dataset": (lambda: mh.Order(dataset(), batch_size=2), "length is of the type", "len(dataset)"),
    "a saver without a folder": (lambda: mh.Saver(mh.Snapshots(), model=network()), "a Snapshots comes", "mh.Saver("),
    "a saver with a text": (lambda: mh.Saver("a", "2 steps", model=network()), "a str comes where", "mh.Snapshots("),
    "a function that was called": (lambda: mh.launch.run(3, [1]), "a int comes", "itself"),
    "workers as a text": (lambda: mh.launch.run(__file__, workers="2"), "--workers is '2'", "an integer"),
    "a loader as data": (lambda: trainer(data=DataLoader(dataset())), "data is a DataLoader", "mh.Data(train="),
    "a loader as a set": (
        lambda: mh.Data(train=DataLoader(dataset(), batch_size=7)),
        "the train set is a DataLoader",
        "mh.Data(train=loader.dataset, batch_size=7)",
    ),
    "several loaders as a set": (
        lambda: mh.Data(dataset(), validation=[DataLoader(dataset())], batch_size=7),
        "the validation set is a list of DataLoaders, not of samples",
        "ConcatDataset([each.dataset for each in …])",
    ),
    "several datasets as a set": (
        lambda: mh.Data(dataset(), validation=(dataset(), dataset()), batch_size=7),  # type: ignore[arg-type]  # the slip
        "the validation set is a tuple of datasets, not of samples",
        "ConcatDataset([…])",
    ),
    "a collection as metrics": (
        lambda: trainer(metrics=MetricCollection({"error": MeanSquaredError()})),
        "metrics is a MetricCollection",
        'metrics={"all": …}',
    ),
    "the length as a number of epochs": (lambda: trainer().fit(max_epochs=3), "no argument 'max_epochs'", "20 epochs"),
    "model and loader for fit": (
        lambda: trainer().fit(network(), DataLoader(dataset())),  # type: ignore[call-arg, arg-type]  # the slip
        "takes the length of the run alone, but a DataLoader comes without a name",
        'trainer.fit("20 epochs")',
    ),
    "no optimizer": (
        lambda: mh.Trainer(model=network, loss=nn.MSELoss(), data=mh.Data(dataset())),  # type: ignore[call-arg]
        "mh.Trainer is given no optimizer",
        "lambda params",
    ),
    "the class of a loss": (
        lambda: trainer(loss=nn.CrossEntropyLoss),
        "the loss is the class CrossEntropyLoss",
        "loss=CrossEntropyLoss()",
    ),
    "the class of a model with arguments": (
        lambda: trainer(model=nn.Linear),
        "cannot be called without in_features, out_features",
        "model=lambda: Linear(…)",
    ),
    "a schedule that is made": (
        lambda: trainer(schedule=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(network().parameters()), 10)),
        "the schedule is a StepLR of an optimizer that is not the run's",
        "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, …)",
    ),
    "metrics without names": (lambda: trainer(metrics=[1]), "metrics is a list", 'metrics={"accuracy"'),
    "no model": (lambda: trainer(model=None), "the model is None", "model=lambda: ConvNet()"),
    "the name of a model": (lambda: trainer(model="resnet18"), "model is a str", "model=lambda: ConvNet()"),
    "the name of a loss": (lambda: trainer(loss="cross_entropy"), "loss is a str", "nn.CrossEntropyLoss()"),
    "the name of an optimizer": (lambda: trainer(optimizer="adam"), "optimizer is a str", "torch.optim.AdamW(params"),
    "early stopping as a callback": (
        lambda: trainer(callbacks=[mh.EarlyStopping("loss")]),
        "a callback is a EarlyStopping",
        'early_stopping=mh.EarlyStopping("loss")',
    ),
    "early stopping as the callbacks": (
        lambda: trainer(callbacks=mh.EarlyStopping("accuracy")),
        "callbacks is one EarlyStopping, no list",
        'early_stopping=mh.EarlyStopping("accuracy")',
    ),
    "the path of the samples": (lambda: mh.Data("photos/"), "the train set is a str", "ImageFolder"),  # type: ignore[arg-type]  # the slip
    "inputs and targets in a tuple": (
        lambda: mh.Data((torch.randn(8, 3), torch.randn(8, 1))),  # type: ignore[arg-type]  # the slip
        "the train set is a tuple, and not one of samples",
        "train=TensorDataset(inputs, targets)",
    ),
    "labels of other lengths": (lambda: mh.balanced([[1, 2], [3]]), "of the type list, are not one class", "a list"),
    "no labels": (lambda: mh.balanced([]), "of the type list, are not one class", "the class of each sample"),
    "None as labels": (lambda: mh.balanced(None), "of the type NoneType, are not one class", "the class of each"),
    "labels of several classes": (lambda: mh.balanced(torch.eye(3)), "of the type Tensor, are not one", "the class of"),
    "a label that is None": (lambda: mh.balanced(["a", None]), "of the type list, are not one class", "the class of"),
    "a label that is NaN": (lambda: mh.balanced([1.0, float("nan")]), "have a NaN, which is no class", "the class of"),
    "a listener by itself": (lambda: trainer(listeners=print), "listeners is a function", "[function]"),
    "the class of a listener": (
        lambda: trainer(listeners=[print, mh.CSVLogger]),
        "a listener is the class CSVLogger, which makes listeners",
        "write listeners=[CSVLogger(…)]",
    ),
    "a table without a path": (lambda: mh.CSVLogger(3), "the path is a int", "a text or a Path"),  # type: ignore[arg-type]  # the slip
    "a step that is none": (lambda: trainer(loss=None, step=3), "step is a int", "a function"),
    "offload": (
        lambda: mh.FSDP(offload_policy=1),
        "mh.FSDP has no argument 'offload_policy'",
        "cpu_offload=True",
    ),
    "a word of local steps": (lambda: mh.LocalSGD(sync_evry=4), "no argument 'sync_evry'", "'sync_every'"),
    "units without a name": (lambda: mh.FSDP("Block"), "by name, but a str comes without a name", "mh.FSDP(units=…)"),
    "weights that are not there": (lambda: trainer(init_from="nowhere.pt"), "no such file", "state_dict"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_slip_is_answered_with_what_to_write(slip: str) -> None:
    act, what, fix = SLIPS[slip]
    with pytest.raises(ConfigError) as raised:
        act()
    assert what in raised.value.what
    assert fix in raised.value.fix


def test_no_answer_is_for_an_argument_that_there_is() -> None:
    of_settings = (
        (mh.DDP, OF_DDP),
        (mh.FSDP, OTHERWISE),
        (mh.Snapshots, OF_SNAPSHOTS),
        (mh.EarlyStopping, OF_EARLY_STOPPING),
    )
    for kind, answers in ((mh.Trainer, OF_TRAINER), (mh.Data, OF_DATA), *of_settings):
        for name in answers:
            with pytest.raises(ConfigError, match=f"no argument '{name}'"):
                kind(**{name: 1})
    made = trainer()
    for name in OF_FIT:
        with pytest.raises(ConfigError, match=f"no argument '{name}'"):
            made.fit(**{name: 1})  # type: ignore[arg-type]
