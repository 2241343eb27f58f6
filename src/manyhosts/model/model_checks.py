"""What a model or an optimizer must be for workers to train it together: found, or made so, before the first step."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import IterableDataset

from manyhosts.callbacks.callback import POINTS, Callbacks
from manyhosts.communication.world import World
from manyhosts.config.settings import Settings
from manyhosts.config.stopping import Best, EarlyStopping
from manyhosts.data import randomness
from manyhosts.data.data import Data, is_several, loss_of_first
from manyhosts.data.fetch import Fetcher
from manyhosts.data.steps import mapped
from manyhosts.device import is_asynchronous
from manyhosts.errors import ConfigError
from manyhosts.model.combined_optimizer import each_of
from manyhosts.snapshot.tensors import can_keep, dtype_name
from manyhosts.strategies.table import STRATEGIES

R = TypeVar("R", Best, EarlyStopping)
Forward = Callable[[nn.Module, Any], Any]
"""Shows a batch to a model."""
_CALLED: dict[str, tuple[Sequence[str] | None, str]] = {
    "model": (None, "a module, or a function that makes one: model=lambda: ConvNet()"),
    "loss": (["outputs", "targets"], "a function of outputs and targets: loss=nn.CrossEntropyLoss()"),
    "step": (
        ["model", "batch"],
        "a function of the model and a batch that returns the loss: step=function(model, batch)",
    ),
    "optimizer": (
        ["parameters"],
        "a function of a list of parameters: optimizer=lambda params: torch.optim.SGD(params, lr=0.1), or "
        "torch.optim.AdamW(params, lr=1e-3)",
    ),
    "schedule": (
        ["optimizer"],
        "a function of the optimizer: schedule=lambda optimizer: StepLR(optimizer, step_size=1000)",
    ),
}
"""What each is called with, and what to give for it."""
Refusal = tuple[bool, str, str, str]
"""Whether it is so; what, where, and what to do."""


def refuse(refusals: Iterable[Refusal]) -> None:
    """See that nothing of this is so.

    Raises:
        ConfigError: something is; of several the first.
    """
    for is_so, what, where, fix in refusals:
        if is_so:
            raise ConfigError(what, where=where, fix=fix)


def check_is_main() -> None:
    """See that this is no process that was started by `spawn` and loads the script that started it.

    Raises:
        ConfigError: it is; it would wait for workers that it is none of.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "a process that was started with the method 'spawn', for a DataLoader say, runs this script again",
            where="mh.Trainer(…)",
            fix='put what trains below `if __name__ == "__main__":`, or leave the method that Linux has ("fork")',
        )


