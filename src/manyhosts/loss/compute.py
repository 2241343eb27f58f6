"""What is computed of one piece: its random numbers, the chosen precision, model and loss, and what these must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from manyhosts.communication.batch_norm import GlobalBatch
from manyhosts.communication.world import is_connection_error
from manyhosts.data import randomness
from manyhosts.errors import ConfigError, first_line
from manyhosts.model.trained_module import ModelAndLoss, collective_forward, model_of
from manyhosts.snapshot.tensors import dtype_name
from manyhosts.strategies.strategy import Piece

LOSS, STEP, EVALUATE = "mh.Trainer(loss=…)", "mh.Trainer(step=…)", "mh.Run(evaluate=…)"
"""Where a script gives what returns a loss."""
Loss = Callable[[Any, Any], Tensor]
"""`loss(model(inputs), targets)`: the mean over the samples it is given, shape ()."""
UserStep = Callable[[nn.Module, Any], Tensor | Mapping[str, Any]]
"""`step(model, batch)`: the mean loss over the batch, or a mapping with `loss` and values to log."""


def may_draw(optimizer: Optimizer) -> bool:
    """Whether a step of `optimizer` could draw random numbers. PyTorch's own draw none, so they go without a seed."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(hooks) or not type(optimizer).__module__.startswith("torch.optim.")


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What a forward pass runs in under `precision`."""
    if precision == "fp32":
        return nullcontext
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    return lambda: torch.autocast(device.type, dtype=dtype)


def pair(batch: Any, fix: str = "pass step=function(model, batch) -> loss in place of loss=") -> tuple[Any, Any]:
    """`batch` as (inputs, targets).

    Raises:
        ConfigError: it is something else; `fix` says what to do.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(
        f"a batch is a {type(batch).__name__}"
        + (f" of {len(batch)}" if isinstance(batch, list | tuple | Mapping) else "")
        + ", not an (inputs, targets) pair",
        where=LOSS,
        fix=fix,
    )


IN_PAIRS = "let mh.Data(collate=…) make (inputs, targets) of the samples: this strategy takes no step="
"""What to do where a strategy computes model and loss separately, and batches are no pairs."""


_ALONE = nullcontext()
_FIRST_STEPS = 3
"""In which it is seen whether the user's step writes gradients."""


