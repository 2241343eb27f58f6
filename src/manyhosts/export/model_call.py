"""How the script calls its model, found by showing it real samples: which tensors go in, and what comes out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset, default_collate

from manyhosts.data.fetch import Fetcher
from manyhosts.data.steps import mapped
from manyhosts.errors import ConfigError
from manyhosts.evaluation.predict import of_inputs
from manyhosts.export.description import BATCHES, TensorSpec
from manyhosts.loss.compute import pair
from manyhosts.training.run import Run
from manyhosts.training.trained_script import TrainedRun

# Arguments of a model that are targets: transformers' models compute the loss themselves
_TARGETS = ("labels",)
_MOST_SAMPLES = 255
# Sizes of the batches that are compared with each other to see what belongs to a sample
_TWO = (2, 17)
_FIX = "give the model tensors with one row for each sample"


class _Called(BaseException):
    """Leaves the script's step as soon as it calls the model."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = (args, {key: value for key, value in kwargs.items() if key not in _TARGETS})


class Program(nn.Module):
    """The model as a function of tensors alone: a tuple of tensors in, a tuple of tensors out, each with a batch."""

    def __init__(self, model: nn.Module, call: ModelCall, dtype: torch.dtype | None = None) -> None:
        """`dtype`: of the model's numbers, where they are not those of the inputs and outputs."""
        super().__init__()
        self.model, self._call, self._dtype = model, call, dtype

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Of inputs in the order of `ModelCall.inputs`, the outputs in the order of `ModelCall.outputs`."""
        if self._dtype is not None:
            inputs = tuple(each.to(self._dtype) if each.is_floating_point() else each for each in inputs)
        args, kwargs = self._call.arguments(inputs)
        found = named_outputs(self.model(*args, **kwargs))
        outputs = tuple(found[name] for name in self._call.kept)
        if self._dtype is None:
            return outputs
        return tuple(each.float() if each.dtype == self._dtype else each for each in outputs)


class ModelCall:
    """How one run's model is called."""

    def __init__(self, run: TrainedRun) -> None:
        """Show the model some real samples.

        Raises:
            ConfigError: there are none, or it takes or gives something else than tensors with a batch.
        """
        self.run = run
        self.dataset, self.set_name = _some_data(run)
        two, many = (self._leaves(self.samples(size)) for size in _TWO)
        paths, leaves = zip(*two, strict=True)
        self._spec, names = self._structure, _names(paths, run.model)
        self._constants: list[Any] = []
        self.inputs: list[TensorSpec] = []
        for name, one, other in zip(names, leaves, [leaf for _, leaf in many], strict=True):
            is_input = isinstance(one, Tensor) and one.dim() > 0 and (len(one), len(other)) == _TWO
            if not is_input and not _equal(one, other):
                raise ConfigError(
                    f"the model is called with {name}, which differs between batches and has no row for each sample",
                    where="the call of the model in the script",
                    fix=_FIX,
                )
            self._constants.append(None if is_input else one)
            if is_input:
                sides = tuple(one.shape[1:])
                self.inputs.append(TensorSpec(name=name, dtype=str(one.dtype).removeprefix("torch."), shape=sides))
        self._is_input = [each is None for each in self._constants]
        if not self.inputs:
            raise ConfigError("the model takes no tensor with a row for each sample", where="the model", fix=_FIX)
        # Texts of a dataset may be of several lengths, of which two batches can happen to have one.
        of_each_shape = {tuple(each.shape[1:] for each in row): row for row in self.batches()}
        self.inputs = [
            replace(spec, shape=_sides(spec.name, [shapes[place] for shapes in of_each_shape]))
            for place, spec in enumerate(self.inputs)
        ]
        self.kept: list[str] = []
        self.outputs: list[TensorSpec] = []
        self._find_outputs([*map(self.tensors, _TWO), *of_each_shape.values()])

    def program(self, model: nn.Module | None = None, dtype: torch.dtype | None = None) -> Program:
        """`model`, or that of the run, as a function of tensors."""
        return Program(self.run.model if model is None else model, self, dtype).eval()

    def arguments(self, inputs: Sequence[Any]) -> Any:
        """The arguments and named arguments that the script would give the model, with `inputs` in their places."""
        rest = iter(inputs)
        leaves = [next(rest) if is_input else constant for is_input, constant in
                  zip(self._is_input, self._constants, strict=True)]  # fmt: skip
        return pytree.tree_unflatten(leaves, self._spec)

    def samples(self, size: int, first: int = 0, of: Dataset[Any] | None = None, *, spread: bool = False) -> Any:
        """A batch of so many real samples, on the model's device; a set that has fewer gives some again.

        `spread`: over all of the set, where samples have numbers.
        """
        dataset, collate = of or self.dataset, self.run.data.collate
        if isinstance(dataset, IterableDataset):
            batch = (collate or default_collate)(list(islice(iter(dataset), first, first + size)))
        else:
            length = len(cast(Sized, dataset))
            indices = np.arange(first, first + size, dtype=np.int64) % length
            indices = np.linspace(0, length - 1, size).astype(np.int64) if spread else indices
            batch = Fetcher(dataset, seed=self.run.settings.seed, name=self.set_name, collate=collate)(0, indices)
        device = self.run.trainer.world.device
        return mapped(batch, lambda tensor: tensor.to(device))

    def batches(self) -> Iterator[tuple[Tensor, ...]]:
        """Inputs of real samples: batches of 1, 2 and 17, and of 17 up to 255 samples or the end of the set."""
        for size in BATCHES:
            yield self.tensors(size)
        if isinstance(self.dataset, IterableDataset):
            return
        most = min(_MOST_SAMPLES, len(cast(Sized, self.dataset)))
        for first in range(BATCHES[-1], most - BATCHES[-1] + 1, BATCHES[-1]):
            yield self.tensors(BATCHES[-1], first)

    def of_training(self, size: int) -> tuple[Tensor, ...]:
        """The inputs of so many samples, from the first to the last of the training set."""
        return self._tensors(self.samples(size, of=self.run.data.train, spread=True))

    def tensors(self, size: int, first: int = 0) -> tuple[Tensor, ...]:
        """The inputs of so many real samples."""
        return self._tensors(self.samples(size, first))

    def _tensors(self, batch: Any) -> tuple[Tensor, ...]:
        leaves = [leaf for _, leaf in self._leaves(batch)]
        return tuple(leaf for leaf, is_input in zip(leaves, self._is_input, strict=True) if is_input)

    def _leaves(self, batch: Any) -> list[tuple[Any, Any]]:
        """What the script calls its model with for a batch: paths and values."""

        def called(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _Called(args, kwargs)

        trainer = self.run.trainer
        handle = self.run.model.register_forward_pre_hook(called, with_kwargs=True)
        try:
            with torch.no_grad():
                if isinstance(trainer, Run) and len(trainer.models) == 1 and not trainer.evaluates:
                    of_inputs(self.run.model, batch)
                elif trainer.user_step is not None:
                    trainer.user_step(trainer.model, batch)
                else:
                    trainer.model(pair(batch)[0])
        except _Called as found:
            leaves, self._structure = pytree.tree_flatten_with_path(found.arguments)
            return leaves
        finally:
            handle.remove()
        if self.run.named:
            raise ConfigError(
                f"how the model {self.run.named!r} is called is not known: evaluate does not call it",
                where=trainer.called_in,
                fix=f"call models[{self.run.named!r}](…) in it",
            )
        raise ConfigError(
            "the script's step does not call the model itself", where=trainer.called_in, fix="call model(…) in it"
        )

    @torch.no_grad()
    def _find_outputs(self, batches: Sequence[tuple[Tensor, ...]]) -> None:
        answers = []
        with without_cache(self.run.model):
            for batch in batches:
                args, kwargs = self.arguments(batch)
                answers.append(named_outputs(self.run.model(*args, **kwargs)))
        for name, one in answers[0].items():
            all_of_it = [answer[name] for answer in answers if name in answer and answer[name].dim()]
            if [len(each) for each in all_of_it] != [len(batch[0]) for batch in batches]:
                continue  # such as a loss
            sides = _sides(name, [each.shape[1:] for each in all_of_it])
            self.kept.append(name)
            self.outputs.append(TensorSpec(name=name, dtype=str(one.dtype).removeprefix("torch."), shape=sides))
        if not self.kept:
            raise ConfigError("the model gives no tensor with a row for each sample", where="the model", fix=_FIX)


def _sides(name: str, shapes: Sequence[Sequence[int]]) -> tuple[int | None, ...]:
    """The sides of one sample, as these batches have it; None where they differ.

    Raises:
        ConfigError: they have more and fewer of them.
    """
    if len(set(map(len, shapes))) > 1:
        what = f"the tensor {name} has {len(shapes[0])} dimensions in one batch, and another number in others"
        raise ConfigError(what, where="the call of the model in the script", fix=_FIX)
    return tuple(sides[0] if len(set(sides)) == 1 else None for sides in zip(*shapes, strict=True))


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Within, a transformers model does not return the keys and values that it would generate text with."""
    config = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    if before is not None:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        if before is not None:
            config.use_cache = before  # type: ignore[union-attr]


def named_outputs(answer: Any) -> dict[str, Tensor]:
    """The tensors in what a model returned, by name: `output` where there is one alone."""
    if isinstance(answer, Tensor):
        return {"output": answer}
    if isinstance(answer, Mapping):
        return {str(key): value for key, value in answer.items() if isinstance(value, Tensor)}
    if isinstance(answer, tuple | list):
        return {f"output_{number}": each for number, each in enumerate(answer) if isinstance(each, Tensor)}
    raise ConfigError(
        f"the model returns a {type(answer).__name__}",
        where="the model",
        fix="return tensors, or a tuple or dict of them",
    )


def _some_data(run: TrainedRun) -> tuple[Dataset[Any], str]:
    """Samples that were held out, where there are some."""
    for kind in ("test", "validation", "train"):
        for name, dataset in run.data.sets().items():
            if name.partition("/")[0] == kind:
                return dataset, name
    raise ConfigError("the script has no data to try the model on", where="mh.Data(…)", fix="give it a set")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _names(paths: Sequence[Any], model: nn.Module) -> list[str]:
    """A name for each argument: that of the model's own parameter, or the key under which it is given."""
    known = [
        name for name, each in inspect.signature(model.forward).parameters.items() if each.kind < each.VAR_POSITIONAL
    ]
    if len(paths) == 1:
        known = ["inputs"]
    found: list[str] = []
    for path in paths:
        place = [getattr(entry, "key", getattr(entry, "idx", "")) for entry in path[1:]]
        first = place[0] if place else ""
        name = str(known[first] if isinstance(first, int) and first < len(known) else first)
        name = (
            str(place[-1]) if len(place) > 1 and isinstance(place[-1], str) else "_".join([name, *map(str, place[1:])])
        )
        found.append(name if name not in found else f"{name}_{len(found)}")
    return found