def check_given(
    *, model: Any, data: Any, loss: Any, step: Any, optimizer: Any, schedule: Any, metrics: Any, listeners: Any
) -> None:
    """See that what is to be called can be called as it will be, and is no class in the place of what it makes.

    Raises:
        ConfigError: it is something else, named with what to write.
    """
    own = getattr(loss, "__name__", "")
    refuse(
        [
            (
                (loss is None) == (step is None),
                "both loss and step are given" if loss is not None else "neither loss nor step is given",
                "mh.Trainer(…)",
                "give loss=nn.CrossEntropyLoss() for (inputs, targets) batches, else step=function(model, batch)",
            ),
            (
                not isinstance(data, Data),
                f"data is a {type(data).__name__}",
                "mh.Trainer(data=…)",
                "write data=mh.Data(train=train_set, batch_size=64), with datasets: it makes the batches itself",
            ),
            (
                isinstance(loss, type),
                f"the loss is the class {own}, which makes losses",
                "mh.Trainer(loss=…)",
                f"write loss={own}()",
            ),
        ]
    )
    check_maker(model, "the model", where="mh.Trainer(model=…)", write="model=lambda: ")
    rate = optimizer.param_groups[0].get("lr") if isinstance(optimizer, Optimizer) else None
    given = f", lr={rate:g}" if isinstance(rate, float | int) else ""
    many = listeners if isinstance(listeners, Iterable) else []
    made_by = next((each.__name__ for each in many if isinstance(each, type)), "")
    refuse(
        [
            (
                isinstance(optimizer, Optimizer),
                f"optimizer is the {type(optimizer).__name__} of a model, made before the workers share the model",
                "mh.Trainer(optimizer=…)",
                f"write optimizer=lambda params: {_named(type(optimizer), 'torch.optim')}(params{given})",
            ),
            (
                isinstance(schedule, LRScheduler),
                f"the schedule is a {type(schedule).__name__} of an optimizer that is not the run's",
                "mh.Trainer(schedule=…)",
                f"write schedule=lambda optimizer: {_named(type(schedule), 'torch.optim.lr_scheduler')}(optimizer, …)",
            ),
            (
                not isinstance(metrics, Mapping | None),
                f"metrics is a {type(metrics).__name__}, and each metric needs a name",
                "mh.Trainer(metrics=…)",
                'write metrics={"all": …}: its members keep the names that they have in it'
                if type(metrics).__name__ == "MetricCollection"
                else 'write metrics={"accuracy": MulticlassAccuracy(num_classes=10)}',
            ),
            (
                bool(made_by),
                f"a listener is the class {made_by}, which makes listeners",
                "mh.Trainer(listeners=…)",
                f"write listeners=[{made_by}(…)]",
            ),
            (model is None, "the model is None", "mh.Trainer(model=…)", f"give {_CALLED['model'][1]}"),
        ]
    )
    functions = {"model": model, "loss": loss, "step": step, "optimizer": optimizer, "schedule": schedule}
    for name, function in functions.items():
        arguments, fix = _CALLED[name]
        if function is not None or name == "optimizer":  # the others may be left out
            check_called(name, function, arguments, where=f"mh.Trainer({name}=…)", fix=f"give {fix}")
    if callable(listeners) or not isinstance(listeners, Iterable) or not all(callable(each) for each in listeners):
        kind = "a function" if callable(listeners) else f"{listeners!r}"
        raise ConfigError(
            f"listeners is {kind}", where="mh.Trainer(listeners=…)", fix="write listeners=[function], a list"
        )


def check_maker(model: Any, called: str, *, where: str, write: str) -> None:
    """See that what makes a model can be called without arguments.

    Raises:
        ConfigError: it cannot.
    """
    if not isinstance(model, nn.Module) and callable(model) and (lacking := _lacking(model)):
        name = getattr(model, "__name__", "make")
        raise ConfigError(
            f"{called} is made by {name}(), which cannot be called without {lacking}",
            where=where,
            fix=f"write {write}{name}(…), with its arguments",
        )