@dataclass(eq=False)
class ForwardPass:
    """Called by a strategy for each piece of a step."""

    loss: Loss | None
    step: UserStep | None
    seed: int
    context: Callable[[], AbstractContextManager[Any]]
    global_batch: GlobalBatch | None = None
    is_collective: bool = False
    """Whether workers exchange something in every forward pass, so that none may call the model alone."""

    def __call__(self, module: nn.Module, piece: Piece) -> Mapping[str, Tensor]:
        """The means over the piece's samples: `loss`, and what the user's step returned besides it."""
        batch = piece.batch  # it may draw random numbers of its own
        randomness.seed_compute(self.seed, randomness.COMPUTE, *piece.address)
        if self.global_batch is not None:
            # In the backward pass, too, where a checkpoint computes again.
            self.global_batch.ghost = piece.weight == 0
        looks = piece.weight != 1 and piece.address[0] < _FIRST_STEPS
        # Those of now: where a strategy keeps parts, others are in their place while the model is computed.
        parameters = list(module.parameters()) if looks else []
        before = _gradients(parameters)
        model = module.model if isinstance(module, ModelAndLoss) else module
        with self.context(), collective_forward(model) if self.is_collective else _ALONE:
            if self.step is not None:
                values = step_values(self.step(model, batch))
            else:  # as `loss_of_pair`, without another call: a step has six hops from `fit` to the model
                assert self.loss is not None, "a trainer has either a loss or a step"
                inputs, targets = pair(batch)
                try:
                    outputs = model(inputs)
                except RuntimeError as cause:
                    check_doubles(cause, model, inputs)
                    raise
                values = {"loss": loss_of(self.loss, outputs, targets)}
        if isinstance(values, Terms):
            values = values.counted(piece)
        where = LOSS if self.step is None else STEP
        check_gradient(values["loss"], where)
        if looks and _gradients(parameters) != before:
            raise ConfigError(
                "the step has changed gradients itself, and its batch is a piece of a larger one, whose mean they are "
                "not",
                where=where,
                fix="return the loss, and leave backward(), zero_grad() and optimizer.step() to the trainer",
            )
        return values

    def inputs_of(self, piece: Piece) -> tuple[Any, Any]:
        """See `strategies.strategy.InTwo`."""
        batch = piece.batch
        randomness.seed_compute(self.seed, randomness.COMPUTE, *piece.address)
        return pair(batch, IN_PAIRS)

    def values_of(self, outputs: Any, targets: Any) -> Mapping[str, Tensor]:
        """See `strategies.strategy.InTwo`."""
        assert self.loss is not None, "a strategy that computes model and loss separately refuses a step"
        values = {"loss": loss_of(self.loss, outputs, targets)}
        check_gradient(values["loss"], LOSS)
        return values

    def values(self, module: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Those of one batch, with the random numbers and the precision of the caller."""
        model = model_of(module)
        if self.step is not None:
            return step_values(self.step(model, batch))
        return {"loss": loss_of_pair(model, self.loss, batch)[0]}


def loss_of_pair(
    model: nn.Module, loss: Loss | None, batch: Any, *, where: str = "mh.Data(train=…)"
) -> tuple[Tensor, Any, Any]:
    """The loss of an (inputs, targets) batch, what the model made of the inputs, and the targets.

    Raises:
        ConfigError: see `pair`, `check_doubles` and `loss_of`; `where` says whose batch it is.
    """
    assert loss is not None, "a trainer has either a loss or a step"
    inputs, targets = pair(batch)
    try:
        outputs = model(inputs)
    except RuntimeError as cause:
        check_doubles(cause, model, inputs, where=where)
        raise
    return loss_of(loss, outputs, targets), outputs, targets


def check_gradient(loss: Tensor, where: str, *, of: str = "that is trained") -> None:
    """See that there is something to go backward through; `of`: which parameters are to be given a gradient.

    Raises:
        ConfigError: there is nothing; `where` says whose loss it is.
    """
    if not loss.requires_grad:
        raise ConfigError(
            f"the loss does not depend on any parameter {of}, so it has no gradient",
            where=where,
            fix="look for detach(), torch.no_grad(), .item() or argmax between the model and the loss, and return "
            "the loss as it is computed, without a backward() of its own",
        )


def _gradients(parameters: Sequence[nn.Parameter]) -> list[int]:
    """What changes when somebody writes gradients."""
    return [-1 if each.grad is None else each.grad._version for each in parameters]


def check_doubles(cause: RuntimeError, model: nn.Module, inputs: Any, *, where: str = "mh.Data(train=…)") -> None:
    """Look why `model` has failed on `inputs`.

    Raises:
        ConfigError: it computes in float32 and they are of float64, as NumPy makes them.
    """
    said = str(cause).lower()
    about_kinds = ("double" in said or "dtype" in said) and "long" not in said and not is_connection_error(cause)
    doubles = isinstance(inputs, Tensor) and inputs.dtype == torch.float64
    if about_kinds and doubles and all(each.dtype != torch.float64 for each in model.parameters()):
        raise ConfigError(
            f"the model cannot take inputs of float64, as NumPy makes them: {first_line(cause)}",
            where=where,
            fix="give float32: torch.from_numpy(array).float(), or array.astype('float32'), in the dataset",
        ) from cause


def loss_of(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """What `loss` says of what the model returned.

    Raises:
        ConfigError: it takes tensors alone, and the model returned something else; or it says more than one number; or
            it holds each output against the targets of other samples by a rule of broadcasting.
    """
    name = _of_pytorch(loss)
    if name and not hasattr(type(outputs), "__torch_function__"):  # no tensor, nor what acts as one
        named = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else ""
        raise ConfigError(
            f"the model returns a {type(outputs).__name__}{named and f' ({named})'}, and the loss takes a tensor",
            where=LOSS,
            fix="pass loss=function(outputs, targets) -> loss, which takes the tensor out of it, or "
            "step=function(model, batch) -> loss",
        )
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return one_number(loss(outputs, targets), where=LOSS)
    if not name:
        shapes, rows = {tuple(outputs.shape), tuple(targets.shape)}, outputs.numel()
        with _BroadcastCheck(outputs, targets) if rows > 1 and shapes == {(rows, 1), (rows,)} else _ALONE:
            return one_number(loss(outputs, targets), where=LOSS)
    _check_shapes(name, outputs.shape, targets.shape)
    try:
        found = loss(outputs, targets)
    except (ValueError, IndexError, RuntimeError) as cause:
        if isinstance(cause, torch.OutOfMemoryError) or is_connection_error(cause):
            raise
        given = [f"{tuple(each.shape)} of {dtype_name(each.dtype)}" for each in (outputs, targets)]
        raise ConfigError(
            f"{name} cannot take outputs {given[0]} with targets {given[1]}: {first_line(cause)}",
            where=LOSS,
            fix="it takes outputs (N, classes) and the number of a class for each, (N) of int64, from 0 to classes - 1"
            if name in _BY_CLASS
            else "most losses take both in one shape and of float32: .float() or .unsqueeze(-1) in the dataset",
        ) from cause
    return one_number(found, where=LOSS)


_OF_PAIRS = {
    "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss", "KLDivLoss", "mse_loss", "l1_loss",
    "smooth_l1_loss", "huber_loss", "poisson_nll_loss", "kl_div",
}  # fmt: skip
"""Losses of PyTorch that hold each output against the target in its place, and broadcast both without an error."""
_BY_CLASS = {"CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss"}


class _BroadcastCheck(TorchFunctionMode):
    """Within, a loss of the user's own is computed of outputs (N, 1) and targets (N), or the other way round.

    Raises:
        ConfigError: it subtracts them, say, which gives N times N numbers.
    """

    def __init__(self, outputs: Tensor, targets: Tensor) -> None:
        super().__init__()
        self.given, self.samples, self.broadcasts = (outputs, targets), len(targets), False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        found, samples = func(*args, **(kwargs or {})), self.samples
        pair = [each for each in args if isinstance(each, Tensor)][:2]
        if {tuple(each.shape) for each in pair} == {(samples, 1), (samples,)}:
            # Of one another, and not pairs that the loss makes of outputs alone, or of targets.
            others = pair[0].untyped_storage().data_ptr() != pair[1].untyped_storage().data_ptr()
            is_given = others and any(each is given for each in pair for given in self.given)
            gives_all = getattr(func, "__name__", "") in _OF_PAIRS or getattr(found, "shape", ()) == (samples, samples)
            self.broadcasts |= is_given and gives_all
        return found

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if self.broadcasts and error is None:
            raise ConfigError(
                f"the model's outputs have shape {tuple(self.given[0].shape)} and the targets "
                f"{tuple(self.given[1].shape)}: the loss takes both together, which by broadcasting gives "
                f"{self.samples} times {self.samples} numbers, of outputs with the targets of other samples",
                where=LOSS,
                fix="give both one shape: outputs.squeeze(-1) in the loss, say; where all pairs are meant, write "
                "targets[None, :]",
            )


def _of_pytorch(loss: Loss) -> str:
    """The name of a loss of PyTorch's own; empty for one that the user wrote, which may take what it likes."""
    # A module is asked for no attribute that it lacks: it would search all that it has, in each forward pass.
    own: Any = type(loss) if isinstance(loss, nn.Module) else getattr(loss, "func", loss)  # what a partial calls
    own = own if hasattr(own, "__name__") else type(own)
    return str(own.__name__) if own.__module__ in ("torch.nn.modules.loss", "torch.nn.functional") else ""


def _check_shapes(loss: str, outputs: Sequence[int], targets: Sequence[int]) -> None:
    """See that outputs and targets fit `loss`, where PyTorch computes a wrong loss of those that do not.

    Raises:
        ConfigError: each output would be held against the targets of other samples, too.
    """
    shapes = f"the model's outputs have shape {tuple(outputs)} and the targets {tuple(targets)}"
    if loss in _OF_PAIRS and targets and tuple(outputs) != tuple(targets):
        own, others = math.prod(outputs[1:]), math.prod(targets[1:])
        raise ConfigError(
            f"{shapes}: {loss} compares them number by number, and PyTorch would broadcast one to the other, so that "
            "outputs meet the targets of other samples, or fail",
            where=f"mh.Trainer(loss={loss})",
            fix="give both one shape: let the model end with .squeeze(-1) or nn.Flatten(0), or the dataset give each "
            "target with .unsqueeze(-1)"
            if own == others
            else f"the model gives {own} numbers for a sample, and its target is {others}: let it end with as many, as "
            f"nn.Linear(…, {others}) gives; where targets are classes, take nn.CrossEntropyLoss()",
        )
    if loss in _BY_CLASS and len(outputs) == 1:
        raise ConfigError(
            f"{shapes}: {loss} takes a row of scores, one for each class, for every sample, and would take all samples "
            "for the classes of one",
            where=f"mh.Trainer(loss={loss})",
            fix="let the model give shape (samples, classes); for one score for each sample use nn.BCEWithLogitsLoss",
        )


def one_number(loss: Tensor, *, where: str) -> Tensor:
    """`loss`, of shape ().

    Raises:
        ConfigError: it has another, or is no tensor.
    """
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"the loss is a {type(loss).__name__}, but must be a tensor of one number: the mean over the samples",
            where=where,
            fix="return the loss alone; values to log next to it are returned by mh.Trainer(step=…), as "
            '{"loss": loss, "name": value, …}',
        )
    if loss.dim():
        raise ConfigError(
            f"the loss has shape {tuple(loss.shape)}, but must be one number: the mean over the samples",
            where=where,
            fix='use reduction="mean"',
        )
    return loss


