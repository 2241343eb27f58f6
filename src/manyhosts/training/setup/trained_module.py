"""What is trained: the model, and with it a loss that has parameters or buffers of its own.

A strategy is given one module to place, sum and average. Where the loss has a state it is the two together, else it is
the model itself, so that nothing about it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

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
                fix="start in another --run-dir, or take back the change",
            )
    if own:
        assert isinstance(module, ModelAndLoss), "no other has a loss with a state"
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
                remedy = (
                    "make it a part of the model, such as self.head, and let step reach it through the model"
                    if has_step
                    else "make it a part of the model, or of an nn.Module that is given as loss"
                )
                raise ConfigError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} that belongs "
                    f"neither to the model nor to the loss, so workers would disagree about it",
                    where="mh.Trainer(optimizer=…)",
                    fix=remedy,
                )
            if id(parameter) in seen:
                raise twice(f"a parameter of shape {tuple(parameter.shape)} is in the optimizer twice")
            seen.add(id(parameter))


def twice(what: str) -> ConfigError:
    """The error of an optimizer that has a parameter twice."""
    return ConfigError(
        what,
        where="mh.Trainer(optimizer=…)",
        fix="the params that optimizer is called with hold those of the model and of the loss: add none of them again",
    )