def check_called(name: str, function: Any, given: Sequence[str] | None, *, where: str, fix: str) -> None:
    """See that `function`, which messages call `name`, can be called with arguments as `given`; None: with any.

    Raises:
        ConfigError: it cannot.
    """
    if not callable(function):
        raise ConfigError(f"{name} is a {type(function).__name__}, which cannot be called", where=where, fix=fix)
    if given is None:
        return
    try:
        _signature(function).bind(*given)
    except TypeError as cause:
        own = getattr(function, "__name__", type(function).__name__)
        what = f"{name} is called with ({', '.join(given)}), and {own} takes other arguments: {cause}"
        raise ConfigError(what, where=where, fix=fix) from None


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """That of `function`; of one that is written in C, and will say itself what it lacks, one that takes anything."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.signature(lambda *_, **__: None)


def check_callbacks(callbacks: Callbacks) -> None:
    """See that the methods of each can be called as they are.

    Raises:
        ConfigError: one takes other arguments.
    """
    for name, each in callbacks.by_name.items():
        for point in POINTS:
            check_called(
                f"{point} of callback {name!r}",
                getattr(each, point),
                ["moment"],
                where="mh.Trainer(callbacks=…)",
                fix=f"write def {point}(self, moment)",
            )


_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}
"""Of PyTorch: what they do to gradients would be done once more, in an order of their own."""


def check_unwrapped(model: nn.Module) -> None:
    """See that nothing in `model` exchanges gradients or parts by itself.

    Raises:
        ConfigError: a module does.
    """
    kinds = {kind.__name__ for each in model.modules() for kind in type(each).__mro__}
    wrapper = min(kinds & _WRAPPERS, default="")
    refuse(
        [
            (
                bool(wrapper),
                f"the model is wrapped in {wrapper}, which exchanges gradients or parts by itself",
                "mh.Trainer(model=…)",
                "give the module itself: how workers share its training is said by strategy=",
            ),
            (
                "FSDPModule" in kinds,
                "the model is in parts already, by PyTorch's fully_shard or by an earlier trainer",
                "mh.Trainer(model=…)",
                "make a new one, model=lambda: Net(); init_from= gives it the weights of an earlier run",
            ),
        ]
    )


def with_direction(settings: Settings, data: Data, metrics: Mapping[str, Any]) -> Settings:
    """`settings` in which early stopping, and the choice of the best model, know which way their metric is better.

    Raises:
        ConfigError: there is no validation set, or neither the script nor the metric says which way is better.
    """
    does = {"early_stopping": "early stopping watches", "best": "the best model is chosen by"}
    known = {
        key: _directed(rule, key, words, data, metrics)
        for key, words in does.items()
        if (rule := getattr(settings, key)) is not None
    }
    if not any(known.values()) and is_several(data.validation):
        known["best"] = Best(loss_of_first(data.validation), mode="min")
    return dataclasses.replace(settings, **known)


def _directed(rule: R, key: str, does: str, data: Data, metrics: Mapping[str, Any]) -> R:
    if data.validation is None:
        raise ConfigError(
            f"{does} {rule.metric!r}, but there is no validation set",
            where=key,
            fix=f"give mh.Data(validation=…), or leave {key} out",
        )
    if rule.mode is not None:
        return rule
    sets, name = data.validation, rule.metric
    if is_several(sets) and name.partition("/")[0] in cast(Mapping[str, Any], sets):
        name = name.partition("/")[2]
    higher = False if name == "loss" else getattr(metrics.get(name), "higher_is_better", None)
    if not isinstance(higher, bool):
        fix = f'mh.{type(rule).__name__}("{rule.metric}", mode="max") if higher is better, else mode="min"'
        if name not in metrics:
            before = [f"{each}/" for each in cast(Mapping[str, Any], sets)] if is_several(sets) else [""]
            reported = [f"{each}{value}" for each in before for value in ("loss", *metrics)]
            raise ConfigError(
                f"{does} {rule.metric!r}, and no metric of mh.Trainer(metrics=…) has that name",
                where=f"{key}.metric",
                fix=f"choose one of {', '.join(reported)}; of a value that step returns, write {fix}",
            )
        raise ConfigError(
            f"{does} {rule.metric!r}, which does not say whether higher or lower is better",
            where=f"{key}.mode",
            fix=f"write {fix}",
        )
    return dataclasses.replace(rule, mode="max" if higher else "min")


def _named(kind: type, module: str) -> str:
    """How a script writes a class: with its module, where that is PyTorch's."""
    return f"{module}.{kind.__name__}" if kind.__module__.startswith("torch.") else kind.__name__


def _lacking(function: Callable[..., Any]) -> str:
    """The names of the arguments that `function` has no values for when it is given none; empty where it has all."""
    known = _signature(function).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(each.name for each in known if each.default is inspect.Parameter.empty and each.kind not in kinds)


