"""Predictions: what a model makes of each sample of a dataset, in the dataset's order, on every worker.

The samples are cut into the parts of an evaluation, so the bits are the same on any number of workers that compute with
as many threads. These send each other what each part gave as soon as all have one: what is in memory is the answer,
which every worker has complete, and one part of each worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.communication.gathering import can_travel, gather_lists, gather_plain
from manyhosts.data.order import Indices
from manyhosts.errors import ConfigError, ManyhostsError
from manyhosts.evaluation.dataset_forward import ForwardPasses
from manyhosts.model.trained_module import in_evaluation

Forward = Callable[[nn.Module, Any], Any]
"""What is to be known of a batch, for each of its samples."""
_WHERE = "trainer.predict"


def of_inputs(model: nn.Module, batch: Any) -> Any:
    """`model(inputs)`: the first of an (inputs, targets) pair, the only one of a list of one, else the batch itself."""
    if isinstance(batch, tuple | list):
        if not 1 <= len(batch) <= 2:
            raise ConfigError(
                f"a batch has {len(batch)} parts, and which of them the model takes is not known",
                where=_WHERE,
                fix="give forward=lambda model, batch: model(batch[0], batch[1]), as the model wants it",
            )
        return model(batch[0])
    if not isinstance(batch, Mapping):
        return model(batch)
    try:
        return model(batch)
    except TypeError as cause:
        raise ConfigError(
            f"a batch is a dict of {', '.join(map(str, batch))}, and the model does not take it as it is: {cause}",
            where=_WHERE,
            fix="give forward=lambda model, batch: model(batch['x']), or model(**batch), as the model wants it",
        ) from cause


class Prediction:
    """Applies models to all samples of one dataset."""

    def __init__(self, passes: ForwardPasses, forward: Forward = of_inputs) -> None:
        self.passes, self.world, self.forward = passes, passes.world, forward

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> Any:
        """What `forward` gives, each tensor `(samples, …)`, on the CPU; equal on all workers.

        Raises:
            DataError: a sample cannot be read. On all workers.
            ConfigError: what comes out has no row for each sample, or cannot be sent. On all workers.
        """
        passes, world = self.passes, self.world
        shares = passes.shares()
        own = [passes.pieces(part) for part in shares[world.rank]]
        batches = passes.fetched(piece for pieces in own for piece in pieces)
        full: list[Tensor] = []
        form = ""  # that of the outputs, as JSON: see `_form`; empty as long as there are none
        with in_evaluation(model):
            for turn in range(max(map(len, shares))):
                rows: list[list[Tensor]] = []
                own_form, error = "", None
                try:
                    for piece in own[turn] if turn < len(own) else ():
                        outputs = self._forward(model, next(batches), piece)
                        rows.append([])
                        own_form = _the_same([own_form, json.dumps(_form(outputs, len(piece), rows[-1]))])
                    ghosts = passes.ghosts([share[turn : turn + 1] for share in shares])
                    for ghost, batch in zip(ghosts, passes.fetched(iter(ghosts)), strict=False):
                        self._forward(model, batch, ghost)
                except ManyhostsError as found:
                    if passes.together is not None:
                        raise  # the others wait for this worker within the model, and nowhere else
                    error = found
                form = _the_same([form, *gather_plain(world, own_form, error)])
                part = (torch.cat(column) for column in zip(*rows, strict=True))
                for share, tensors in zip(shares, gather_lists(world, list(part)), strict=True):
                    if turn < len(share):
                        full = full or [
                            each.new_empty((passes.samples, *each.shape[1:]), device="cpu") for each in tensors
                        ]
                        for column, tensor in zip(full, tensors, strict=True):
                            column[slice(*passes.bounds(share[turn]))] = tensor
        return _filled(json.loads(form), iter(full))

    def _forward(self, model: nn.Module, on_host: Any, piece: Indices) -> Any:
        batch = self.passes.on_device(on_host, piece)
        with self.passes.context():
            outputs = self.forward(model, batch)
        self.passes.on_progress()
        return outputs


def _the_same(forms: Iterable[str]) -> str:
    """The form that all of `forms` are, but for those that are empty.

    Raises:
        ConfigError: there are several.
    """
    found = list(dict.fromkeys(filter(None, forms)))
    if len(found) > 1:
        raise ConfigError(
            f"what comes out differs from batch to batch: {found[0]}, then {found[1]}",
            where=_WHERE,
            fix="give forward=function(model, batch) that returns the same tensors for every batch",
        )
    return found[0] if found else ""


def _form(outputs: Any, count: int, found: list[Tensor]) -> Any:
    """The containers of `outputs`, with the dtype and shape of a row in the place of each tensor; these go to `found`.

    Raises:
        ConfigError: there is something else in it, or a tensor without a row for each of `count` samples.
    """
    if isinstance(outputs, Tensor):
        if outputs.dim() == 0 or len(outputs) != count:
            raise ConfigError(
                f"a tensor of shape {tuple(outputs.shape)} came out for {count} samples",
                where=_WHERE,
                fix="give forward=function(model, batch) whose tensors have a row for each sample",
            )
        if not can_travel(outputs):
            raise ConfigError(
                f"a {str(outputs.layout).removeprefix('torch.')} tensor of {outputs.dtype} with {outputs.dim()} dims"
                " came out, which workers cannot send each other",
                where=_WHERE,
                fix="give forward=function(model, batch) that turns it into a dense tensor of numbers",
            )
        found.append(outputs.detach())
        return {"tensor": [str(outputs.dtype).removeprefix("torch."), list(outputs.shape[1:])]}
    if isinstance(outputs, Mapping):
        return {"dict": [[str(key), _form(value, count, found)] for key, value in outputs.items()]}
    if isinstance(outputs, tuple | list):
        kind = "list" if isinstance(outputs, list) else "tuple"
        return {kind: [_form(value, count, found) for value in outputs]}
    if outputs is None:
        return None
    raise ConfigError(
        f"a {type(outputs).__name__} came out",
        where=_WHERE,
        fix="give forward=function(model, batch) that returns tensors, or tuples, lists and dicts of them",
    )


def _filled(form: Any, tensors: Iterator[Tensor]) -> Any:
    """The containers of `form` with `tensors` in their places."""
    if form is None:
        return None
    [(kind, inner)] = form.items()
    if kind == "tensor":
        return next(tensors)
    if kind == "dict":
        return {key: _filled(value, tensors) for key, value in inner}
    values = [_filled(value, tensors) for value in inner]
    return tuple(values) if kind == "tuple" else values
