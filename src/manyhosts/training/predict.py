"""Predictions: what a model makes of each sample of a dataset, in the dataset's order, on every worker.

The samples are cut into the parts of an evaluation, by a rule that knows nothing of workers, so the forward passes and
their bits are the same on any number of them. Workers tell each other what each part gave as soon as all have one: what
is in memory is the answer, which every worker has whole, and one part of each worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from manyhosts.communication.gathering import can_travel, gather_lists, gather_words
from manyhosts.communication.world import World
from manyhosts.config.settings import Settings
from manyhosts.data import randomness
from manyhosts.data.data import Data, check_dataset
from manyhosts.data.fetch import Fetcher
from manyhosts.data.order import Indices, bounds
from manyhosts.data.steps import Loader, mapped
from manyhosts.device import is_asynchronous
from manyhosts.errors import ConfigError, DataError, ManyhostsError
from manyhosts.training.evaluate import in_evaluation, number_of_parts
from manyhosts.training.precision import Precision

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
    return model(batch)


class Prediction:
    """Applies models to all samples of one dataset."""

    def __init__(
        self,
        loader: Loader,
        samples: int,
        *,
        batch: int,
        world: World,
        forward: Forward,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """`batch`: most samples in one forward pass."""
        self.loader, self.samples, self.batch, self.world = loader, samples, batch, world
        self.forward, self.context = forward, context
        self.parts = number_of_parts(samples, batch)
        self.on_progress: Callable[[], None] = lambda: None
        """Called after every forward pass."""

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> Any:
        """What `forward` gives, each tensor `(samples, …)`, on the CPU; equal on all workers.

        Raises:
            DataError: a sample cannot be read. On all workers.
            ConfigError: what comes out has no row for each sample, or cannot be sent. On all workers.
        """
        world = self.world
        shares = [range(*bounds(self.parts, world.size, rank)) for rank in range(world.size)]
        own = [list(self._pieces(part)) for part in shares[world.rank]]
        batches = self.loader.batches((0, piece) for pieces in own for piece in pieces)
        whole: list[Tensor] = []
        form = ""
        with in_evaluation(model):
            for turn in range(max(map(len, shares))):
                part, error = _Answer(), None
                try:
                    for piece in own[turn] if turn < len(own) else ():
                        part.add(self._forward(model, next(batches), piece), len(piece))
                except ManyhostsError as found:
                    error = found
                form = self._agree(part.form, form, error)
                for share, tensors in zip(shares, gather_lists(world, part.tensors()), strict=True):
                    if turn < len(share):
                        whole = whole or [
                            tensor.new_empty((self.samples, *tensor.shape[1:]), device="cpu") for tensor in tensors
                        ]
                        begin, end = bounds(self.samples, self.parts, share[turn])
                        for column, tensor in zip(whole, tensors, strict=True):
                            column[begin:end] = tensor
        return _filled(json.loads(form), iter(whole))

    def _pieces(self, part: int) -> Iterator[Indices]:
        """The forward passes of one part."""
        begin, end = bounds(self.samples, self.parts, part)
        for start in range(begin, end, self.batch):
            yield np.arange(start, min(start + self.batch, end))

    def _forward(self, model: nn.Module, on_host: Any, piece: Indices) -> Any:
        batch = mapped(on_host, lambda tensor: tensor.to(self.world.device, non_blocking=True))
        randomness.seed_compute(self.loader.fetcher.seed, randomness.COMPUTE, int(piece[0]))  # a model may sample here
        with self.context():
            outputs = self.forward(model, batch)
        self.on_progress()
        return outputs

    def _agree(self, own: str, before: str, error: ManyhostsError | None) -> str:
        """See that nobody has failed and all have found outputs of one form. Returns it.

        Raises:
            ConfigError, DataError: on every worker alike.
        """
        told: dict[str, Any] = {"form": own}
        if error is not None:
            told |= {"what": error.what, "where": error.where, "fix": error.fix, "data": isinstance(error, DataError)}
        for row in map(json.loads, gather_words(self.world, json.dumps(told))):
            if "what" in row:
                kind = DataError if row["data"] else ConfigError
                raise kind(row["what"], where=row["where"], fix=row["fix"])
            before = before or row["form"]
            if row["form"] and row["form"] != before:
                raise _other_form(before, row["form"])
        return before


def make_prediction(
    dataset: Any, *, data: Data, settings: Settings, world: World, forward: Forward | None
) -> Prediction:
    """What applies models to `dataset`, read as those of `data` are.

    Raises:
        ConfigError, DataError: it is no dataset with a length, or has no samples.
    """
    check_dataset("prediction", dataset, where="trainer.predict(dataset)", is_stream_fine=False)
    seed = randomness.seed_at(settings.seed, randomness.EVALUATION)
    fetcher = Fetcher(dataset, seed=seed, name="prediction", collate=data.collate)
    batch = settings.evaluation_batch_size or settings.micro_batch_size or settings.batch_size
    return Prediction(
        Loader(fetcher, processes=settings.loader_workers, pin=is_asynchronous(world.device)),
        len(dataset),
        batch=batch or cast(int, settings.batch_size_per_worker),
        world=world,
        forward=forward or of_inputs,
        context=Precision(settings.precision, world.device).context,
    )


class _Answer:
    """What came out for the samples of one part."""

    def __init__(self) -> None:
        self.form = ""
        """That of the outputs, as JSON: see `_form`; empty where there are none."""
        self._rows: list[list[Tensor]] = []

    def add(self, outputs: Any, count: int) -> None:
        """Add the `outputs` for `count` samples."""
        row: list[Tensor] = []
        form = json.dumps(_form(outputs, count, row))
        if self.form and form != self.form:
            raise _other_form(self.form, form)
        self.form = form
        self._rows.append(row)

    def tensors(self) -> list[Tensor]:
        """Each tensor of the outputs, `(samples of the part, …)`."""
        return [torch.cat(column) for column in zip(*self._rows, strict=True)]


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


def _other_form(before: str, now: str) -> ConfigError:
    return ConfigError(
        f"what comes out differs from batch to batch: {before}, then {now}",
        where=_WHERE,
        fix="give forward=function(model, batch) that returns the same tensors for every batch",
    )