def is_lazy(model: nn.Module) -> bool:
    """Whether `model` has tensors whose shapes its first forward pass decides."""
    return any(parameter.is_lazy(each) for each in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def make_complete(model: nn.Module, data: Data, forward: Forward, *, seed: int) -> None:
    """Let a lazy `model` see two samples, so that it has all its tensors, the same on every worker.

    Raises:
        ConfigError: it cannot be shown any, or still lacks tensors after that.
    """
    if data.train is None or isinstance(data.train, IterableDataset):
        raise ConfigError(
            "the model has lazy layers, whose shapes its first batch decides, and there is none to show it beforehand",
            where="mh.Trainer(model=…)",
            fix="run the model once on a batch of yours before it is given to the trainer",
        )
    fetcher = Fetcher(data.train, seed=seed, name="train", collate=data.collate)
    training, device = model.training, next(model.parameters()).device
    with randomness.kept():
        batch = fetcher(0, np.arange(min(2, len(cast(Any, data.train))), dtype=np.int64))
        randomness.seed_all(seed, randomness.MODEL)
        model.eval()
        forward(model, mapped(batch, lambda tensor: tensor.to(device)))
    model.train(training)
    if is_lazy(model):
        raise ConfigError(
            "the model has lazy layers that its forward pass does not use, so that their shapes are not known",
            where="mh.Trainer(model=…)",
            fix="give these layers their shapes, or take them out",
        )


def check_tensors(model: nn.Module, *, takes_sparse: bool = False) -> None:
    """See that every tensor of `model` can be given to another worker, and every gradient be summed.

    `takes_sparse`: whether sparse gradients are exchanged.

    Raises:
        ConfigError: one cannot.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        refuse(
            [
                (
                    tensor.is_inference(),
                    f"{name} was made within torch.inference_mode(), and no one can see what a forward pass writes "
                    "into such a tensor",
                    "mh.Trainer(model=…)",
                    "make it under torch.no_grad(), or give a clone() of it",
                ),
                (
                    kind != "strided",
                    f"{name} is a {kind} tensor, which workers cannot send each other",
                    "mh.Trainer(model=…)",
                    "keep it as a dense tensor, and make the other of it in forward",
                ),
            ]
        )
    for name, module in _embeddings(model):
        if module.sparse and module.weight.requires_grad and not takes_sparse:
            takers = [each for each in STRATEGIES.own if STRATEGIES.load(each).traits.takes_sparse_gradients]
            raise ConfigError(
                f"the embedding {name!r} gives sparse gradients, and workers sum dense ones",
                where="mh.Trainer(model=…)",
                fix="leave sparse=True out, and take Adam or SGD in place of SparseAdam; or choose "
                f"strategy={' or '.join(map(repr, takers))}",
            )
        refuse(
            [
                (
                    module.max_norm is not None,
                    f"the embedding {name!r} has max_norm: its forward pass writes into its weight, on each worker by "
                    "its own samples",
                    "mh.Trainer(model=…)",
                    "leave max_norm out, and scale in forward what the embedding gives",
                ),
                (
                    module.scale_grad_by_freq,
                    f"the embedding {name!r} has scale_grad_by_freq: its gradient is divided by how often an index is "
                    "in a forward pass, which sees a part of the batch",
                    "mh.Trainer(model=…)",
                    "leave scale_grad_by_freq out",
                ),
            ]
        )


def _embeddings(model: nn.Module) -> list[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    return [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]


def check_optimizer(optimizer: Optimizer, world: World, *, holds_full_model: bool, takes_sparse: bool = False) -> None:
    """See that `optimizer` steps by gradients alone, and by those that a worker holds.

    Raises:
        ConfigError: it computes the loss itself, wants sparse gradients, or all of a matrix that workers share; or
            it is made for other steps than these.
    """
    # It takes means over the rows and columns of a matrix. By its name, for several packages have it.
    if not holds_full_model and any(each.__name__ == "Adafactor" for each in type(optimizer).__mro__):
        raise ConfigError(
            "Adafactor looks at full rows and columns of each matrix, of which a worker holds a part here",
            where="mh.Trainer(optimizer=…, strategy=…)",
            fix="choose an optimizer that treats each number alone, such as AdamW, or strategy='ddp'",
        )
    for group in optimizer.param_groups:
        if group.get("foreach") and len({type(each.data) for each in group["params"]}) > 1:
            raise ConfigError(
                f"{type(optimizer).__name__} is made with foreach=True, which steps all in one call, and here some "
                "of them lie in parts and others do not",
                where="mh.Trainer(optimizer=…, strategy=…)",
                fix="leave foreach out",
            )
        is_on_gpu = all(is_asynchronous(each.device) for each in group["params"])
        for option, reason, goes in (
            ("differentiable", "is for steps that are themselves differentiated", False),
            ("capturable", "takes a GPU", is_on_gpu),
        ):
            if group.get(option) and not goes:
                raise ConfigError(
                    f"{type(optimizer).__name__} is made with {option}=True, which {reason}",
                    where="mh.Trainer(optimizer=…)",
                    fix=f"leave {option} out",
                )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    wants_closure = closure is not None and closure.default is inspect.Parameter.empty
    if wants_closure or hasattr(optimizer, "first_step"):  # those of Sharpness-Aware Minimization take two
        raise several_gradients(optimizer)
    if isinstance(optimizer, torch.optim.SparseAdam) and world.is_shared and not takes_sparse:
        raise ConfigError(
            "SparseAdam wants sparse gradients, and workers sum dense ones",
            where="mh.Trainer(optimizer=…)",
            fix="choose Adam, and leave sparse=True out of embeddings",
        )


def check_own_steps(optimizer: Optimizer, strategy: Any, notes: list[str]) -> None:
    """See that a step of `optimizer` is one of each tensor by itself, where workers step some of them each.

    Raises:
        ConfigError: a hook of it would change tensors that are not those which are stepped; or it steps by an optimizer
            inside it, which has the model's own tensors.
    """
    kind, where = type(optimizer).__name__, f"strategy={strategy.name!r}"
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    inner = next((type(each).__name__ for each in vars(optimizer).values() if isinstance(each, Optimizer)), "")
    refuse(
        [
            (
                bool(hooks) and strategy.serves,
                f"{kind} has a hook on its step, and the tensors that are stepped are not the model's own",
                where,
                'do it in a callback (after_step), or choose strategy="ddp"',
            ),
            (
                bool(inner) and strategy.serves,
                f"{kind} steps by a {inner} inside it, which has the model's tensors and not those that are served",
                where,
                f'give the {inner} itself, or choose strategy="ddp"',
            ),
        ]
    )
    if hooks and strategy.steps_some:
        notes.append(
            f"{kind} has a hook on its step, which sees the tensors of this worker alone: what it takes over several "
            "of them (a norm, say) is of these; clip_gradients= sees all"
        )


def several_gradients(optimizer: Optimizer) -> ConfigError:
    """The error of an optimizer that wants the loss computed again within its step."""
    return ConfigError(
        f"{type(optimizer).__name__} computes the loss several times in a step, and a step here is one gradient",
        where="mh.Trainer(optimizer=…)",
        fix="choose an optimizer whose step() takes no closure, such as AdamW",
    )


def complete(optimizer: Optimizer) -> None:
    """Give an optimizer that wraps another what `Optimizer.__init__` would have, where it does not call that."""
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        vars(optimizer).setdefault("defaults", {})
        Optimizer.__setstate__(optimizer, {})


def check_sparse(model: nn.Module, optimizer: Optimizer) -> None:
    """See that what `optimizer` keeps of sparse gradients can be kept in a snapshot.

    Raises:
        ConfigError: SGD would keep a sparse momentum.
    """
    sgd = [each for each in each_of(optimizer).values() if isinstance(each, torch.optim.SGD)]
    known = {id(p) for each in sgd for group in each.param_groups if group["momentum"] for p in group["params"]}
    for name, module in _embeddings(model):
        if module.sparse and id(module.weight) in known:
            raise ConfigError(
                f"the embedding {name!r} gives sparse gradients, of which SGD's momentum is a sparse tensor that no "
                "snapshot can keep",
                where="mh.Trainer(optimizer=…)",
                fix="leave sparse=True out of the embedding, or momentum out of SGD, or choose SparseAdam",
            )


def check_kept(model: nn.Module) -> None:
    """See that snapshots can keep every tensor of `model`.

    Raises:
        ConfigError: there is no word for the dtype of one.
    """
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and not tensor.is_quantized and not can_keep(tensor.dtype):
            raise ConfigError(
                f"{name} is of {dtype_name(tensor.dtype)}, which no snapshot can keep",
                where="mh.Trainer(model=…)",
                fix="keep it as complex64, or as a tensor of float64 with one dimension more (torch.view_as_real)"
                if tensor.is_complex()
                else "keep it in another dtype, and change it in forward",
            )


def hooked(model: nn.Module) -> list[str]:
    """What is to be said of hooks that see gradients before they are summed over the workers."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    names = [name for name, each in model.named_parameters() if any(getattr(each, kind, None) for kind in kinds)]
    if not names:
        return []
    among = f" and {len(names) - 1} others" if len(names) > 1 else ""
    return [
        f"hooks on the gradient of {names[0]}{among} see the part of it that a piece of the batch gives, before the "
        "sum: a mask or a factor is the same as in one process, a clamp or a norm is not; clip_gradients and hooks of "
        "the optimizer (register_step_pre_hook) see the sum"
    ]


def make_schedule(make: Callable[[Optimizer], LRScheduler], optimizer: Optimizer) -> LRScheduler:
    """The user's schedule.

    Raises:
        ConfigError: it is nothing that a snapshot could keep.
    """
    made = make(optimizer)
    lacking = [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(made, name)]
    own = getattr(made, "optimizer", None)
    within = [optimizer, *(each for each in vars(optimizer).values() if isinstance(each, Optimizer))]  # a Lookahead
    known = {*map(id, within), *map(id, optimizer.param_groups)}
    refuse(
        [
            (
                bool(lacking),
                f"the schedule is a {type(made).__name__} without {''.join(lacking[:1])}()",
                "mh.Trainer(schedule=…)",
                "derive it from torch.optim.lr_scheduler.LRScheduler, or use LambdaLR with a function of the step",
            ),
            (
                isinstance(own, Optimizer) and known.isdisjoint(map(id, [own, *own.param_groups])),
                f"the schedule is a {type(made).__name__} of another optimizer, so it would never move this one's rate",
                "mh.Trainer(schedule=…)",
                "make it of what the function is given: schedule=lambda optimizer: StepLR(optimizer, 10), say",
            ),
        ]
    )
    return made


def check_rates(
    settings: Settings, before: Sequence[float], optimizer: Optimizer, make: Callable[[Optimizer], LRScheduler]
) -> None:
    """See that a schedule which `make` has made starts from the optimizer's rate, where a setting changes that.

    `before`: the rate of each group before it was made. Where the first rate of the schedule is another, it is made
    once more, for twice the rate: it may compute with that.

    Raises:
        ConfigError: its rates stay the same, as those that OneCycleLR and CyclicLR are given.
    """
    setting = "lr" if settings.lr is not None else "lr_scaling" if settings.lr_scaling else ""
    now = [group.get("initial_lr", rate) for group, rate in zip(optimizer.param_groups, before, strict=True)]
    if not setting or now == list(before):
        return
    probe = copy.copy(optimizer)
    probe.param_groups = [
        {**{key: value for key, value in group.items() if key != "initial_lr"}, "lr": 2 * rate}
        for group, rate in zip(optimizer.param_groups, before, strict=True)
    ]
    kind = type(make(probe)).__name__
    for group, own, rate in zip(probe.param_groups, now, before, strict=True):
        if group.get("initial_lr", own) == own != rate:
            raise ConfigError(
                f"{setting} would have no effect: {kind} begins with learning rates of its own",
                where=setting,
                fix=f"leave {setting} out, and change the rates that the script gives the schedule, such as max_lr",
            )