class Terms(dict[str, Tensor]):
    """The values of a step whose loss is a sum of several, each the mean over something else."""

    def __init__(self, values: Mapping[str, Tensor], terms: Mapping[str, Tensor]) -> None:
        super().__init__(values)
        self.terms = terms

    def counted(self, piece: Piece) -> dict[str, Tensor]:
        """The values, with each loss that times the piece's weight is what the piece adds to the global one.

        Raises:
            ConfigError: `weight` gives numbers for other losses, or one for all of several.
        """
        shares = piece.shares
        if shares is None:
            return {**self, **named_terms(self.terms)}
        check_names(self.terms, shares)
        if not piece.weight:
            parts = {name: each.nan_to_num() for name, each in self.terms.items()}
        else:  # the mean over nothing is no number, and its gradient neither
            parts = {name: self.terms[name] * (share / piece.weight) for name, share in shares.items() if share}
        none = {name: torch.zeros_like(each) for name, each in self.terms.items()}
        return {**self, **named_terms({**none, **parts}), "loss": torch.stack([*parts.values()]).sum()}


def named_terms(terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Several losses by the names under which they are recorded."""
    return {f"loss/{name}": each.detach() for name, each in terms.items()}


def terms_of(values: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """The several losses of a step, by name; None where it has one."""
    return values.terms if isinstance(values, Terms) else None


def check_names(losses: Mapping[str, Any], counts: Mapping[str, Any]) -> None:
    """See that `weight` says of each loss what it counts.

    Raises:
        ConfigError: it does not.
    """
    if set(losses) != set(counts):
        given, said = (", ".join(sorted(each)) or "none" for each in (losses, counts))
        raise ConfigError(
            f"step returns the losses {given}, and weight says what these count: {said}",
            where="mh.Trainer(step=…, weight=…)",
            fix="let weight(batch) return a number for each loss, under its name",
        )


def check_count(total: float, where: str) -> None:
    """See that a mean can be over so many.

    Raises:
        ConfigError: it cannot; `where` says whose count it is.
    """
    if not 0 <= total < math.inf:
        raise ConfigError(
            f"count is {total} over the batch, and says how many there are of what the loss is a mean over",
            where=where,
            fix="give one number with each loss, 0 or more",
        )


OVER_BATCH = "run.backward(over_batch=…)"
_WHO = {
    STEP: "step",
    EVALUATE: "evaluate",
    "run.backward": "the function that run.backward was given",
    OVER_BATCH: "the function over_batch",
}
"""What a script calls what returns a loss, by where it is given."""


def step_values(result: Tensor | Mapping[str, Any], where: str = STEP) -> dict[str, Tensor]:
    """What a user's step returned, as tensors of shape (); `outputs` and `targets`, which are for metrics, left out.

    Raises:
        ConfigError: there is no loss in it, or something besides it that is no number; `where` says whose it is.
    """
    if isinstance(result, Tensor):
        return {"loss": one_number(result, where=where)}
    if isinstance(result, Mapping) and isinstance(result.get("loss"), Mapping) and result["loss"]:
        terms = {name: one_number(each, where=where) for name, each in result["loss"].items()}
        values = step_values({**result, "loss": sum(terms.values())}, where)
        return Terms(values, terms)
    if not isinstance(result, Mapping) or not isinstance(result.get("loss"), Tensor):
        raise ConfigError(
            f"{_WHO[where]} returned a {type(result).__name__} without a tensor named 'loss'",
            where=where,
            fix='return the mean loss over the batch, or {"loss": loss, "name": value, …}',
        )
    if "weight" in result:
        of_step = where == STEP
        raise ConfigError(
            f"{_WHO[where]} returned a value named 'weight', but what a piece counts "
            + ("must be known before it is computed" if of_step else "is called 'count'"),
            where=where,
            fix=("give it as mh.Trainer(weight=function(batch) -> number)" if of_step else "return it as 'count'")
            + ", or log the value under another name",
        )
    device = one_number(result["loss"], where=where).device
    return {
        name: number_of(name, value, device, where)
        for name, value in result.items()
        if name not in ("outputs", "targets")
    }


def number_of(name: str, value: Any, device: torch.device, where: str, dtype: torch.dtype | None = None) -> Tensor:
    """A value that is logged besides a loss.

    Raises:
        ConfigError: it is not one number.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.to(device)
    try:
        if isinstance(value, str):
            raise TypeError("float would read it")
        return torch.tensor(float(value), dtype=dtype, device=device)
    except (TypeError, ValueError, OverflowError, RuntimeError) as cause:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        more = (
            "; of an output of Hugging Face return its loss alone (output.loss), and what metrics take under 'outputs' "
            "and 'targets'"
        )
        raise ConfigError(
            f"the value {name!r} is a {type(value).__name__}{shape}, but what goes with a loss must be one number",
            where=where,
            fix=f"give each number a name of its own{'' if where == 'run.log' else more}",
        ) from cause
