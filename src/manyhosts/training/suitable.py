"""What a model or an optimizer must be for workers to train it together: found, or made so, before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import parameter
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from manyhosts.communication.world import World
from manyhosts.data import randomness
from manyhosts.data.data import Data
from manyhosts.data.fetch import Fetcher
from manyhosts.data.steps import mapped
from manyhosts.errors import ConfigError

Forward = Callable[[nn.Module, Any], Any]
"""Shows a batch to a model."""


def is_lazy(model: nn.Module) -> bool:
    """Whether `model` has tensors whose shapes its first forward pass decides."""
    return any(parameter.is_lazy(each) for each in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def make_whole(model: nn.Module, data: Data, forward: Forward, *, seed: int) -> None:
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
    samples = min(2, len(cast(Any, data.train)))
    training = model.training
    with randomness.kept():
        batch = fetcher(0, np.arange(samples, dtype=np.int64))
        randomness.seed_all(seed, randomness.MODEL)
        model.eval()
        forward(model, mapped(batch, _on(model)))
    model.train(training)
    if is_lazy(model):
        raise ConfigError(
            "the model has lazy layers that its forward pass does not use, so that nobody knows their shapes",
            where="mh.Trainer(model=…)",
            fix="give these layers their shapes, or take them out",
        )


def _on(model: nn.Module) -> Callable[[Tensor], Tensor]:
    device = next(model.parameters()).device
    return lambda tensor: tensor.to(device)


def check_tensors(model: nn.Module) -> None:
    """See that every tensor of `model` can be given to another worker, and every gradient be summed.

    Raises:
        ConfigError: one cannot.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        if tensor.is_quantized or tensor.layout is not torch.strided:
            raise ConfigError(
                f"{name} is a {kind} tensor, which workers cannot send each other",
                where="mh.Trainer(model=…)",
                fix="keep it as a dense tensor, and make the other of it in forward",
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"the embedding {name!r} gives sparse gradients, and workers sum dense ones",
                where="mh.Trainer(model=…)",
                fix="leave sparse=True out, and take Adam or SGD in place of SparseAdam",
            )


def check_optimizer(optimizer: Optimizer, world: World) -> None:
    """See that `optimizer` steps by gradients alone.

    Raises:
        ConfigError: it computes the loss itself, or wants sparse gradients.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} computes the loss several times in a step, and a step here is one gradient",
            where="mh.Trainer(optimizer=…)",
            fix="choose an optimizer whose step() takes no closure, such as AdamW",
        )
    if isinstance(optimizer, torch.optim.SparseAdam) and world.is_shared:
        raise ConfigError(
            "SparseAdam wants sparse gradients, and workers sum dense ones",
            where="mh.Trainer(optimizer=…)",
            fix="choose Adam, and leave sparse=True out of embeddings",
        )
