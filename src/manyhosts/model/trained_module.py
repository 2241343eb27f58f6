"""What is trained: the model, and with it a loss that has parameters or buffers of its own; who may call it.

A strategy is given one module to place, sum and average. Where the loss has a state it is the two together, else it is
the model itself, so that nothing about it changes. Where workers exchange something in every forward pass, a worker
that alone called the model would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhosts.errors import ConfigError, SnapshotError


class ModelAndLoss(nn.Module):
    """A model and its loss as one module. Never called: the forward pass takes its two members."""

    is_never_called: ClassVar[bool] = True
    """For strategies that do something when a module is called."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss


def trained(model: nn.Module, loss: Callable[..., Any] | None) -> nn.Module:
    """`model`, together with `loss` where that has a state which is not the model's."""
    if not isinstance(loss, nn.Module):
        return model
    known = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    own = [tensor for tensor in [*loss.parameters(), *loss.buffers()] if id(tensor) not in known]
    return ModelAndLoss(model, loss) if own else model


def model_of(module: nn.Module) -> nn.Module:
    """The model in what is trained."""
    return module.model if isinstance(module, ModelAndLoss) else module


def loss_state(module: nn.Module) -> dict[str, Any]:
    """What snapshots keep of the loss; empty where it has no state, or only what the script gives it again.

    That is so for PyTorch's own losses: their buffers are the class weights of the script.
    """
    if not isinstance(module, ModelAndLoss) or type(module.loss).__module__ == "torch.nn.modules.loss":
        return {}
    return dict(module.loss.state_dict())


def names_kept(module: nn.Module) -> dict[int, str]:
    """The name of each parameter in what is trained, by its `id`: where snapshots keep it, as `model.head.weight`."""
    prefix = "" if isinstance(module, ModelAndLoss) else "model."
    return {id(parameter): f"{prefix}{name}" for name, parameter in module.named_parameters()}


def load_loss(module: nn.Module, kept: dict[str, Any]) -> None:
    """Put what `loss_state` gave into the loss, in place.

    Raises:
        SnapshotError: it is of another loss; nothing has been changed then.
    """
    own = loss_state(module)
    for name in sorted(own.keys() | kept.keys()):
        here, there = _words(own.get(name)), _words(kept.get(name))
        if here != there:
            raise SnapshotError(
                f"it is of another loss: there {name} is {there}, here it is {here}",
                where="mh.Trainer(loss=…)",
                fix="take back the change, or begin again in another folder (of a run: --run-dir)",
            )
    if isinstance(module, ModelAndLoss) and own:
        module.loss.load_state_dict(kept)


def _words(value: Any) -> str:
    if value is None:
        return "missing"
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_optimized(groups: list[dict[str, Any]], module: nn.Module, *, has_step: bool) -> None:
    """See that an optimizer of these parameter `groups` holds parameters of `module` alone, each once.

    Others would be no part of the gradient's exchange, of snapshots, or of what a new worker is given.

    Raises:
        ConfigError: it holds another, or one twice.
    """
    known = {id(parameter) for parameter in module.parameters()}
    seen: set[int] = set()
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} that belongs "
                    f"neither to the model nor to the loss, so workers would disagree about it",
                    where="mh.Trainer(optimizer=…)",
                    fix="make it a part of the model, such as self.head, and let step reach it through the model"
                    if has_step
                    else "make it a part of the model, or of an nn.Module that is given as loss",
                )
            if id(parameter) in seen:
                raise twice(f"a parameter of shape {tuple(parameter.shape)} is in the optimizer twice")
            seen.add(id(parameter))


def untrained(
    module: nn.Module, optimizer: Optimizer, thawed: Collection[str], *, all_of_them: bool
) -> dict[str, nn.Parameter]:
    """By name, the frozen parameters of `module` that are never trained: no callback has `thawed` them later.

    `all_of_them`: also those that `optimizer` has; else it may step them when they are thawed.
    """
    stepped = set() if all_of_them else {id(each) for group in optimizer.param_groups for each in group["params"]}
    return {
        name: each
        for name, each in module.named_parameters()
        if not each.requires_grad and id(each) not in stepped and name.removeprefix("model.") not in thawed
    }


