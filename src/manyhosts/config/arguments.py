"""Arguments that other trainers have and ours has not: each is answered with what to write here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from manyhosts.errors import ConfigError, ManyhostsError
from manyhosts.table import nearest

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

_EPOCHS = 'the length of a run is said when it starts: trainer.fit("20 epochs")'
_STEPS = 'the length of a run is said when it starts: trainer.fit("5000 steps")'
_WORKERS = "the script says nothing of machines: manyhosts run --workers 2, or --hosts a,b,c"
_DATA = "data=mh.Data(train=train_set, validation=val_set, batch_size=64): datasets, no loaders"
_HELD_OUT = "model and data are those of mh.Trainer: mh.Data(train=…, validation=…, test=…)"
_OPTIMIZER = "optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
_PIECES = "micro_batch_size=32: the most samples in one forward pass; batch_size stays the total"
SAMPLER = (
    "the order is made here, the same on any number of workers: mh.Data(weights=mh.balanced(labels)) draws every class "
    "equally often, weights=[...] each sample as often as you say, order=lambda epoch: [...] is an order of your own; "
    "or weigh the loss (nn.CrossEntropyLoss(weight=...))"
)
_ORDER = "the order is made here, the same on any number of workers; shuffle=False keeps that of the dataset"

OF_TRAINER = {
    "epochs": _EPOCHS,
    "max_epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "max_steps": _STEPS,
    "max_time": 'the length of a run is said when it starts: trainer.fit("2h30m")',
    "accelerator": _WORKERS,
    "device": "model and batches are moved to each worker's device by themselves; leave it out",
    "devices": _WORKERS,
    "gpus": _WORKERS,
    "num_nodes": _WORKERS,
    "world_size": _WORKERS,
    "train_dataset": _DATA,
    "eval_dataset": _DATA,
    "train_dataloader": _DATA,
    "train_dataloaders": _DATA,
    "train_loader": _DATA,
    "val_dataloaders": _DATA,
    "dataset": _DATA,
    "batch_size": _DATA,
    "lr": _OPTIMIZER,
    "learning_rate": _OPTIMIZER,
    "optimizers": _OPTIMIZER,
    "criterion": "loss=nn.CrossEntropyLoss()",
    "loss_fn": "loss=nn.CrossEntropyLoss()",
    "scheduler": "schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)",
    "lr_scheduler": "schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)",
    "gradient_clip_val": "clip_gradients=1.0",
    "max_grad_norm": "clip_gradients=1.0",
    "accumulate_grad_batches": _PIECES,
    "gradient_accumulation_steps": _PIECES,
    "logger": "everything is written to the run directory; listeners=[function] is called with every event",
    "default_root_dir": 'run_dir="runs/mine"',
    "output_dir": 'run_dir="runs/mine"',
    "resume_from_checkpoint": "a run directory that holds snapshots is resumed: run_dir=…, or manyhosts run --run-dir",
    "ckpt_path": "a run directory that holds snapshots is resumed: run_dir=…, or manyhosts run --run-dir",
    "mixed_precision": 'precision="bf16"',
    "fp16": 'precision="fp16"',
    "bf16": 'precision="bf16"',
    "check_val_every_n_epoch": 'validate_every="2 epochs"',
    "val_check_interval": 'validate_every="500 steps"',
}
"""Of `mh.Trainer`: the name elsewhere, and what to write in its place."""
OF_RUN = {
    **OF_TRAINER,
    **dict.fromkeys(("lr", "learning_rate"), "optimizers=lambda params: torch.optim.AdamW(params, lr=1e-3)"),
    **dict.fromkeys(("criterion", "loss_fn"), "use run.backward(loss) in the step"),
    **dict.fromkeys(
        ("scheduler", "lr_scheduler"), "schedulers=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"
    ),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm"), "use run.update(name, clip=1.0)"),
    "model": "use models=",
    "optimizer": "use optimizers=",
    "loss": "use run.backward(loss) in the step",
    "step": "use run.fit(step, duration)",
    "schedule": "use schedulers={name: function}",
    "clip_gradients": "use run.update(name, clip=1.0)",
    "weight": 'use a "count" in what the loss returns',
}
"""Of `mh.Run`, likewise."""
OF_DATA = {
    "num_workers": "loader_workers=4: processes per worker that fetch samples ahead",
    "collate_fn": "collate=function",
    "val": "validation=val_set",
    "valid": "validation=val_set",
    "sampler": SAMPLER,
    "batch_sampler": SAMPLER,
    "pin_memory": "batches are pinned where there is a GPU; leave it out",
    "persistent_workers": "loader processes stay for the entire run; leave it out",
    "prefetch_factor": 'loader_workers="auto" measures how many are needed; leave it out',
}
"""Of `mh.Data`, likewise."""
OF_FIT = {
    "epochs": 'trainer.fit("20 epochs")',
    "max_epochs": 'trainer.fit("20 epochs")',
    "num_epochs": 'trainer.fit("20 epochs")',
    "max_steps": 'trainer.fit("5000 steps")',
    "steps": 'trainer.fit("5000 steps")',
    "max_time": 'trainer.fit("2h30m")',
    "model": "mh.Trainer(model=…) has it already",
    "train_dataloaders": _DATA,
    "train_loader": _DATA,
    "datamodule": _DATA,
    "ckpt_path": OF_TRAINER["ckpt_path"],
    "resume_from_checkpoint": OF_TRAINER["ckpt_path"],
}
"""Of `Trainer.fit`, likewise."""
OF_OWN_FIT = {
    name: instead.replace("trainer.fit(", "run.fit(step, ").replace("mh.Trainer(model=", "mh.Run(models=")
    for name, instead in OF_FIT.items()
}
"""Of `Run.fit`, likewise."""
OF_EVALUATION = {
    **dict.fromkeys(("model", "dataset", "dataloaders", "dataloader", "loader"), _HELD_OUT),
    **dict.fromkeys(("ckpt_path", "ckpt"), 'weights="best" or weights="last"'),
}
"""Of `Trainer.validate` and `Trainer.test`, likewise."""
OF_PREDICT = {
    "model": "mh.Trainer(model=…) has it already",
    **dict.fromkeys(("dataloaders", "dataloader", "loader"), "trainer.predict(dataset): a Dataset, no loader"),
    "batch_size": "mh.Data(evaluation_batch_size=…) says how many samples are computed at once",
    "ckpt_path": 'weights="best" or weights="last"',
}
"""Of `Trainer.predict`, likewise."""
_OF_ANY_DDP = "nothing is needed for that here; leave it out"
OF_DDP = {
    "bucket_cap_mb": "bucket_mb=25",
    "find_unused_parameters": _OF_ANY_DDP,
    "static_graph": _OF_ANY_DDP,
    "gradient_as_bucket_view": _OF_ANY_DDP,
    "broadcast_buffers": _OF_ANY_DDP,
    "device_ids": _WORKERS,
    "comm_hook": 'compression="bf16", or a function of your own',
}
"""Of `mh.DDP`, likewise."""
OF_SNAPSHOTS = {
    "every_n_steps": 'every="500 steps"',
    "every_n_train_steps": 'every="500 steps"',
    "every_n_epochs": 'every="1 epoch"',
    "save_steps": 'every="500 steps"',
    "save_top_k": "keep=3: the newest; the best model is kept next to them",
    "save_total_limit": "keep=3: the newest; the best model is kept next to them",
    "dirpath": 'mh.Trainer(run_dir="runs/mine"); to="s3://bucket/path" is for a copy elsewhere',
}
"""Of `mh.Snapshots`, likewise."""
OF_EARLY_STOPPING = {"monitor": 'metric="loss"', "threshold": "min_delta=0.001"}
"""Of `mh.EarlyStopping`, likewise."""
_TO_GIVE = {
    "model": "model=lambda: ConvNet()",
    "optimizer": _OPTIMIZER,
    "data": _DATA,
    "train": "train=train_set: a Dataset of torch.utils.data",
    "step": 'def step(run), as in run.fit(step, "20 epochs")',
    "path": 'trainer.save("model.pt")',
}
"""What to write where it is missing."""
_BY_NAME = {
    "mh.Trainer": "mh.Trainer(model=…, data=…, optimizer=…)",
    "mh.Data": "mh.Data(train=…, batch_size=…)",
    "trainer.fit": 'trainer.fit("20 epochs"): model and data are those of mh.Trainer',
    "run.fit": 'run.fit(step, "20 epochs"): models and data are those of mh.Run',
    "trainer.validate": f"trainer.validate(): {_HELD_OUT}",
    "trainer.test": f"trainer.test(): {_HELD_OUT}",
    "trainer.predict": "trainer.predict(dataset)",
    "trainer.save": 'trainer.save("model.pt")',
}


_TAKEN: dict[str, Sequence[str]] = {}
"""The arguments of each, by what it is called; filled as they are defined."""


def answers(
    who: str, elsewhere: Mapping[str, str], *, more: Collection[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a method or a function answer arguments that it does not know, or lacks, with a sentence of its own.

    What it raises has the words of the object that it is called of, where that has a method `rename`. `more`: names
    that its `**` takes.
    """

    def around(method: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(method).parameters
        _TAKEN[who] = [name for name in parameters if name != "self"]

        @functools.wraps(method)
        def checked(*given: P.args, **named: P.kwargs) -> R:
            try:
                check_by_name(method, who, elsewhere, given["self" in parameters :], named, more)
                return method(*given, **named)
            except ManyhostsError as error:
                if given and hasattr(given[0], "rename"):
                    given[0].rename(error)
                raise

        return checked

    return around


def answering(elsewhere: Mapping[str, str] | None = None) -> Callable[[type[C]], type[C]]:
    """Have a class of settings do so where it is made."""

    def around(kind: type[C]) -> type[C]:
        kind.__init__ = answers(f"mh.{kind.__name__}", elsewhere or {})(kind.__init__)  # type: ignore[method-assign]  # the point
        return kind

    return around


def _of_another(name: str) -> str:
    """Where an argument of that name belongs; empty where nothing has one."""
    owners = [f"{who}({name}=…)" for who, names in _TAKEN.items() if name in names and who.startswith("mh.")]
    if name == "duration":
        return OF_FIT["epochs"]
    return f"it is an argument of {' and of '.join(owners[:2])}" if owners else ""


def check_by_name(
    function: Callable[..., Any],
    who: str,
    elsewhere: Mapping[str, str],
    given: Sequence[Any],
    named: Mapping[str, Any],
    more: Collection[str] = (),
) -> None:
    """See that `function` knows every argument, `given` without a name and `named`, and lacks none.

    Raises:
        ConfigError: it does not, or lacks one; with what to write, where that is known.
    """
    known = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    known = [each for each in known if each.kind is not inspect.Parameter.VAR_KEYWORD]
    names = [each.name for each in known] + [name for name in more if name not in elsewhere]
    places = sum(each.kind is not inspect.Parameter.KEYWORD_ONLY for each in known)
    if len(given) > places:
        kind = type(given[places]).__name__
        takes = "takes the length of the run alone" if who == "trainer.fit" else "takes its arguments by name"
        what = f"{who} {takes}, but a {kind} comes without a name"
        raise ConfigError(what, where=who, fix=f"write {_BY_NAME.get(who, f'{who}({names[0]}=…)')}")
    for name in named:
        if name not in names:
            fix = elsewhere.get(name) or _of_another(name) or f"{nearest(name, names)}known: {', '.join(names)}"
            raise ConfigError(f"{who} has no argument {name!r}", where=f"{who}({name}=…)", fix=fix)
    for each in known[len(given) :]:
        if each.default is inspect.Parameter.empty and each.name not in named:
            fix = _TO_GIVE.get(each.name, f"give {each.name}=…")
            raise ConfigError(f"{who} is given no {each.name}", where=f"{who}({each.name}=…)", fix=fix)