def check_still_frozen(frozen: Mapping[str, nn.Parameter]) -> None:
    """See that none of what `untrained` has found is trained now: it would have gradients, and never change.

    Raises:
        ConfigError: one is.
    """
    for name, each in frozen.items():
        if each.requires_grad:
            raise ConfigError(
                f"{name} was frozen when the trainer was made, and is to be trained now: no one would step it, or sum "
                "its gradients",
                where=f"{name}.requires_grad",
                fix=f'freeze it for a part of the run: callbacks=[mh.Freeze("{name}", until="1 epoch")]; or make '
                "another trainer, whose init_from= is this run",
            )


def twice(what: str) -> ConfigError:
    """The error of an optimizer that has a parameter twice."""
    return ConfigError(
        what,
        where="mh.Trainer(optimizer=…)",
        fix="the params that optimizer is called with hold those of the model and of the loss: add none of them again",
    )


_guarded: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Of models that no one may call alone: within how many `collective_forward`s each is now."""


class collective_forward:  # read as a verb: with called_by_all(model)
    """Within, every worker calls `model` as often as this one, in the same order."""

    __slots__ = ("_model",)

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __enter__(self) -> None:
        if self._model in _guarded:
            _guarded[self._model] += 1

    def __exit__(self, *_: object) -> None:
        if self._model in _guarded:
            _guarded[self._model] -= 1


@contextmanager
def in_evaluation(model: nn.Module, loss: object = None) -> Iterator[None]:
    """`model` in evaluation mode, called by all, and with it a `loss` that is a module, too; afterwards every module is
    back in the mode that it had.
    """
    modules = [each for each in (model, loss) if isinstance(each, nn.Module)]
    training = [part for each in modules for part in each.modules() if part.training]
    for each in modules:
        each.eval()
    try:
        with collective_forward(model):
            yield
    finally:
        for part in training:
            part.training = True


def refuse_other_calls(model: nn.Module) -> None:
    """From now on a call of `model` from elsewhere ends in a sentence."""
    _guarded[model] = 0
    # Before the hook that begins to gather: the others would take what it sends for something else.
    model.register_forward_pre_hook(torch.compiler.disable(_check), prepend=True)


def _check(model: nn.Module, inputs: Any) -> None:
    if not _guarded.get(model):
        raise ConfigError(
            "the model is called by the script itself, and its parts are gathered only where all workers call it in "
            "the same order",
            where="trainer.model(…)",
            fix="call trainer.predict(dataset, forward=…) on all workers; or make a model of your own and give it what "
            "mh.load(run_dir) gives, which is all of it",
        )


def summary(model: nn.Module, *, depth: int = 2) -> str:
    """One row for each module down to `depth`, with what is below it; tied parameters count once, where they are first.

    Shape of a row: name, class, parameters, how many are trained. The last row is the total, with its bytes.
    """
    rows = [("module", "class", "parameters", "trained"), *_rows(model, "", depth, set())]
    every = list(model.parameters())
    total, trained = sum(each.numel() for each in every), sum(each.numel() for each in every if each.requires_grad)
    size = sum(each.numel() * each.element_size() for each in (*every, *model.buffers()))
    rows.append(("all", f"{size / 1e6:.3g} MB with buffers", f"{total:,}", f"{trained:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {count:>{widths[2]}}  {of_it:>{widths[3]}}"
        for name, kind, count, of_it in rows
    )


def _rows(module: nn.Module, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, str, str, str]]:
    for name, child in module.named_children():
        new = [each for each in child.parameters() if id(each) not in seen]
        below = f"{path}{name}"
        count, trained = sum(e.numel() for e in new), sum(e.numel() for e in new if e.requires_grad)
        yield below, type(child).__name__, f"{count:,}", f"{trained:,}"
        if depth > 1:
            yield from _rows(child, f"{below}.", depth - 1, seen)
        seen |= {id(each) for each in new}
